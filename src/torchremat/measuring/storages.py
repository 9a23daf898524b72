"""Numbers for storages: a storage keeps its number as long as it is alive, and numbers are never reused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from torch import UntypedStorage

from torchremat.measuring.tracker import address_of, tensors_in


class StorageNumbers:
    """Gives numbers to storages, and keeps none of them alive.

    Attributes:
        sizes: The bytes of each storage, by number, when it was last seen.
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
        # The callback must not keep its owner alive: the storages may outlive it by far.
        owner = weakref.ref(self)

        def freed(_: object) -> None:
            alive = owner()
            if alive is not None:
                alive._known.pop(address, None)

        return freed


def storages_in(value: object) -> Iterator[UntypedStorage]:
    """Yield the storages of the tensors in `value`: wrapper subclasses are opened, sparse tensors too.

    A tensor that does not expose its storage (quantized in a vendor's format, wrapped by a transform) has none here.
    """
    for tensor in tensors_in(value, sparse=True):
        try:
            yield tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            continue
