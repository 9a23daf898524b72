"""What all pictures by matplotlib share: the check before one is drawn, an empty figure, its colours and its legend.

matplotlib is imported on demand, and its global state is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchremat.errors import UnsupportedError
from torchremat.views.steps import Phase

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

# After Okabe and Ito's palette, which the colour-blind can tell apart; the blues differ in lightness.
COLOURS: dict[Phase, str] = {
    "forward": "#9AD0F0", "gradient": "#8FC9A5", "recompute": "#E69F00", "backward": "#3D85B8",
}  # fmt: skip
INK = "#333333"


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


def draw_legend(figure: Figure, entries: Mapping[str, Artist], order: Iterable[str], **style: Any) -> None:
    """Draw one legend above all panels, with the entries that there are, in an order of their names."""
    names = [name for name in order if name in entries]
    handles = [entries[name] for name in names]
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False, labelcolor=INK, **style)
