"""A mask packed into bits, and tensors built from it."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """Return a mask in bits: uint8, one dimension, the last byte filled up with zeros.

    Args:
        mask: Bool, contiguous, at least one element.
    """
    if mask.device.type != "cpu":
        return pack_bits_anywhere(mask)
    packed = numpy.packbits(mask.reshape(-1).numpy(), bitorder="little")
    # Allocated by torch, since that allocator is the one that is measured.
    return torch.empty(packed.shape, dtype=torch.uint8).copy_(torch.from_numpy(packed))


def pack_bits_anywhere(mask: Tensor) -> Tensor:
    """Return the same as `pack_bits`, by operators that every device supports."""
    filled = mask.new_zeros(-(-mask.numel() // 8) * 8)
    filled[: mask.numel()] = mask.reshape(-1)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (filled.view(torch.uint8).view(-1, 8) << shifts).sum(1, dtype=torch.uint8)


def spread_bits(packed: Tensor, count: int, true: float | bool, false: float | bool, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one dimension with one value where a mask is set and another where it is not.

    Args:
        packed: The result of `pack_bits`.
        count: Elements of the mask.
        true: The value where it is set.
        false: The value where it is not.
        dtype: The dtype of the result.
    """
    # A table row of eight values per byte is several times faster than any operator that tests each bit.
    numbers = torch.arange(256, dtype=torch.int32, device=packed.device)
    bits = (numbers.unsqueeze(1) >> torch.arange(8, dtype=torch.int32, device=packed.device)).bitwise_and_(1)
    rows = torch.full((256, 8), false, dtype=dtype, device=packed.device).masked_fill_(bits.bool(), true)
    return rows.index_select(0, packed.to(torch.int32)).view(-1)[:count]
