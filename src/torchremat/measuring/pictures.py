"""Files with pictures in them: matplotlib is asked for when one is, and its global state is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchremat.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(path: str | Path, *, width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that can be saved at `path`, whose ending says which kind of picture.

    Raises:
        UnsupportedError: matplotlib is not installed, or knows no pictures with such an ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed. Install it with: pip install 'torchremat[plot]'"
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), dpi=160, layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending not in kinds:  # without one, matplotlib would write a file of another name
        raise UnsupportedError(f"{path}: the ending says which kind of picture, one of {', '.join(sorted(kinds))}.")
    return figure
