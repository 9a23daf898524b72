"""Numbers for storages: the same storage has the same number for as long as anybody holds it, and never another's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import UntypedStorage

from torchremat.measuring.tracker import address_of, tensors_in


class StorageNumbers:
    """Gives numbers to storages, and holds none of them.

    Attributes:
        sizes: The bytes of each storage, by number, as they were when it was last seen.
        devices: The device of each.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.devices: list[torch.device] = []
        # By address. An address cannot come back before the callback of its weak reference has taken the entry away.
        self._known: dict[int, tuple[int, weakref.ref[UntypedStorage]]] = {}

    def of(self, value: object) -> tuple[int, ...]:
        """Return the numbers of the storages of all tensors in `value`, each once; new storages get a new number."""
        return tuple(dict.fromkeys(self._number(storage) for storage in storages_in(value)))

    def _number(self, storage: UntypedStorage) -> int:
        address = address_of(storage)
        known = self._known.get(address)
        if known is not None:
            self.sizes[known[0]] = storage.nbytes()
            return known[0]
        number = len(self.sizes)
        self.sizes.append(storage.nbytes())
        self.devices.append(storage.device)
        self._known[address] = (number, weakref.ref(storage, self._forget(address)))
        return number

    def _forget(self, address: int) -> Callable[[object], None]:
        # The callback must not keep what it belongs to: the storages may outlive it by far.
        owner = weakref.ref(self)

        def freed(_: object) -> None:
            alive = owner()
            if alive is not None:
                alive._known.pop(address, None)

        return freed


def storages_in(value: object) -> Iterator[UntypedStorage]:
    """Yield the storages of the tensors in `value`: wrapper subclasses are opened, sparse tensors too.

    A tensor that says nothing of its storage (quantized in a vendor's format, wrapped by a transform) has none here.
    """
    for tensor in tensors_in(value, sparse=True):
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
