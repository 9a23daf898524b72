"""Files with pictures in them: matplotlib is asked for when one is, and its global state is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchremat.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(path: str | Path) -> None:
    """Raise where no picture could be drawn into a file, before there is anything to draw.

    Raises:
        UnsupportedError: matplotlib is not installed, or knows no pictures with such an ending.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed. Install it with: pip install 'torchremat[plot]'"
        ) from error
    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:  # without one, a file of another name would be written
        raise UnsupportedError(f"{path}: the ending says which kind of picture, one of {', '.join(sorted(kinds))}.")


def new_figure(path: str | Path, *, width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that can be saved at `path`, whose ending says which kind of picture.

    Raises:
        UnsupportedError: See `check_picture`.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), dpi=160, layout="constrained")
