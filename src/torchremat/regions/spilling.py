"""Tensors that a graph has saved already, moved into a store.

A search of the graph finds its slots and the inputs that its regions hold; all of these in one storage are one
candidate, which is freed if all of it is moved and nothing else holds it. Candidates move in the order in which
backward asks for them, latest first.

NOTE [ Nothing is lost on the way ]
Autograd empties a slot whose pack hook raises. So the store has the whole candidate before any of its slots is touched,
and a pack hook only hands over the finished record. And autograd checks no version if hooks are registered, so each
tensor is unpacked before, with the check, and a written tensor stays: backward then raises as usual.

Missing on purpose: recomputed tensors of regions, attributes of custom Functions, tensors of subclasses, and slots that
have hooks already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.tensors import holders_in_python, holders_in_torch, sequence_of, tensors_in
from torchremat.errors import BudgetError, StoreError, UnsupportedError
from torchremat.regions.slots import Slot
from torchremat.stores.base import land
from torchremat.stores.catalog import Catalog, unpack
from torchremat.stores.disk import Disk
from torchremat.stores.host import Host
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.weak_bytes import is_plain_array
from torchremat.tensors.graphs import GraphSlot, leaves_of, nodes_of, slots_of
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from torchremat.tensors.handles import Handle, Store

_LEAST_BYTES = 1024  # smaller tensors stay: a handle costs about as much


def spill(loss: Tensor | Sequence[Tensor], bytes: int | str | None, store: Store | None = None) -> int:
    """Free memory of a graph that exists already; return how many bytes were freed.

    Saved tensors go into a store, in reverse order of their use in backward, and come back when backward asks for them.
    Gradients stay the same, bit for bit, unless the store is lossy. It may be called any number of times: after the
    forward, between two backward calls of a retained graph, and while a backward runs, from a hook in its thread.

    Parameters, leaves, and other tensors that have an owner outside the graph stay where they are, as copying them
    frees nothing; so do storages below 1 KiB, subclasses of `Tensor`, and saved tensors with hooks already: those that
    regions recompute or that `offload` has stored. The inputs that regions hold are moved as well.

    Args:
        loss: The tensor or tensors that `backward` will be called on.
        bytes: How much to free at least: bytes, or a size such as `"64MiB"`. None frees as much as possible.
        store: Where the bytes go. None is `Host()` for tensors of a device, and `Disk()` for tensors of the host. A
            store that writes behind, like `Disk`, frees a tensor when it is written.

    Raises:
        BudgetError: Less can be freed, the message says how much; or `bytes` is not a size. Nothing has been moved.
        StoreError: The store has no room or failed; the message says how much was freed before. The graph is as usable
            as before.
        UnsupportedError: `loss` is not a tensor with a graph.
    """
    wanted = None if bytes is None else parse_bytes(bytes)
    roots = [loss] if isinstance(loss, Tensor) else list(loss)
    if not roots or not all(isinstance(root, Tensor) and root.grad_fn is not None for root in roots):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UnsupportedError("spill: expected a tensor with a graph, or a sequence of such tensors.")
    candidates = _candidates(roots)
    movable = [one for one in candidates if one.is_movable]
    available = sum(one.storage_bytes for one in movable)
    if wanted is not None and available < wanted:
        raise BudgetError(_too_little(wanted, available, candidates))
    catalogs: dict[str, Catalog] = {}
    freed = 0
    while movable and (wanted is None or freed < wanted):
        candidate = movable.pop(0)
        try:
            candidate.move(_catalog_for(candidate.device, store, catalogs))
        except Exception as error:
            moved = f"Before, {format_bytes(freed)} of {format_bytes(wanted or available)} were moved, and stay so."
            error.add_note(f"spill: {moved}")
            raise
        freed += candidate.storage_bytes
    for catalog in catalogs.values():
        land(catalog.store, all_of_it=True)
    return freed


def _catalog_for(device: torch.device, store: Store | None, catalogs: dict[str, Catalog]) -> Catalog:
    key = device.type if store is None else ""
    if key not in catalogs:
        target = store if store is not None else Disk() if device.type == "cpu" else Host()
        # Sequence numbers do not give the order in which backward asks for these, so nothing is prefetched.
        catalogs[key] = Catalog(_WholeStore(target), min_bytes=1, window_bytes=0)
    return catalogs[key]


class _WholeStore:
    """A store that takes each tensor or raises: a tensor left in place would not be freed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, tensor: Tensor) -> Handle:
        handle = self._store.put(tensor)
        if handle is None:
            raise StoreError(f"{self._store!r} has no room for {format_bytes(tensor.nbytes)} more.")
        return handle

    def land(self, *, all_of_it: bool) -> None:
        land(self._store, all_of_it=all_of_it)


class _InGraph:
    """A saved tensor in a slot of a node."""

    def __init__(self, slot: GraphSlot) -> None:
        self._slot = slot
        self._version = -1
        self.use = sequence_of(slot.node)

    def kept(self) -> Tensor | None:
        """Return the tensor held in memory; None if it cannot be moved."""
        raw = self._slot.raw
        return None if raw.unpack_hook is not None else cast("Tensor | None", raw.data)

    def is_unwritten(self) -> bool:
        """Return whether the tensor is unchanged since it was saved. See NOTE [ Nothing is lost on the way ]."""
        tensor = self.kept()
        if tensor is None:
            return False
        if self._version < 0:
            try:
                self._slot.tensor(own=unpack)
            except RuntimeError:
                return False
            self._version = tensor._version
        return self._version == tensor._version

    def hand_over(self, packed: InCatalog) -> None:
        self._slot.raw.register_hooks(lambda _: packed, unpack)  # See NOTE [ Nothing is lost on the way ]


class _InRegion:
    """An input that a region holds."""

    def __init__(self, held: HeldTensor) -> None:
        self._held = held
        self.use = -1

    def kept(self) -> Tensor | None:
        """Return the held alias; None if it cannot be moved."""
        return self._held.alias()

    def is_unwritten(self) -> bool:
        """Return whether the input is unchanged since the region's call."""
        return self._held.alias() is not None

    def hand_over(self, packed: InCatalog) -> None:
        self._held.hand_over(packed, unpack)


@dataclass
class _Spillable:
    """Everything that a graph has saved of one storage."""

    storage_bytes: int
    device: torch.device
    places: list[_InGraph | _InRegion] = field(default_factory=list["_InGraph | _InRegion"])
    is_leaf: bool = False
    is_held: bool = False
    was_written: bool = False

    @property
    def use(self) -> int:
        """The number of the node that asks for it first in a backward."""
        return max(place.use for place in self.places)

    @property
    def is_movable(self) -> bool:
        """Whether moving it frees it."""
        return not (self.is_leaf or self.is_held or self.was_written)

    def move(self, catalog: Catalog) -> None:
        """Put it into a store.

        Raises:
            StoreError: The store did not take it; nothing has changed.
        """
        packed: list[InCatalog] = []
        for place in self.places:
            tensor = place.kept()
            if tensor is None or not place.is_unwritten():
                raise StoreError("a saved tensor was written in place while others were moved into the store.")
            packed.append(catalog.put(tensor))
            catalog.settle()
            del tensor
        for place, one in zip(self.places, packed, strict=True):
            place.hand_over(one)


def _candidates(roots: list[Tensor]) -> list[_Spillable]:
    """Return the candidates in memory, in reverse order of their use in a backward."""
    nodes = nodes_of(roots)
    found: dict[int, _Spillable] = {}
    for place in (*_in_graph(nodes), *_in_regions(nodes)):
        _add(place, found)
    for leaf in leaves_of(nodes):
        if _is_plain(leaf) and (one := found.get(leaf.untyped_storage()._cdata)) is not None:
            one.is_leaf = True
    for one in found.values():
        one.was_written = not all(place.is_unwritten() for place in one.places)
        one.is_held = not one.is_leaf and _is_held_by_others(one)
    return sorted(found.values(), key=lambda one: one.use)


def _add(place: _InGraph | _InRegion, found: dict[int, _Spillable]) -> None:
    tensor = place.kept()
    if tensor is None or not _is_plain(tensor):
        return
    storage = tensor.untyped_storage()
    if storage.nbytes() >= _LEAST_BYTES:
        candidate = found.setdefault(storage._cdata, _Spillable(storage.nbytes(), tensor.device))
        candidate.places.append(place)
        base = tensor if tensor._base is None else tensor._base
        candidate.is_leaf |= base.is_leaf and base.requires_grad


def _in_graph(nodes: Iterable[Node]) -> Iterator[_InGraph]:
    for node in nodes:
        for slot in slots_of(node):
            yield _InGraph(slot)


def _in_regions(nodes: Iterable[Node]) -> Iterator[_InRegion]:
    """Yield the inputs held by the regions of a graph, and by regions found through these inputs."""
    places: dict[int, _InRegion] = {}
    for node in nodes:
        use = sequence_of(node)
        pending: list[object] = [slot.raw.data for slot in slots_of(node)]
        while pending:
            packed = pending.pop()
            if not isinstance(packed, Slot):
                continue
            for held in packed.region.held:
                place = places.setdefault(id(held), _InRegion(held))
                if place.use < use:
                    place.use = use
                    pending.append(held.kept)  # See Rule 2
    yield from places.values()


def _is_held_by_others(candidate: _Spillable) -> bool:
    """Return whether anything but the graph and its regions holds the storage."""
    # See NOTE [ Who else holds a tensor ]
    tensors: dict[int, tuple[list[Tensor], list[int]]] = {}
    storage: list[UntypedStorage] = []
    for place in candidate.places:
        tensor = place.kept()
        assert tensor is not None
        storage = [tensor.untyped_storage()]
        is_new = id(tensor) not in tensors
        _, counts = tensors.setdefault(id(tensor), ([tensor], [0, 0]))
        counts[isinstance(place, _InRegion)] += 1
        base = tensor._base
        if is_new and base is not None:
            tensors.setdefault(id(base), ([base], [0, 0]))[1][0] += 1
        del tensor, base, counts
    if tensors_in(storage) > len(tensors):
        return True
    return any(
        holders_in_torch(held[0]) > in_torch or holders_in_python(held) > in_python
        for held, (in_torch, in_python) in tensors.values()
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and is_plain_array(tensor)


def _too_little(wanted: int, available: int, candidates: list[_Spillable]) -> str:
    leaves = sum(one.storage_bytes for one in candidates if one.is_leaf)
    held = sum(one.storage_bytes for one in candidates if one.is_held)
    written = sum(one.storage_bytes for one in candidates if one.was_written and not (one.is_leaf or one.is_held))
    kept = [
        f"{format_bytes(leaves)} are parameters or leaves" if leaves else "",
        f"{format_bytes(held)} are held elsewhere, such as by a variable" if held else "",
        f"{format_bytes(written)} were written in place since they were saved" if written else "",
    ]
    why = "; ".join(one for one in kept if one)
    return (
        f"spill: bytes={wanted} ({format_bytes(wanted)}), but of what the graph has saved in memory only {available} "
        f"bytes ({format_bytes(available)}) can be freed{': ' + why if why else ''}. Ask for less, or save less: see "
        "`checkpoint` and `plan`. Nothing has been moved."
    )
