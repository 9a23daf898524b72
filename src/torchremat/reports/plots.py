"""Measured steps in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torchremat.measuring.curves import curve_of, draw
from torchremat.measuring.measurement import Measurement


def plot_measurements(
    measurements: Mapping[str, Measurement], path: str | Path, *, budgets: Mapping[str, int] | None = None
) -> None:
    """Draw the live bytes of several measured steps side by side into an image file; its ending says which kind.

    Args:
        measurements: By the name that each has in the picture.
        path: Of the file.
        budgets: In bytes, by the same names, for those that have one.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    limits = budgets or {}
    draw(
        [
            curve_of(own.timeline, name=name, before_bytes=own.before_bytes, budget_bytes=limits.get(name))
            for name, own in measurements.items()
        ],
        path,
    )
