"""Saved tensors of which backward needs less than the values."""

from __future__ import annotations

from typing import Literal

import torch

from torchremat.stores.slots import NEEDS, Shape

Need = Literal["shape", "mask"]


def need_of(node: str, slot: str, dtype: torch.dtype) -> Need | None:
    """Return the lesser need that suffices for a saved tensor; None if backward needs its values."""
    need = NEEDS.get(node, {}).get(slot)
    if isinstance(need, Shape):
        return "shape"
    return "mask" if need is not None or dtype == torch.bool else None
