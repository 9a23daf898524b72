"""Pinned host memory, handed out in exact sizes.

torch rounds each pinned allocation up to a power of two, and each takes milliseconds. So the pool allocates chunks that
are powers of two, and cuts requests out of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from torchremat.stores.base import Content
from torchremat.stores.extents import Extent, Extents

# Smaller chunks cost more calls, larger ones leave more pinned memory unused.
_CHUNK_BYTES = 64 * 2**20
# So that copies begin at the granularity of the device's transfers.
_ALIGNMENT_BYTES = 512
# How long to wait for blocks that copies are about to leave before doing without, in seconds.
_WAIT_S = 0.5
_LOOK_S = 0.0002


class PinnedBlock:
    """Pinned memory for one tensor. The taker gives it back; copies from or to it may still run at that time."""

    __slots__ = ("_chunk", "_extent", "_uses")

    def __init__(self, chunk: _Chunk, extent: Extent) -> None:
        self._chunk = chunk
        self._extent = extent
        self._uses: list[torch.Event] = []

    def tensor(self, content: Content) -> Tensor:
        """Return the memory as a tensor in a line. See NOTE [ In a line ]."""
        memory = self._chunk.memory[self._extent.start : self._extent.start + content.size_bytes]
        return memory.view(content.dtype)

    def used(self, event: torch.Event) -> None:
        """Note a copy that ends at an event."""
        self._uses = [use for use in self._uses if not use.query()]
        self._uses.append(event)

    def is_left(self) -> bool:
        """Return whether all copies have ended."""
        return all(use.query() for use in self._uses)

    def free(self) -> None:
        """Make the memory available to the next request."""
        self._chunk.extents.give([self._extent])


class _Chunk:
    """One pinned allocation, and its free bytes."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.extents = Extents()
        self.extents.grow(memory.numel())


def pinned_memory(size: int) -> Tensor:
    """Return pinned memory, as bytes."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


class Pool:
    """Pinned memory that is reused.

    Args:
        limit_bytes: The most that is pinned; all chunks count, used or not.
        allocate: Allocates a number of bytes of pinned memory.
    """

    def __init__(self, limit_bytes: int, allocate: Callable[[int], Tensor] = pinned_memory) -> None:
        self.limit_bytes = limit_bytes
        self.pinned_bytes = 0
        self._allocate = allocate
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._given: deque[PinnedBlock] = deque()  # See NOTE [ What a finalizer may do ]
        self._leaving: list[PinnedBlock] = []  # given back while copies ran

    def take(self, size: int) -> PinnedBlock | None:
        """Return a block of a given size in bytes; None if no more memory can be pinned."""
        size = -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        until_s = time.monotonic() + _WAIT_S
        while True:
            with self._lock:
                self._settle()
                place = self._cut(size)
                if place is None and self._grow(size):
                    place = self._cut(size)
                if place is not None or not self._leaving or time.monotonic() > until_s:
                    return place
            time.sleep(_LOOK_S)

    def give(self, place: PinnedBlock) -> None:
        """Give a block back. A finalizer may call it."""
        self._given.append(place)

    def _settle(self) -> None:
        while self._given:
            self._leaving.append(self._given.popleft())
        leaving = []
        for place in self._leaving:
            if place.is_left():
                place.free()
            else:
                leaving.append(place)
        self._leaving = leaving

    def _cut(self, size: int) -> PinnedBlock | None:
        for chunk in self._chunks:
            taken = chunk.extents.take_one(size)
            if taken is not None:
                return PinnedBlock(chunk, taken[0])
        return None

    def _grow(self, size: int) -> bool:
        """Pin one more chunk, the smallest power of two that suffices, in place of unused ones if need be."""
        needed = max(1 << (size - 1).bit_length(), min(_CHUNK_BYTES, 1 << (self.limit_bytes.bit_length() - 1)))
        for chunk in list(self._chunks):
            if self.pinned_bytes + needed <= self.limit_bytes:
                break
            if chunk.extents.free_bytes == chunk.memory.numel():
                self._chunks.remove(chunk)
                self.pinned_bytes -= chunk.memory.numel()
        if self.pinned_bytes + needed > self.limit_bytes:
            return False
        try:
            memory = self._allocate(needed)
        except RuntimeError:  # the system refuses to pin more
            return False
        self._chunks.append(_Chunk(memory))
        self.pinned_bytes += needed
        return True
