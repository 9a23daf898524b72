"""Memory that others own: viewed as long as it is alive and unwritten, and recognised as movable or as the model's."""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.modes import is_traced_with_fakes
from torchremat._compat.transforms import transform_level_of
from torchremat.frames import running_modules
from torchremat.stores.geometry import TensorPlace
from torchremat.tensors.parts import PLAIN_CLASSES


class Counter:
    """Detects writes to a tensor since, directly or through a view; it does not keep the storage alive.

    NOTE [ A version without a tensor ]
    Tensors count versions, storages do not, and a tensor keeps its storage alive. But a detached alias that is given
    other data, of no bytes, still counts with the tensor that it was detached from; and an alias of such a counter that
    is given a view of the storage counts with it again.
    """

    __slots__ = ("_alias", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._version = tensor._version
        self._alias = tensor.detach()
        # See NOTE [ A version without a tensor ]
        self._alias.data = _empty(tensor.dtype, tensor.device)

    @property
    def has_moved(self) -> bool:
        """Whether the tensor has been written."""
        return self._alias._version != self._version

    def counting(self, data: Tensor) -> Tensor:
        """Return an alias of a tensor that counts its writes here."""
        alias = self._alias.detach()
        alias.data = data
        return alias


class WeakBytes:
    """A storage at a version, not kept alive.

    Args:
        tensor: The tensor through which the storage is reached, without graph.
        start: The byte of the storage at which offset 0 of the requested tensor lies; it may be negative.
    """

    __slots__ = ("_bytes", "_counters", "_start", "_storage")

    def __init__(self, tensor: Tensor, start: int = 0) -> None:
        storage = tensor.untyped_storage()
        self._storage = ref(storage)
        self._bytes = storage.nbytes()
        self._start = start
        self._counters = [Counter(tensor)]

    def watch(self, tensor: Tensor) -> None:
        """Count the writes to one more tensor of the storage: aliases need not count together (`unsafe_chunk`)."""
        self._counters.append(Counter(tensor))

    def storage(self) -> UntypedStorage | None:
        """Return the storage if it is alive and unwritten."""
        storage = self._storage()
        # Sharded parameters free their memory and keep the storage.
        if storage is None or storage.nbytes() != self._bytes:
            return None
        return None if any(one.has_moved for one in self._counters) else storage

    def view(self, storage: UntypedStorage, place: TensorPlace) -> Tensor:
        """Return a tensor that lies in the storage as `place` says; writes to it are counted."""
        offset = place.offset + self._start // place.dtype.itemsize
        lying = torch.empty(0, dtype=place.dtype, device=storage.device)
        return self._counters[0].counting(lying.set_(storage, offset, place.size, place.stride))


_EMPTY: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    found = _EMPTY.get((dtype, device))
    if found is None:
        found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is Tensor and not found.is_inference():  # else a mode has replaced it
            _EMPTY[dtype, device] = found
    return found


def is_plain_array(tensor: Tensor) -> bool:
    """Return whether a tensor is only an array in memory."""
    return (
        tensor.layout is torch.strided
        and accelerator_of(tensor.device).has_addresses
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_inference()
        and not tensor._is_zerotensor()
        and transform_level_of(tensor) == -1
        and not is_traced_with_fakes()
        and tensor.numel() > 0
    )


def is_leaf_of_model(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, any other leaf that requires grad, or a view of either.

    `nn.Linear` saves `weight.t()`, which is neither a leaf nor a `Parameter`.
    """
    base = tensor._base
    return _is_leaf(tensor) or (base is not None and _is_leaf(base))


def _is_leaf(tensor: Tensor) -> bool:
    return (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor, nn.Parameter)


def is_in_running_module(storage: UntypedStorage) -> bool:
    """Return whether a storage belongs to a buffer or parameter that a module being called now has itself."""
    address = storage.data_ptr()
    for module in running_modules():
        for tensor in (*module.buffers(recurse=False), *module.parameters(recurse=False)):
            # Both are alive, so equal addresses mean the same storage.
            if type(tensor) in PLAIN_CLASSES and tensor.untyped_storage().data_ptr() == address != 0:
                return True
    return False
