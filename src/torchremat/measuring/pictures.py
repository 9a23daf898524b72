"""Picture files: matplotlib is imported on demand, and its global state is not touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchremat.errors import UnsupportedError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(path: str | Path) -> None:
    """Raise if no picture can be drawn into a file, before any work for it.

    Raises:
        UnsupportedError: matplotlib is not installed, or does not support this suffix.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            "a plot needs matplotlib, which is not installed. Install it with: pip install 'torchremat[plot]'"
        ) from error
    kinds = Figure().canvas.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".").lower() not in kinds:  # without one, matplotlib would choose the name
        raise UnsupportedError(f"{path}: the file ending sets the format, one of {', '.join(sorted(kinds))}.")


def new_figure(path: str | Path, *, width_inches: float, height_inches: float) -> Figure:
    """Return an empty figure that can be saved at `path`; the suffix sets the format.

    Raises:
        UnsupportedError: See `check_picture`.
    """
    check_picture(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width_inches, height_inches), dpi=160, layout="constrained")
