"""The objects that autograd holds in place of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol, cast
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import current_graph_task, current_node, python_node
from torchremat._compat.graphs import outside_graphs
from torchremat.errors import MutationError, UnsupportedError
from torchremat.regions.inputs import Inputs
from torchremat.regions.sessions import Session
from torchremat.regions.threads import thread
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner, Packed, unpacked_in_graphs

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack
    from torchremat.regions.region import Region


class Served(Protocol):
    """The content of a slot that keeps its tensor itself."""

    def get(self) -> Tensor | None:
        """Return the tensor, None if it has to be recomputed after all."""
        ...


# The owner of recomputed tensors: a backward, by its number, or a session.
Key = int | Session

LOST = -1  # the index of a slot whose call has raised, or whose region was abandoned
SPENT = 0  # the index of a slot that has only metadata


class Slot(Packed):
    """Autograd's placeholder for a saved tensor; the recomputed tensor waits here until autograd asks for it.

    So the tensor dies with the slot: dropping the graph drops the tensors recomputed for it. See Rule 12
    """

    __slots__ = ("__weakref__", "index", "others", "region", "task", "tensor", "version")

    # The content of the slot itself, which need not be recomputed: see `ServedSlot`.
    value: Served | None = None

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index
        # The backward whose tensor waits here and may be handed out as it is: the slot dies with the node that asks.
        self.task: int | None = None
        self.tensor: Tensor
        self.version: int
        self.others: dict[Key, tuple[Tensor, int]] | None = None  # tensors that wait for any other backward or session

    def served(self, value: Served) -> ServedSlot:
        """Return a slot that holds its tensor, to replace this one before autograd has it.

        Raises:
            UnsupportedError: The region of this slot does not support such slots.
        """
        if not self.region.serves:
            raise UnsupportedError(
                "offload inside of a region does not work under torch.func. Put it around the region."
            )
        slot = ServedSlot(self.region, self.index, value)
        self.region.slots[self.index] = ref(slot)
        return slot

    def put(self, key: Key, tensor: Tensor) -> None:
        """Let a recomputed tensor wait here until it is dropped, with the version that it is saved at."""
        if self.others is None:
            self.others = {}
        self.others[key] = tensor, tensor._version

    def has(self, key: Key) -> bool:
        """Return whether a tensor waits here for `key`."""
        return self.task == key or (self.others is not None and key in self.others)

    def take(self, key: Key, *, keep: bool) -> Tensor:
        """Return the tensor that waits for `key`, and remove it unless `keep`.

        Raises:
            MutationError: It was written in place since it was saved.
        """
        if self.task == key:
            tensor, version = self.tensor, self.version
        else:
            assert self.others is not None
            tensor, version = self.others[key]
        if not keep:
            self.drop(key)
        if tensor._version != version:
            raise written_since(self.region, tensor, version, self.index)
        return tensor

    def drop(self, key: Key) -> None:
        """Drop the tensor that waits for `key`, if any."""
        if self.task == key:
            del self.tensor
            self.task = None  # last, since another thread may put a tensor then
        elif self.others is not None:
            self.others.pop(key, None)

    # ---------------------------------------------------------------------------------- what compiled autograd asks

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self.region.metadata[self.index]

    @property
    def owners(self) -> Iterator[Owner]:
        """The region, and all owners of its inputs: regions around it, records of a store."""
        yield self.region
        for held in self.region.inputs.held:
            if isinstance(held.kept, Packed):
                yield from held.kept.owners

    def hand_out(self, *, last: bool) -> Tensor:
        """Return the tensor. See `Packed.hand_out`."""
        region = self.region
        tensor = region.unpack(self)
        if last:
            self.drop(current_graph_task())
            # The graph keeps this slot to its end, and must not keep the inputs of every region for as long.
            self.region = cast("Region", _SpentRegion(region.metadata[self.index]))
            self.index = SPENT
            if isinstance(self, ServedSlot):
                self.value = None
        return tensor

    def emptied(self) -> Slot:
        """Return a slot with only the same metadata."""
        return Slot(cast("Region", _SpentRegion(self.metadata)), SPENT)


class _SpentRegion:
    """Replaces the region of a slot that has handed out its tensor for the last time."""

    __slots__ = ("inputs", "metadata")

    def __init__(self, metadata: Metadata) -> None:
        self.metadata = [metadata]
        self.inputs = Inputs()

    def unpack(self, slot: Slot) -> Tensor:
        """Refuse, as autograd does."""
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed): a compiled backward without retain_graph=True has been through a region."
        )


class ServedSlot(Slot):
    """A slot whose tensor is kept anyway. See NOTE [ Selective recompute ]."""

    __slots__ = ("value",)

    def __init__(self, region: Region, index: int, value: Served) -> None:
        super().__init__(region, index)
        self.value: Served | None = value


class _Gone:
    """Replaces the content of a slot that an input pass has dropped."""

    def get(self) -> None:
        """Return None: a later request recomputes the tensor."""


GONE = _Gone()


def waits(slot: Slot | None) -> bool:
    """Return whether autograd holds a slot whose tensor has to be recomputed."""
    return slot is not None and slot.value is None


def written_since(region: Region, tensor: Tensor, version: int, index: int) -> MutationError:
    """Return the error for a tensor that was written after autograd had saved it."""
    return MutationError(
        f"{region.name(region.call_of(index))}: a tensor that autograd saved (number {index}, shape "
        f"{tuple(tensor.shape)}) was written in place afterwards in the same region: it was at version {version} "
        f"and is at {tensor._version} now. Plain autograd refuses this as well; make the operation out of place."
    )


@outside_graphs
def noted(note: Callable[[Tensor], object], pack: Pack, tensor: Tensor) -> object:
    """Pack a tensor, and pass it to `note`."""
    packed = pack(tensor)
    note(tensor)
    return packed


@unpacked_in_graphs(Slot, "unpack_of_region")
def unpack(slot: Slot | Tensor) -> Tensor:
    """Return the tensor of a slot: the hook that autograd calls."""
    if isinstance(slot, Tensor):
        return slot  # See NOTE [ What is traced in a region ]
    # A tensor that is recomputed already is handed out without any lock: no other node asks for it.
    if slot.task != current_graph_task() or thread.now.recomputing:
        return slot.region.unpack(slot)
    tensor = slot.tensor
    if tensor._version != slot.version:
        raise written_since(slot.region, tensor, slot.version, slot.index)
    return tensor


@outside_graphs
def told(note: Callable[[Region, int, Tensor], object], slot: Slot | Tensor) -> Tensor:
    """Return the tensor of a slot after passing it to `note`."""
    if isinstance(slot, Tensor):
        return slot
    region, index, tensor = slot.region, slot.index, unpack(slot)
    note(region, index, tensor)
    return tensor


class Unpin:
    """Drops the tensors that a node has unpacked when the node has run in the backward that asked."""

    def __init__(self, slot: Slot, key: Key) -> None:
        self.slot = ref(slot)
        self.key = key
        self.task = current_graph_task()
        self.handle: RemovableHandle | None = None

    def after(self, node: Node) -> None:
        """Wait for a node."""
        self.handle = node.register_hook(self)

    def __call__(self, *_: object) -> None:
        """Drop the tensors: the hook of the node."""
        if current_graph_task() != self.task:
            return  # another thread runs the same node for a backward of its own
        slot = self.slot()
        if slot is not None:
            slot.drop(self.key)
        if self.handle is not None:
            self.handle.remove()


def pin(slot: Slot, key: Key) -> bool:
    """Let a tensor wait until the running node has run; return whether that node may ask again."""
    node = current_node()
    if node is None or not isinstance(node, python_node):
        return False
    Unpin(slot, key).after(node)
    return True
