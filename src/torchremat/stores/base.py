"""The parts of every store: counts and limit, metadata of tensors, copies of the store, release of tensors.

A store may go on reading after `put` has returned, in its own threads: the tensor that it was given, or a tensor
made from it. The caller keeps the first alive, and may keep the second alive too: its memory is then freed where the
caller drops it, and not by some thread at an arbitrary time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from torchremat.errors import BudgetError, UnsupportedError
from torchremat.tensors.handles import Handle
from torchremat.tensors.metadata import dense
from torchremat.tensors.sizes import format_bytes, parse_bytes


@dataclass(frozen=True, kw_only=True)
class StoreStatistics:
    """The counts of a store since it was made; the same fields for every store.

    Attributes:
        limit_bytes: The most that it may hold; None without a limit.
        stored_bytes: The bytes that it holds now, for handles that are alive.
        peak_stored_bytes: The most that it has held at any time.
        copied_out_bytes: The bytes copied into it, in all.
        copied_in_bytes: The bytes copied back from it, in all; a tensor that is asked for twice counts twice.
        refused: How many tensors found no room.
        failed: How many tensors it took and then could not write, so that they stayed in place.
    """

    limit_bytes: int | None
    stored_bytes: int = 0
    peak_stored_bytes: int = 0
    copied_out_bytes: int = 0
    copied_in_bytes: int = 0
    refused: int = 0
    failed: int = 0


class Ledger:
    """Counts for a store, and reserves bytes before any are touched. Safe to use from all threads.

    NOTE [ What a finalizer may do ]
    A handle may be dropped anywhere, also by the cycle collector, which starts in the middle of any line: even one that
    holds a lock of the store, in the same thread. So a finalizer takes no lock. It appends to a deque, which is atomic,
    and the next holder of the lock accounts for the appended items.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._counts = StoreStatistics(limit_bytes=limit_bytes)

    @property
    def limit_bytes(self) -> int | None:
        """The most bytes that may be stored; None without a limit."""
        return self._counts.limit_bytes

    def reserve(self, size: int) -> bool:
        """Reserve bytes for one tensor, or count the tensor as refused if that would exceed the limit; never raises."""
        with self._lock:
            self._settle()
            if self.limit_bytes is not None and self._counts.stored_bytes + size > self.limit_bytes:
                self._add(refused=1)
                return False
            self._add(stored_bytes=size)
            return True

    def release(self, size: int) -> None:
        """Give reserved bytes back. See NOTE [ What a finalizer may do ]."""
        self._released.append(size)

    def refuse(self, size: int) -> None:
        """Give back reserved bytes for which there turned out to be no room."""
        with self._lock:
            self._add(stored_bytes=-size, refused=1)

    def fail(self, size: int) -> None:
        """Give back reserved bytes that could not be written."""
        with self._lock:
            self._add(stored_bytes=-size, failed=1)

    def copied(self, *, out_bytes: int = 0, in_bytes: int = 0) -> None:
        """Count bytes that were copied out to the store, or back in."""
        with self._lock:
            self._add(copied_out_bytes=out_bytes, copied_in_bytes=in_bytes)

    def statistics(self) -> StoreStatistics:
        """Return the current counts."""
        with self._lock:
            self._settle()
            return self._counts

    def _settle(self) -> None:
        released_bytes = 0
        while self._released:
            released_bytes += self._released.popleft()
        if released_bytes:
            self._add(stored_bytes=-released_bytes)

    def _add(self, **more: int) -> None:
        counts = replace(self._counts, **{name: getattr(self._counts, name) + size for name, size in more.items()})
        peak_bytes = max(counts.peak_stored_bytes, counts.stored_bytes)
        self._counts = replace(counts, peak_stored_bytes=peak_bytes)


def bytes_of(size: int | str, option: str) -> int:
    """Return the bytes of a size as a user writes it.

    Args:
        size: Bytes, or a size such as `"6GiB"`.
        option: The option's name in messages, for example `"Host(limit=...)"`.

    Raises:
        UnsupportedError: It is not a size.
    """
    try:
        return parse_bytes(size)
    except BudgetError as error:
        raise UnsupportedError(f"{option}: {error}") from None


def limit_of(limit: int | str | None, option: str) -> int | None:
    """Return the bytes of a limit, which may be None; else as `bytes_of`.

    Raises:
        UnsupportedError: It is not a size.
    """
    return None if limit is None else bytes_of(limit, option)


def check_store(store: object) -> None:
    """Raise an UnsupportedError if a user's `store` is none."""
    if isinstance(store, type) or not callable(getattr(store, "put", None)):
        found = store.__name__ if isinstance(store, type) else repr(store)
        raise UnsupportedError(f"store={found}: expected an object with a method `put`, such as torchremat.Host().")


def statistics_of(store: object) -> StoreStatistics | None:
    """Return the counts of a store, None if it has none. See NOTE [ What a store may have as well ]."""
    found = getattr(store, "statistics", None)
    return found if isinstance(found, StoreStatistics) else None


def limit_bytes_of(store: object) -> int | None:
    """Return the bytes that a store takes at most; None if it has no limit, or does not count."""
    found = statistics_of(store)
    return None if found is None else found.limit_bytes


def filled(statistics: StoreStatistics) -> str:
    """Return how full a store is, in words."""
    stored = format_bytes(statistics.stored_bytes)
    if statistics.limit_bytes is None:
        return f"holds {stored}"
    return f"holds {stored} of {format_bytes(statistics.limit_bytes)}"


class Remade:
    """What copies of a model share, and what another process makes anew: empty, from the same arguments.

    The file, threads and locks of a store belong to one process; a copy of them would close the file of the original.
    """

    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments."""
        made = super().__new__(cls)
        made._made_of = args, kwargs
        return made

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        args, kwargs = self._made_of
        return partial(type(self), **kwargs), args


def settle(handle: Handle) -> None:
    """Wait until a store no longer reads the tensor it was given; no wait for a store that copied at once.

    See NOTE [ What a store may have as well ].
    """
    wait: Callable[[], None] | None = getattr(handle, "settle", None)
    if wait is not None:
        wait()


@runtime_checkable
class Landing(Protocol):
    """A store whose copies may end after `put` has returned, and that can be waited for."""

    def land(self, *, all_of_it: bool) -> None:
        """Wait until the memory of all tensors that were put is free, or all except what may always be in flight."""
        ...


def land(store: object, *, all_of_it: bool) -> None:
    """Wait until a store has released the tensors it was given, if it is one that releases them later."""
    if isinstance(store, Landing):
        store.land(all_of_it=all_of_it)


class _PendingReads(threading.local):
    held: list[object] | None = None


_read = _PendingReads()


@contextmanager
def held_in(held: list[object]) -> Generator[None]:
    """Collect in `held` the tensors that stores go on reading after a `put` in the block."""
    outer, _read.held = _read.held, held
    try:
        yield
    finally:
        _read.held = outer


def goes_on_reading(tensor: object) -> None:
    """Declare, in `put`, that the store reads a tensor after it has returned."""
    if _read.held is not None:
        _read.held.append(tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """The metadata that a store needs to give a tensor back.

    NOTE [ In a line ]
    Kernels are selected by strides, and the selected kernel decides the rounding. So a store holds the elements in
    memory order, in one dimension and each once, and the returned tensor has its original strides, without any gaps.

    Attributes:
        shape: Its shape.
        strides: The strides that it comes back with, 0 where an element stands for several.
        dtype: Its dtype.
        device: Its device.
        size_bytes: The bytes of its elements, each once.
    """

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    size_bytes: int

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return fresh memory for its elements in a line, on its own device or another."""
        count = self.size_bytes // self.dtype.itemsize
        return torch.empty(count, dtype=self.dtype, device=self.device if device is None else device)

    def line(self, tensor: Tensor) -> Tensor:
        """Return the elements of the tensor in a line: a view if it has no gaps, else a copy."""
        order = sorted(range(tensor.dim()), key=lambda one: -self.strides[one])
        single = tensor.detach().permute(order)
        for place, dimension in enumerate(order):
            if self.strides[dimension] == 0 and self.shape[dimension] > 1:
                single = single.narrow(place, 0, 1)
        return single.reshape(-1)

    def back(self, line: Tensor) -> Tensor:
        """Return the tensor whose elements are in a line."""
        return line.as_strided(self.shape, self.strides)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(self.shape)}, {dtype}, {format_bytes(self.size_bytes)}, from {self.device}"


def content_of(tensor: Tensor) -> Content:
    """Return the metadata of a tensor."""
    shape, strides = tensor.shape, tensor.stride()
    size_bytes = tensor.nbytes
    if not tensor.is_contiguous():
        strides = dense(shape, strides)
        for size, stride in zip(shape, strides, strict=True):
            size_bytes //= size if stride == 0 else 1
    return Content(shape=shape, strides=strides, dtype=tensor.dtype, device=tensor.device, size_bytes=size_bytes)
