"""Storages: which are in a tensor, and what is known about each of them as long as it is alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch import Tensor, UntypedStorage, nn

from torchremat.tensors.parts import parts_of, sparse_parts

V = TypeVar("V")

# Their result is new to the step, though it may share its storage with their argument.
LIFTED = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class StorageMap(Generic[V]):
    """A value for each of some storages, found by its address until it dies. It keeps no storage alive.

    An address cannot come back before the callback of the weak reference has taken the entry away, so an entry is
    always that of the storage which is at its address now.

    Args:
        dies: A method of the map's owner, called with the value of a storage that has died.
    """

    __slots__ = ("__weakref__", "_dies", "_entries")

    def __init__(self, dies: Callable[[V], object] | None = None) -> None:
        self._entries: dict[int, tuple[ReferenceType[UntypedStorage], V]] = {}
        self._dies = None if dies is None else WeakMethod(dies)  # the owner owns the map

    def get(self, storage: UntypedStorage) -> V | None:
        """Return the value of a storage, None if it has none."""
        entry = self._entries.get(storage._cdata)
        return None if entry is None else entry[1]

    def at(self, address: int) -> V | None:
        """Return the value of the storage at an address, None if it has none."""
        entry = self._entries.get(address)
        return None if entry is None else entry[1]

    def __contains__(self, storage: UntypedStorage) -> bool:
        """Return whether a storage has a value."""
        return storage._cdata in self._entries

    def __setitem__(self, storage: UntypedStorage, value: V) -> None:
        """Give a storage a value, in place of another one that it may have."""
        address = storage._cdata
        entry = self._entries.get(address)
        self._entries[address] = (ref(storage, self._forget(address)) if entry is None else entry[0], value)

    def storages(self) -> list[UntypedStorage]:
        """Return the storages that have a value."""
        alive = [one() for one, _ in [*self._entries.values()]]
        return [storage for storage in alive if storage is not None]

    def clear(self) -> None:
        """Forget all storages, without `dies`."""
        self._entries.clear()

    def _forget(self, address: int) -> Callable[[object], None]:
        # The callback must not keep the map alive: the storages may outlive it by far.
        owner = ref(self)

        def freed(_: object) -> None:
            own = owner()
            entry = None if own is None else own._entries.pop(address, None)
            dies = None if own is None or own._dies is None else own._dies()
            if entry is not None and dies is not None:
                dies(entry[1])

        return freed


class StorageNumbers:
    """Gives numbers to storages: 0, 1, 2, ..., none of them twice.

    Attributes:
        sizes: The bytes of each storage, by number, when it was last seen.
        devices: The device of each.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.devices: list[torch.device] = []
        self._known = StorageMap[int]()

    def of(self, value: object) -> tuple[int, ...]:
        """Return the numbers of the storages of all tensors in `value`, each once; new storages get a new number."""
        return tuple(dict.fromkeys(self._number(storage) for storage in storages_in(value)))

    def new_bytes(self, value: object) -> int:
        """Return the bytes of the storages in `value` that had no number yet; now they have one."""
        known = len(self.sizes)
        return sum(self.sizes[number] for number in self.of(value) if number >= known)

    def _number(self, storage: UntypedStorage) -> int:
        number = self._known.get(storage)
        if number is not None:
            self.sizes[number] = storage.nbytes()
            return number
        number = self._known[storage] = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.devices.append(storage.device)
        return number


def storages_in(value: object) -> Iterator[UntypedStorage]:
    """Yield the storages of the tensors in `value`: wrapper subclasses are opened, sparse tensors too.

    A tensor that does not expose its storage (quantized in a vendor's format, wrapped by a transform) has none here.
    """
    for tensor in tensors_in(value, sparse=True):
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue


def address_of(storage: UntypedStorage) -> int:
    """Return the identity of a storage among all live ones; it works for empty ones too, which have no `data_ptr`."""
    return storage._cdata  # no public name


def tensors_in(value: object, *, sparse: bool = False) -> Iterator[Tensor]:
    """Yield the tensors in `value` that have their own storage: wrapper subclasses are opened.

    Args:
        value: Tensors, and lists, tuples and dicts of them.
        sparse: Whether sparse tensors are opened as well; otherwise they are left out.
    """
    if type(value) is nn.Parameter or type(value) is Tensor:  # no wrapper: by far the most
        if value.layout == torch.strided:
            yield value
        elif sparse:
            yield from sparse_parts(value)
    elif isinstance(value, Tensor):
        for part in parts_of(value):
            if part.layout == torch.strided:
                yield part
            elif sparse:
                yield from sparse_parts(part)
    elif isinstance(value, list | tuple):
        for item in cast(list[object], value):
            yield from tensors_in(item, sparse=sparse)
    elif isinstance(value, dict):
        # Through the method of `dict`: a subclass may bring tensors back when it is asked.
        for item in dict.values(cast(dict[object, object], value)):
            yield from tensors_in(item, sparse=sparse)


def made_by(given: object, result: object) -> list[Tensor]:
    """Return the tensors in an operator's result, one for each storage, that share no storage with its arguments."""
    seen = {address_of(one.untyped_storage()) for one in tensors_in(given)}
    made: list[Tensor] = []
    for tensor in tensors_in(result):
        address = address_of(tensor.untyped_storage())
        if address not in seen:
            seen.add(address)
            made.append(tensor)
    return made
