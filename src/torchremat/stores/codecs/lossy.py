"""Codecs that lose digits, each with a bound: bfloat16, 8-bit integers and 8-bit floats with scales.

NOTE [ What a lossy codec promises ]
Each element comes back with an error of at most `bound`, checked as a property over zeros, subnormal numbers and the
whole range of the dtype. Infinities come back as infinities of the same sign, and NaNs as NaNs: each code reserves
values for them, so the encoder need not inspect the tensor first, which would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, nan

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.stores.codecs.codec import Encoded, Form

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Elements encoded at a time, which bounds the temporary memory at some 64 MiB.
_AT_A_TIME = 2**21
# A group costs 4 or 8 bytes in addition to its codes; below this size nothing is left of the saving.
_SMALLEST_GROUP = 16


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which codes are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _check_group(group: int | None) -> None:
    if group is not None and group < _SMALLEST_GROUP:
        raise UnsupportedError(
            f"group={group} saves no bytes, since each group costs some. Use {_SMALLEST_GROUP} or more."
        )


@dataclass(frozen=True, slots=True)
class BFloat16:
    """float32 as bfloat16: half of the bytes, an error of at most 2**-8 of the value. Other dtypes stay as they are.

    Finite values stay finite: a value that would round to infinity becomes the largest bfloat16.
    """

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return a float32 tensor as bfloat16; None for any other."""
        if tensor.dtype is not torch.float32:
            return None
        payload = tensor.to(torch.bfloat16)
        # On the CPU a test costs less than the repair. See NOTE [ What a lossy codec promises ]
        if tensor.device.type != "cpu" or bool(payload.isinf().any()):
            most = torch.finfo(torch.bfloat16).max
            payload = torch.where(tensor.isinf(), payload, payload.clamp(-most, most))
        return Encoded(payload, Form(tensor.shape, tensor.dtype))

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return it as float32."""
        return payload.to(form.dtype)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return 2**-8 of each value, and half of the smallest subnormal bfloat16."""
        exact = tensor.to(torch.float64)
        return torch.where(exact.isfinite(), exact.abs() * 2.0**-8 + 2.0**-134, 0.0)


@dataclass(frozen=True, slots=True)
class Int8:
    """Floats as integers of 8 bits, each group with its own scale: an error of at most 1/252 of its largest value.

    The last rounding to the dtype of the tensor is added to that.

    Args:
        group: Consecutive elements that share a scale.

    Raises:
        UnsupportedError: The groups are too small to save anything.
    """

    group: int = 128

    def __post_init__(self) -> None:
        _check_group(self.group)

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return a tensor of floats in 8 bits and scales; None for any other."""
        return _encode(tensor, self.group, torch.int8, _to_int8)

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the floats."""
        return _decode(payload, form, torch.int8, _from_int8)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return 1/252 of the largest value of each group, and a rounding."""
        largest = _largest_of_groups(tensor, self.group)
        rounding = torch.finfo(tensor.dtype).eps / 2 + 2.0**-20
        return _where_finite(tensor, largest * (1 / 252 + rounding))


@dataclass(frozen=True, slots=True)
class Float8:
    """Floats as float8_e4m3fn, scaled: an error of at most 2**-4 of the value, and 1/425984 of the largest one.

    The last rounding to the dtype of the tensor is added to that.

    Args:
        group: Consecutive elements that share a scale; None for one scale for the tensor.

    Raises:
        UnsupportedError: The groups are too small to save anything.
    """

    group: int | None = None

    def __post_init__(self) -> None:
        _check_group(self.group)

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return a tensor of floats in 8 bits and scales; None for any other."""
        return _encode(tensor, self.group or tensor.numel(), torch.float8_e4m3fn, _to_float8)

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the floats."""
        return _decode(payload, form, torch.float8_e4m3fn, _from_float8)

    def bound(self, tensor: Tensor) -> Tensor:
        """Return 2**-4 of each value, a part of the largest value of its group, and a rounding."""
        largest = _largest_of_groups(tensor, self.group or tensor.numel())
        # Below 2**-6 in the codes' unit e4m3 has steps of 2**-9: half a step, out of 416.
        rounding = torch.finfo(tensor.dtype).eps
        return _where_finite(
            tensor, tensor.to(torch.float64).abs() * (2.0**-4 + rounding) + largest * (2.0**-10 / 416 + 2.0**-20)
        )


def _where_finite(tensor: Tensor, bound: Tensor) -> Tensor:
    """Return the bound plus the error of numbers that underflow to zero; 0 for elements that are not finite."""
    info, wide = torch.finfo(tensor.dtype), torch.finfo(_wide(tensor.dtype))
    least = max(info.smallest_normal * info.eps, wide.smallest_normal)
    return torch.where(tensor.isfinite(), bound.view(tensor.shape) + least, 0.0)


def _largest_of_groups(tensor: Tensor, group: int) -> Tensor:
    """Return for each element the largest finite magnitude of its group, as float64, in the shape of the tensor."""
    flat = tensor.reshape(-1)
    largest = _scales(flat, group).to(torch.float64)
    return largest.repeat_interleave(group)[: flat.numel()].view(tensor.shape)


# Layout of a payload, in bytes: the scales of all groups, then the codes of all elements.


def _encode(tensor: Tensor, group: int, code: torch.dtype, to_codes: Callable[[Tensor], Tensor]) -> Encoded | None:
    count, wide = tensor.numel(), _wide(tensor.dtype)
    head = -(-count // group) * wide.itemsize
    if tensor.dtype not in _FLOATS or head + count >= tensor.numel() * tensor.element_size():
        return None
    flat = tensor.reshape(-1)
    payload = torch.empty(head + count, dtype=torch.uint8, device=tensor.device)
    scales, codes = _scales(flat, group), payload[head:].view(code)
    # A group without a normal number counts as zeros.
    scales.masked_fill_(scales < torch.finfo(wide).smallest_normal, 0.0)
    payload[:head].view(wide).copy_(scales)
    scales.masked_fill_(scales == 0.0, 1.0)
    for block in _blocks(count, group):
        ratios = block.rows_of(flat, wide).div_(scales[block.groups].unsqueeze(1))
        codes[block.elements] = to_codes(ratios).view(-1)[: block.size]
    return Encoded(payload, Form(tensor.shape, tensor.dtype, (group,)))


def _decode(payload: Tensor, form: Form, code: torch.dtype, from_codes: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    (group,), count, wide = form.numbers, form.shape.numel(), _wide(form.dtype)
    head = -(-count // group) * wide.itemsize
    scales, codes = payload[:head].view(wide), payload[head:].view(code)
    flat = torch.empty(count, dtype=form.dtype, device=payload.device)
    for block in _blocks(count, group):
        values = from_codes(block.rows_of(codes, code), scales[block.groups].unsqueeze(1))
        flat[block.elements] = values.view(-1)[: block.size]
    return flat.view(form.shape)


def _scales(flat: Tensor, group: int) -> Tensor:
    """Return the largest finite magnitude of each group."""
    count, wide = flat.numel(), _wide(flat.dtype)
    scales = torch.zeros(-(-count // group), dtype=wide, device=flat.device)
    for block in _blocks(count, group):
        rows = block.rows_of(flat, wide).abs_()
        rows.masked_fill_(~(rows <= torch.finfo(wide).max), 0.0)
        scales[block.groups] = torch.maximum(scales[block.groups], rows.amax(1))
    return scales


@dataclass(frozen=True, slots=True)
class _Block:
    """Elements that are processed at a time: whole groups, or a part of one."""

    elements: slice
    groups: slice
    columns: int

    @property
    def size(self) -> int:
        return self.elements.stop - self.elements.start

    def rows_of(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a copy of the elements in the dtype, one row per group; the last row is padded with zeros."""
        rows = self.groups.stop - self.groups.start
        filled = torch.empty(rows, self.columns, dtype=dtype, device=flat.device)
        filled.view(-1)[: self.size] = flat[self.elements]
        filled.view(-1)[self.size :] = 0
        return filled


def _blocks(count: int, group: int) -> Iterator[_Block]:
    if group <= _AT_A_TIME:
        step = _AT_A_TIME // group * group
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield _Block(slice(start, stop), slice(start // group, -(-stop // group)), group)
        return
    for number, first in enumerate(range(0, count, group)):
        last = min(first + group, count)
        for start in range(first, last, _AT_A_TIME):
            stop = min(start + _AT_A_TIME, last)
            yield _Block(slice(start, stop), slice(number, number + 1), stop - start)


def _to_int8(ratios: Tensor) -> Tensor:
    codes = ratios.mul_(126.0).round_()
    return codes.nan_to_num_(nan=-128.0, posinf=127.0, neginf=-127.0).to(torch.int8)


def _from_int8(codes: Tensor, scales: Tensor) -> Tensor:
    # Compute the ratio first. It is at most 1, so the largest value comes back as it was and nothing overflows.
    values = codes.to(scales.dtype).div_(126.0).mul_(scales)
    for code, value in ((127, inf), (-127, -inf), (-128, nan)):
        values.masked_fill_(codes == code, value)
    return values


def _to_float8(ratios: Tensor) -> Tensor:
    # e4m3fn has NaNs but no infinities: its largest value, 448, stands for them, and numbers end one value below.
    return ratios.mul_(416.0).clamp_(-448.0, 448.0).to(torch.float8_e4m3fn)


def _from_float8(codes: Tensor, scales: Tensor) -> Tensor:
    values = codes.to(scales.dtype)
    infinite = values.abs() == 448.0
    signed = torch.where(infinite, values * inf, 0.0)
    return torch.where(infinite, signed, values.div_(416.0).mul_(scales))
