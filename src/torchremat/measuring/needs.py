"""What backward needs of a saved tensor, if it is less than its values."""

from __future__ import annotations

from typing import Literal

import torch

from torchremat.stores.slots import NEEDS, Shape

Need = Literal["shape", "mask"]


def need_of(node: str, slot: str, dtype: torch.dtype) -> Need | None:
    """Return what would do in the place of a saved tensor; None if its values are needed."""
    need = NEEDS.get(node, {}).get(slot)
    if isinstance(need, Shape):
        return "shape"
    return "mask" if need is not None or dtype == torch.bool else None
