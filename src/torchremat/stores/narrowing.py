"""How a saved tensor is reduced to what backward needs of it: its shape, or a bit for each element.

NOTE [ How a slot is known ]
Saved-tensor hooks are given a tensor, not the node and the slot that save it, and the node does not exist yet. So while
an operation runs its saves wait. When it has returned, its new nodes are found from its results, and the contents of
their slots tell which save belongs to which slot. Then each save is stored, narrowed or whole. At most the saves of one
operation wait, only as long as that operation runs, and an error in the operation also ends the waiting. Saves made
outside of torch's functions (by custom Functions and compiled code), and those of a backward, do not wait and are
stored whole.

Missing on purpose: giving up a mask if another operation later has the same tensor stored whole. The mask is at most a
thirty-second of it, and releases the whole tensor as soon as that other operation has gone backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from torchremat._compat.autograd import current_graph_task, current_node, packed_in, set_grad_mode
from torchremat._compat.binding import NEWEST, RELEASE
from torchremat._compat.modes import Args, Kwargs, Operation, sequence_number
from torchremat._compat.tensors import is_dense
from torchremat.ambient.global_state import only_watches
from torchremat.errors import StoreError, StoreWarning, warn
from torchremat.stores.catalog import Catalog
from torchremat.stores.codecs.lossless import pack_bits
from torchremat.stores.compressed import Compressed
from torchremat.stores.in_catalog import Emptied, InCatalog
from torchremat.stores.needs import NEEDS, Shape, in_order, surrogate
from torchremat.stores.tiers import Tiers
from torchremat.stores.weak_bytes import is_leaf_of_model, is_plain_array
from torchremat.tensors.handles import Handle, Store
from torchremat.tensors.metadata import Metadata, empty_of, metadata_of
from torchremat.tensors.packed import Owner
from torchremat.tensors.structure import tensors_in
from torchremat.tensors.versioned import Versioned

# How many nodes of one operation to visit; the largest functions of torch make some tens.
_MOST_NODES = 256


class Narrowable(InCatalog):
    """The object that autograd holds in place of a tensor that may be narrowed."""

    __slots__ = ("__weakref__", "_stored", "_watch")

    def __init__(self, watch: SlotWatch) -> None:
        self._watch = ref(watch)
        self._stored: InCatalog | None = None

    def put(self, stored: InCatalog) -> None:
        """Let it stand for an object that has been stored."""
        self._stored = stored

    @property
    def stored(self) -> InCatalog | None:
        """The object that it stands for; None as long as it waits."""
        return self._stored

    def get(self) -> Tensor:
        """Return the tensor, or its surrogate; see NOTE [ A surrogate ].

        Raises:
            StoreError: Its values are requested outside the backward of its node, and only a surrogate exists. Or the
                store failed in the forward.
            MutationError: The tensor was written in place before it could be stored.
        """
        return self._settle().get()

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self._settle().metadata

    @property
    def owners(self) -> Iterable[Owner]:
        """The owners of the stored object."""
        return self._settle().owners

    def let_go(self) -> None:
        """Release the stored object."""
        self._settle().let_go()

    def _settle(self) -> InCatalog:
        watch = self._watch()
        if self._stored is None and watch is not None:
            watch.settle()
        if self._stored is None:
            raise StoreError(
                "this saved tensor was not stored, because the store failed in the operation that saves it. "
                "Run the forward again."
            )
        return self._stored


@dataclass(frozen=True)
class Surrogate(InCatalog):
    """The stand-in for a tensor whose values are never read.

    Attributes:
        bits: A bit for each element; None if only the shape is needed.
        true: The value for the elements whose bit is set.
        false: The value for the others.
    """

    node: str
    slot: str
    like: Metadata
    catalog: Catalog
    bits: Handle | None = None
    true: float = 0.0
    false: float = 0.0

    def get(self) -> Tensor:
        """Return the surrogate, to the backward of the node.

        Raises:
            StoreError: The caller is not that backward.
        """
        running = current_node()
        # Compiled autograd runs backward without nodes.
        if current_graph_task() < 0 if running is None else running.name() != self.node:
            raise StoreError(
                f"{self.node}: of its saved tensor `{self.slot}` only {'the shape' if self.bits is None else 'a mask'} "
                "is held, because its backward needs no more, so its values cannot be read outside of that backward. "
                "Use a store without `Compressed` to read them."
            )
        if self.bits is None:
            return empty_of(self.like)
        return surrogate(self.like, self.catalog.get_mask(self.bits), self.true, self.false)

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self.like


@dataclass(frozen=True, slots=True)
class _WaitingSlots:
    narrowable: Narrowable
    # The tensor itself, by which a catalog recognises parameters. A cycle with its node, until the operation ends.
    saved: Versioned


# A slot that needs less than the tensor: the node, which has just been made, and the name of the slot.
_NarrowedSlot: TypeAlias = tuple[Node, str]


@only_watches
class SlotWatch(TorchFunctionMode):
    """A mode in which a tensor is stored as the part that backward needs. See NOTE [ How a slot is known ].

    Enter it after the saved-tensor hooks whose pack is its `pack`, and leave it before them.
    """

    def __init__(self, catalog: Catalog) -> None:
        super().__init__()
        self._catalog = catalog
        self._thread = get_ident()
        self._since = -1  # the number of the first node that the running operation will make; -1 if none runs
        self._waiting: list[_WaitingSlots] = []

    def pack(self, tensor: Tensor) -> InCatalog:
        """Return the object that autograd holds in place of a tensor: the pack hook."""
        if (
            self._since < 0
            or get_ident() != self._thread
            or current_graph_task() >= 0
            or not _may_be_narrowed(tensor)
            or tensor.nbytes < self._catalog.min_bytes
        ):
            return self._catalog.put(tensor)
        narrowable = Narrowable(self)
        self._waiting.append(_WaitingSlots(narrowable, Versioned(tensor)))
        return narrowable

    def __torch_function__(self, func: Operation, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        """Run an operation, and store its saves once it has returned."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self._since >= 0:
            return func(*args, **(kwargs or {}))
        self._since = sequence_number()
        result = None
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            since, self._since = self._since, -1
            if self._waiting:
                self.settle(self._find_slots(result, since))
        return result

    def settle(self, found: Mapping[Narrowable, _NarrowedSlot] | None = None) -> None:
        """Store the waiting saves, narrowed where that is known to be enough.

        Raises:
            StoreError: The store is strict, and failed.
        """
        waiting, self._waiting = self._waiting, []
        enabled = torch.is_grad_enabled()
        set_grad_mode(False)
        try:
            for one in waiting:
                tensor = one.saved.tensor
                if one.saved.is_written:
                    one.narrowable.put(Emptied(metadata_of(tensor), str(one.saved.written())))
                    continue
                slot = None if found is None else found.get(one.narrowable)
                narrowed = None if slot is None else self._narrow(tensor, *slot)
                one.narrowable.put(self._catalog.put(tensor) if narrowed is None else narrowed)
        finally:
            set_grad_mode(enabled)

    def _narrow(self, tensor: Tensor, node: Node, slot: str) -> Surrogate | None:
        name, like = node.name(), metadata_of(tensor)
        need = NEEDS[name][slot]
        if isinstance(need, Shape):
            self._catalog.put_shape(tensor)
            return Surrogate(name, slot, like, self._catalog)
        split = need(node, in_order(tensor)) if is_dense(tensor) else None
        bits = None if split is None else self._catalog.put_mask(tensor, pack_bits(split.bits))
        if split is None or bits is None:
            return None
        return Surrogate(name, slot, like, self._catalog, bits, split.true, split.false)

    def _find_slots(self, result: object, since: int) -> dict[Narrowable, _NarrowedSlot]:
        """Return the waiting slots that need less than the tensor, found by their contents."""
        waiting = {one.narrowable for one in self._waiting}
        found: dict[Narrowable, _NarrowedSlot] = {}
        nodes = [tensor.grad_fn for tensor in tensors_in(result)]
        seen: set[Node] = set()
        while nodes and len(found) < len(waiting) and len(seen) < _MOST_NODES:
            node = nodes.pop()
            # Older nodes belong to other operations. Leaves have the largest number of all, and nothing behind them.
            if node is None or node in seen or node._sequence_nr() < since:
                continue
            seen.add(node)
            nodes.extend(before for before, _ in node.next_functions)
            for slot in NEEDS.get(node.name(), ()):
                packed = packed_in(node, slot)
                if isinstance(packed, Narrowable) and packed in waiting:
                    found[packed] = node, slot
        return found


def narrows(store: Store) -> bool:
    """Return whether a store receives narrowed tensors: one that compresses, or has a tier that does.

    No store does under a torch newer than those whose formulas are known; a `StoreWarning` says so.
    See NOTE [ A surrogate ].
    """
    asks = _asks(store)
    if asks and RELEASE > NEWEST:
        warn(
            f"torch {torch.__version__} is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that this torchremat was "
            "tested with. What backward needs of a saved tensor may be more there than is known, so `Compressed` takes "
            "all of it. Install a newer torchremat, or that torch.",
            StoreWarning,
        )
        return False
    return asks


def _asks(store: Store) -> bool:
    return isinstance(store, Compressed) or (isinstance(store, Tiers) and any(map(_asks, store.stores)))


def _may_be_narrowed(tensor: Tensor) -> bool:
    """Return whether a tensor has floats in memory and is no parameter."""
    return (
        type(tensor) is Tensor
        and tensor.dtype.is_floating_point
        and not tensor.is_neg()
        and is_plain_array(tensor)
        and not is_leaf_of_model(tensor)
    )
