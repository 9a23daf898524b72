"""What backward needs of a saved tensor, if it is less than its values."""

from __future__ import annotations

from typing import Literal

import torch

Need = Literal["shape", "mask"]

# By node and slot. Their formulas ask these for their shape alone, ...
_SHAPE = {
    "AdaptiveAvgPool2DBackward0.self",
    "AdaptiveMaxPool2DBackward0.self",
    "AvgPool2DBackward0.self",
    "GatherBackward0.self",
    "MaxPool2DWithIndicesBackward0.self",
    "NativeLayerNormBackward0.bias",
    "NllLossBackward0.self",
    "NllLoss2DBackward0.self",
}
# ... and these for which of two cases each element is.
_MASK = {
    "HardtanhBackward0.self",
    "LeakyReluBackward0.self",
    "ReluBackward0.result",
    "ThresholdBackward0.self",
}


def need_of(node: str, slot: str, dtype: torch.dtype) -> Need | None:
    """Return what would do in the place of a saved tensor; None if its values are needed."""
    place = f"{node}.{slot}"
    if place in _SHAPE:
        return "shape"
    return "mask" if place in _MASK or dtype == torch.bool else None
