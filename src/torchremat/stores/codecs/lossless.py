"""Codecs that lose nothing: masks in bits, tensors of two values in bits, indices in the smallest integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from torchremat.stores.codecs.codec import Encoded, Form


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
    """Return a tensor of one dimension with one value where a mask is set and another where it is not."""
    # A table row of eight values per byte is several times faster than any operator that tests each bit.
    numbers = torch.arange(256, dtype=torch.int32, device=packed.device)
    bits = (numbers.unsqueeze(1) >> torch.arange(8, dtype=torch.int32, device=packed.device)).bitwise_and_(1)
    rows = torch.full((256, 8), false, dtype=dtype, device=packed.device).masked_fill_(bits.bool(), true)
    return rows.index_select(0, packed.to(torch.int32)).view(-1)[:count]


_INTEGERS = (torch.int16, torch.int32, torch.int64)
# Floats are compared bit for bit: 0.0 and -0.0 are two values, and a NaN is one.
_BITS_OF = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}
# Elements to test before testing all. Real activations show a third value among so many.
_SAMPLE = 64


@dataclass(frozen=True, slots=True)
class MaskBits:
    """A mask in bits: an eighth of its bytes."""

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return a bool tensor in bits; None for any other."""
        if tensor.dtype is not torch.bool or tensor.numel() < 2:
            return None
        return Encoded(pack_bits(tensor), Form(tensor.shape, tensor.dtype))

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the mask."""
        return spread_bits(payload, form.shape.numel(), True, False, torch.bool).view(form.shape)


@dataclass(frozen=True, slots=True)
class TwoValues:
    """A float tensor of at most two values (a scaled dropout mask, for example), in one bit per element.

    Values are compared by their bits. Only on the CPU: elsewhere the host would have to wait for the device to know
    what to store, for every tensor; and there torch's own dropout saves a bool mask.
    """

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return the tensor in bits if it holds two values; None for any other."""
        integer = _BITS_OF.get(tensor.dtype)
        if integer is None or tensor.device.type != "cpu" or tensor.numel() * tensor.element_size() < 32:
            return None
        flat = tensor.reshape(-1).view(integer).numpy()
        first = flat[0]
        for part in (flat[:: max(1, flat.size // _SAMPLE)], flat):
            others = part != first
            second = part[others.argmax()]  # the first one again if all are equal
            if (others != (part == second)).any() and second != first:
                return None
        mask = torch.from_numpy(others)
        return Encoded(pack_bits(mask), Form(tensor.shape, tensor.dtype, (int(first), int(second))))

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the tensor."""
        first, second = form.numbers
        flat = spread_bits(payload, form.shape.numel(), second, first, _BITS_OF[form.dtype])
        return flat.view(form.dtype).view(form.shape)


@dataclass(frozen=True, slots=True)
class NarrowIndices:
    """Integers in the fewest of 1, 8, 16 and 32 bits that hold the whole range from the smallest to the largest.

    `encode` has to know these two, so on devices other than the CPU the host waits for the device.
    """

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return an integer tensor in smaller integers; None for any other tensor, and if no smaller integers exist."""
        if tensor.dtype not in _INTEGERS or tensor.numel() * tensor.element_size() < 8:
            return None
        least, most = torch.stack(torch.aminmax(tensor)).tolist()
        spread, size = most - least, tensor.element_size()
        if spread < 2:
            return Encoded(pack_bits(tensor != least), Form(tensor.shape, tensor.dtype, (1, least, most)))
        if spread < 2**8:
            payload = (tensor - least).to(torch.uint8)
            return Encoded(payload, Form(tensor.shape, tensor.dtype, (8, least, most)))
        # Why the halves? Few operators support unsigned integers of 16 and 32 bits. The difference, at most 2**bits -
        # 1, is shifted by 2**(bits - 1) into the signed range; the shift comes after the difference, since `least` plus
        # a half may overflow.
        for bits, dtype in ((16, torch.int16), (32, torch.int32)):
            if spread < 2**bits and size * 8 > bits:
                payload = (tensor.to(torch.int64) - least).sub_(2 ** (bits - 1)).to(dtype)
                return Encoded(payload, Form(tensor.shape, tensor.dtype, (bits, least, most)))
        return None

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the integers."""
        bits, least, most = form.numbers
        if bits == 1:
            return spread_bits(payload, form.shape.numel(), most, least, form.dtype).view(form.shape)
        wide = payload.to(torch.int64)
        if bits > 8:
            wide.add_(2 ** (bits - 1))
        return wide.add_(least).to(form.dtype)
