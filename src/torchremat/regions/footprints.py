"""The memory that regions hold: the bytes that a recompute adds, and its release where no backward will run."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, UntypedStorage

from torchremat.regions.slots import Key, Recomputable, Slot, alive
from torchremat.tensors.graphs import nodes_of, slots_of


def footprint_bytes(region: Recomputable, key: Key) -> int:
    """Return the bytes of the storages that wait in a region for a session, and that nothing else holds.

    Inputs that the region holds and parameters of its modules are in memory in any case.
    """
    given = [held.kept for held in region.held]
    given += [one for call in region.calls for one in call.world.tensors()]
    here = {_address(one.untyped_storage()) for one in given if isinstance(one, Tensor)}
    return sum(one.nbytes() for one in waiting_storages(region, key) if _address(one) not in here)


def waiting_storages(region: Recomputable, key: Key) -> list[UntypedStorage]:
    """Return the storages that wait in a region for a session, each once."""
    found: dict[int, UntypedStorage] = {}
    for slot in alive(region.slots):
        waiting = None if slot.others is None else slot.others.get(key)
        if waiting is not None:
            storage = waiting.tensor.untyped_storage()
            found[_address(storage)] = storage
    return list(found.values())


def _address(storage: UntypedStorage) -> int:
    return storage.data_ptr()


def abandon(roots: Iterable[Tensor]) -> None:
    """Release everything that the regions of a graph hold, since no backward from `roots` will run."""
    for node in nodes_of(roots):
        for place in slots_of(node):
            packed = place.raw.data
            if isinstance(packed, Slot):
                packed.region.abandon()
