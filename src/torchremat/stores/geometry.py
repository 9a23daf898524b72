"""The place of a tensor in its storage: an interval of bytes, or a pattern with gaps."""

from __future__ import annotations

from typing import Protocol

import torch


class Lies(Protocol):
    """Something with a place in a storage, as a tensor has; offset and strides in elements."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


def span_of(place: Lies) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last; it has at least one element."""
    last = sum((size - 1) * stride for size, stride in zip(place.size, place.stride, strict=True))
    return place.offset * place.dtype.itemsize, (place.offset + last + 1) * place.dtype.itemsize


def has_gaps(place: Lies) -> bool:
    """Return whether a tensor skips bytes of its span and repeats no element.

    A tensor whose elements overlap other than by strides of 0 counts as having no gaps: all of its span may be copied,
    but nothing may be written to it through its own strides.
    """
    gaps = False
    reach = 1
    for stride, size in sorted(zip(place.stride, place.size, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride < reach:
            return False
        gaps = gaps or stride > reach
        reach = stride * (size - 1) + reach
    return gaps


def without_repeats(place: Lies) -> tuple[int, ...]:
    """Return the shape of a tensor, with size 1 for each dimension of stride 0."""
    return tuple(1 if stride == 0 and size else size for size, stride in zip(place.size, place.stride, strict=True))


def missing(start: int, stop: int, covered: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of an interval that no covered interval contains, in order.

    Args:
        start: Its first byte.
        stop: The byte after its last.
        covered: Intervals in any order that do not overlap.
    """
    found: list[tuple[int, int]] = []
    for left, right in sorted(covered):
        if right <= start or left >= stop:
            continue
        if left > start:
            found.append((start, left))
        start = max(start, right)
    if start < stop:
        found.append((start, stop))
    return found
