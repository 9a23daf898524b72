"""`StorageTracker`: live bytes of tensors on a device, storage by storage, exact and without the allocator.

A dispatch mode sees every operator's results; a weak reference on each new storage tells when it dies. It cannot see
temporaries inside kernels, nor allocations of compiled code, which runs eagerly here. `measuring.allocator` sees both,
but cannot run under a profiler; this can. See NOTE [ What records a step ].

Missing on purpose: sparse tensors, and tensors made by anything but an operator (`torch.from_numpy`).
"""

# NOTE [ Which storages are counted ]
#
#   1. A storage that is first seen as an operator's result, and is not an argument's storage. A view or an in-place
#      result of a tensor from before the block belongs to that tensor, and is not counted.
#   2. Its bytes are read again whenever an operator returns it: `resize_` and `out=` change them.
#   3. It stops counting when its weak reference dies, wherever that happens: in Python, in a hook, or in an autograd
#      node.

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import UntypedStorage

from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat.measuring.lines import OperatorLines
from torchremat.measuring.storages import LIFTED, StorageMap, address_of, tensors_in
from torchremat.measuring.traces import AllocationTrace, TraceMark
from torchremat.tensors.metadata import covers


class StorageTracker(EagerMode):
    """Counts the storages on `device` that are made while it is entered, including storages that outlive the block.

    Args:
        device: The device.
        lines: Is told of each operator, if given.

    Attributes:
        live_bytes: Bytes of the counted storages that are alive now.
    """

    def __init__(self, device: torch.device, lines: OperatorLines | None = None) -> None:
        super().__init__()
        self.device = device
        self._lines = lines
        self.live_bytes = 0
        self._tracked = StorageMap[tuple[int, int]](self._forget)  # addresses and sizes
        self._events: list[tuple[int, int, int]] = []
        self._marks: list[TraceMark] = []

    @property
    def trace(self) -> AllocationTrace:
        """The events so far: a storage made, resized or freed."""
        return AllocationTrace.of(self.device, self._events, self._marks)

    def mark(self, label: str) -> int:
        """See `AllocationRecorder`; for one thread."""
        number = len(self._marks)
        mark = TraceMark(id=number, label=label, time_ns=time.time_ns(), position=len(self._events))
        self._marks.append(mark)
        return number

    def refresh(self) -> None:
        """Read all sizes again: `UntypedStorage.resize_` is not an operator and goes unseen until the next use."""
        for storage in self._tracked.storages():
            self._see(storage)

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if self._lines is not None:
            self._lines.see(func, len(self._events))
        result = func(*args, **(kwargs or {}))
        for storage in self._storages(result):
            # See NOTE [ Which storages are counted ], 1 and 2; `_forget` is 3.
            if storage in self._tracked or func in LIFTED or not self._is_among(storage, args, kwargs):
                self._see(storage)
        return result

    def _see(self, storage: UntypedStorage) -> None:
        address, size = address_of(storage), storage.nbytes()
        _, known = self._tracked.get(storage) or (address, None)
        if known != size:
            self._tracked[storage] = address, size
            self._change(address, size - (known or 0))

    def _forget(self, known: tuple[int, int]) -> None:
        self._change(known[0], -known[1])

    def _change(self, address: int, delta_bytes: int) -> None:
        self._events.append((time.time_ns(), address, delta_bytes))
        self.live_bytes += delta_bytes

    def _is_among(self, storage: UntypedStorage, args: object, kwargs: object) -> bool:
        return any(address_of(storage) == address_of(other) for other in self._storages((args, kwargs)))

    def _storages(self, value: object) -> Iterator[UntypedStorage]:
        for tensor in tensors_in(value):
            if covers(self.device, tensor.device):
                yield tensor.untyped_storage()
