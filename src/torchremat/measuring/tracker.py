"""`StorageTracker`: live bytes of tensors on a device, storage by storage, exact and without the allocator.

A dispatch mode sees every operator's results; a weak reference on each new storage tells when it dies. It cannot see
temporaries inside kernels, nor allocations of compiled code, which runs eagerly here. `measuring.allocator` sees both,
but cannot run under a profiler; this can.

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
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, UntypedStorage

from torchremat._compat.modes import EagerMode
from torchremat.tensors.parts import parts_of

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
        # By address. An address cannot come back before the callback of its weak reference has taken the entry away.
        self._tracked: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}
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
        for reference, _ in [*self._tracked.values()]:
            storage = reference()
            if storage is not None:
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
            known = address_of(storage) in self._tracked
            if known or func in _LIFTED or not self._is_among(storage, args, kwargs):
                self._see(storage)
        return result

    def _see(self, storage: UntypedStorage) -> None:
        size = storage.nbytes()
        address = address_of(storage)
        known = self._tracked.get(address)
        if known is None:
            self._tracked[address] = (weakref.ref(storage, self._forget(address)), size)
            self._change(size)
        elif known[1] != size:
            self._tracked[address] = (known[0], size)
            self._change(size - known[1])

    def _forget(self, address: int) -> Callable[[object], None]:
        # The callback must not keep the tracker alive: the storages may outlive it by far.
        owner = weakref.ref(self)

        def freed(_: object) -> None:
            tracker = owner()
            if tracker is not None and (entry := tracker._tracked.pop(address, None)) is not None:
                tracker._change(-entry[1])

        return freed

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


def address_of(storage: UntypedStorage) -> int:
    """Return the identity of a storage among all live ones; it works for empty ones too, which have no `data_ptr`."""
    return storage._cdata  # no public name


def tensors_in(value: object, *, sparse: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in `value` that have their own storage: wrapper subclasses are opened.

    Args:
        value: Tensors, and lists, tuples and dicts of them.
        sparse: Whether sparse tensors are opened as well; otherwise they are left out.
    """
    if isinstance(value, Tensor):
        for part in parts_of(value):
            if part.layout == torch.strided:
                yield part
            elif sparse:
                yield from _parts(part)
    elif isinstance(value, list | tuple):
        for item in cast(list[object], value):
            yield from tensors_in(item, sparse=sparse)
    elif isinstance(value, dict):
        # Through the method of `dict`: a subclass may bring tensors back when it is asked.
        for item in dict.values(cast(dict[object, object], value)):
            yield from tensors_in(item, sparse=sparse)


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that make up a sparse one; none for a layout without such parts."""
    tensor = tensor.detach()
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        case _:
            return ()
