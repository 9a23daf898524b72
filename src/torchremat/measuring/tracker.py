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
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import UntypedStorage

from torchremat._compat.modes import EagerMode
from torchremat.measuring.storages import StorageMap, address_of, tensors_in

_LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class StorageTracker(EagerMode):
    """Counts the storages on `device` that are made while it is entered, including storages that outlive the block.

    Attributes:
        live_bytes: Bytes of the counted storages that are alive now.
        peak_bytes: The most that was ever alive at once.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self._tracked = StorageMap[int](self._forget)  # sizes
        self._deltas: list[int] = []
        self._times_ns: list[int] = []

    def timeline(self) -> NDArray[np.int64]:
        """Return the live bytes after each event: a storage made, resized or freed."""
        return np.cumsum(np.array(self._deltas, dtype=np.int64))

    def times_ns(self) -> NDArray[np.int64]:
        """Return the time of each event, in nanoseconds of `time.perf_counter_ns`."""
        return np.array(self._times_ns, dtype=np.int64)

    @property
    def events(self) -> int:
        """The number of events so far."""
        return len(self._deltas)

    def refresh(self) -> None:
        """Read all sizes again: `UntypedStorage.resize_` is not an operator and goes unseen until the next use."""
        for storage in self._tracked.storages():
            self._see(storage)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for storage in self._storages(result):
            # See NOTE [ Which storages are counted ], 1 and 2; `_forget` is 3.
            if storage in self._tracked or func in _LIFTED or not self._is_among(storage, args, kwargs):
                self._see(storage)
        return result

    def _see(self, storage: UntypedStorage) -> None:
        size = storage.nbytes()
        known = self._tracked.get(storage)
        if known != size:
            self._tracked[storage] = size
            self._change(size - (known or 0))

    def _forget(self, size: int) -> None:
        self._change(-size)

    def _change(self, delta_bytes: int) -> None:
        self._deltas.append(delta_bytes)
        self._times_ns.append(time.perf_counter_ns())
        self.live_bytes += delta_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _is_among(self, storage: UntypedStorage, args: object, kwargs: object) -> bool:
        return any(address_of(storage) == address_of(other) for other in self._storages((args, kwargs)))

    def _storages(self, value: object) -> Iterator[UntypedStorage]:
        for tensor in tensors_in(value):
            # No `==` on devices: "cuda" without an index means any.
            if tensor.device.type == self.device.type and self.device.index in (None, tensor.device.index):
                yield tensor.untyped_storage()
