"""Tensors without data that carry nothing but an edge of the autograd graph."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def phony_of(device: torch.device, *, requires_grad: bool) -> Tensor:
    """Return a tensor without elements, always the same one for a device.

    A Function that returns it has to detach it, or its node would stay on the shared tensor.
    """
    return torch.empty(0, device=device, requires_grad=requires_grad)
