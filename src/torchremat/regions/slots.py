"""The objects that autograd holds in place of saved tensors. Nothing else writes to a slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat._compat.autograd import current_graph_task
from torchremat.errors import MutationError, UnsupportedError
from torchremat.regions.recording import Recording
from torchremat.stores.stored_parameters import saved_view_of
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner, Packed
from torchremat.tensors.versioned import Versioned

# The owner of recomputed tensors: a backward, by its number, or a `Session`.
Key = Hashable

# The slots of a region, by number of the saved tensor. Autograd owns them.
Slots = list["ReferenceType[Slot]"]

LOST = -1  # the index of a slot whose call has raised, or whose region was abandoned
_SPENT = 0  # the index of a slot that has only metadata


class Served(Protocol):
    """The content of a slot that keeps its tensor itself."""

    def get(self) -> Tensor | None:
        """Return the tensor, None if it must be recomputed after all."""
        ...


class Recomputable(Recording, ABC):
    """A region, as slots, sessions and observers know it: it can be recomputed.

    Attributes:
        slots: Its slots.
        serves: Whether slots may hold tensors that are kept anyway.
    """

    __slots__ = ()

    slots: Slots
    serves = True

    @abstractmethod
    def unpack(self, slot: Slot, /) -> Tensor:
        """Return the tensor of a slot, recomputing the region if necessary."""

    @abstractmethod
    def recompute_for(self, key: Key, /) -> bool:
        """Recompute ahead of any gradient for a session or the running backward; return whether it was necessary."""

    @abstractmethod
    def forget(self, key: Key, /) -> None:
        """Drop the recomputed tensors that belong to a session or to a backward that has ended."""

    @abstractmethod
    def repeat(self) -> None:
        """Run the calls to their end once more, outside of any backward, and keep no tensor."""

    @abstractmethod
    def abandon(self) -> None:
        """Release everything that is needed to run again, since no backward will run."""


class Slot(Packed):
    """Autograd's placeholder for a saved tensor; the recomputed tensor waits here until autograd asks for it.

    So the tensor dies with the slot: dropping the graph drops the tensors recomputed for it. See Rule 12
    """

    __slots__ = ("__weakref__", "index", "others", "region", "task", "tensor", "version")

    # The content of the slot itself, which need not be recomputed: see `ServedSlot`.
    value: Served | None = None

    def __init__(self, region: Recomputable, index: int) -> None:
        self.region = region
        self.index = index
        # The backward whose tensor waits here and may be handed out as it is: the slot dies with the node that asks.
        self.task: int | None = None
        self.tensor: Tensor
        self.version: int
        self.others: dict[Key, Versioned] | None = None  # tensors that wait for any other backward or session

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

    def put(self, key: Key, task: int | None, tensor: Tensor) -> None:
        """Let a recomputed tensor wait here until it is dropped, with the version that it is saved at.

        Args:
            key: Its owner.
            task: The backward whose graph is not retained, if that is the owner; else None.
            tensor: Without its graph.
        """
        if task is not None and (self.task is None or self.task == task):
            self.tensor = tensor
            self.version = tensor._version
            self.task = task
            return
        if self.others is None:
            self.others = {}
        self.others[key] = Versioned(tensor)

    def has(self, key: Key) -> bool:
        """Return whether a tensor waits here for `key`."""
        return self.task == key or (self.others is not None and key in self.others)

    def take(self, key: Key, *, keep: bool) -> Tensor:
        """Return the tensor that waits for `key`, and remove it unless `keep`.

        Raises:
            MutationError: It was written in place since it was saved.
        """
        if self.task == key:
            found = Versioned(self.tensor, self.version)
        else:
            assert self.others is not None
            found = self.others[key]
        if not keep:
            self.drop(key)
        if found.is_written:
            raise written_in_region(self.region, self.index, found)
        return found.tensor

    def drop(self, key: Key) -> None:
        """Drop the tensor that waits for `key`, if any."""
        if self.task == key:
            del self.tensor
            self.task = None  # last, since another thread may put a tensor then
        elif self.others is not None:
            self.others.pop(key, None)

    def lose(self) -> None:
        """Refuse requests from now on: the call has raised, or the region was abandoned."""
        self.index = LOST

    # ---------------------------------------------------------------------------------- what compiled autograd asks

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self.region.metadata[self.index]

    @property
    def owners(self) -> Iterator[Owner]:
        """The region, and all owners of its inputs: regions around it, records of a store."""
        yield self.region
        for held in self.region.held:
            if isinstance(held.kept, Packed):
                yield from held.kept.owners

    def hand_out(self, *, last: bool) -> Tensor:
        """Return the tensor. See `Packed.hand_out`."""
        tensor = self.region.unpack(self)
        if last:
            self.drop(current_graph_task())
            # The graph keeps this slot to its end, and must not keep the inputs of every region for as long.
            self.region = _Spent(self.metadata)
            self.index = _SPENT
            if isinstance(self, ServedSlot):
                self.value = None
        return tensor

    def emptied(self) -> Slot:
        """Return a slot with only the same metadata."""
        return Slot(_Spent(self.metadata), _SPENT)


class ServedSlot(Slot):
    """A slot whose tensor is kept anyway. See NOTE [ Selective recompute ]."""

    __slots__ = ("value",)

    def __init__(self, region: Recomputable, index: int, value: Served) -> None:
        super().__init__(region, index)
        self.value: Served | None = value

    def put(self, key: Key, task: int | None, tensor: Tensor) -> None:
        """Let a recomputed tensor wait here, unless the slot keeps its tensor itself."""
        if self.value is None:
            super().put(key, task, tensor)

    def recompute(self) -> None:
        """Keep the tensor no longer, since it was written in place; the recompute decides whether that is an error."""
        self.value = None

    def release(self) -> None:
        """Keep the tensor no longer, since an input pass was its last use; a later request recomputes it."""
        self.value = _GONE


def slot_of(region: Recomputable, index: int, tensor: Tensor) -> Slot:
    """Return the slot of a saved tensor. It brings the tensor back itself, if that is a parameter from a store."""
    served = saved_view_of(tensor) if region.serves and not holding.now and not _recomputing_all else None
    return Slot(region, index) if served is None else ServedSlot(region, index, served)


_recomputing_all: list[None] = []


@contextmanager
def recomputing_all() -> Generator[None]:
    """Let a recompute make parameters from a store as well, as with all in memory: to profile that order."""
    _recomputing_all.append(None)
    try:
        yield
    finally:
        _recomputing_all.pop()


class _Gone:
    """Replaces the content of a slot that an input pass has dropped."""

    def get(self) -> None:
        """Return None: a later request recomputes the tensor."""


_GONE = _Gone()


class _Spent(Recomputable):
    """Replaces the region of a slot that has handed out its tensor for the last time."""

    __slots__ = ("__weakref__", "slots")

    def __init__(self, metadata: Metadata) -> None:
        super().__init__(None)
        self.metadata.append(metadata)
        self.slots = []

    def unpack(self, slot: Slot, /) -> Tensor:
        """Refuse, as autograd does."""
        raise RuntimeError(
            "Trying to backward through the graph a second time (or directly access saved tensors after they have "
            "already been freed): a compiled backward without retain_graph=True has been through a region."
        )

    def recompute_for(self, key: Key, /) -> bool:
        """Return False: nothing waits."""
        return False

    def forget(self, key: Key, /) -> None:
        """Do nothing: it holds nothing."""

    def repeat(self) -> None:
        """Do nothing: it has no calls."""

    def abandon(self) -> None:
        """Do nothing: it holds nothing."""


def alive(slots: Slots) -> Iterator[Slot]:
    """Yield the slots that autograd still holds."""
    for one in slots:
        if (slot := one()) is not None:
            yield slot


def waits(slot: Slot | None) -> bool:
    """Return whether autograd holds a slot whose tensor must be recomputed."""
    return slot is not None and slot.value is None


def written_in_region(recording: Recording, index: int, saved: Versioned) -> MutationError:
    """Return the error for a tensor that was written after autograd had saved it."""
    return MutationError(
        f"{recording.name(recording.call_of(index))}: a tensor that autograd saved (number {index}, shape "
        f"{tuple(saved.tensor.shape)}) was written in place afterwards in the same region: it was at version "
        f"{saved.version} and is at {saved.now} now. Plain autograd refuses this as well; make the "
        "operation out of place."
    )
