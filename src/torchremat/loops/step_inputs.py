"""What a step of a loop is given: the state between two steps, and how it comes back, and a slice of what is scanned.

NOTE [ What a loop is made of ]

Each step is a region, and the loop is what is around them: the inputs of a step's region are saved tensors of the loop
(Rule 2), which holds some of them and recomputes the others.

    carry 0 ── step 0 ── carry 1 ── step 1 ── carry 2 ── step 2 ── carry 3
    in a slot  region     dropped   region    in a slot   region

 1. A carry in a slot is held as any input of a region is: through the hooks around the loop, if there are any. Between
    two carries in slots lies one stretch of steps, which is recomputed from its first carry as a region would be. To
    drop a carry joins two stretches, to keep one divides a stretch, in the forward as in a recompute. So the tree of
    stretches is the tree of nested regions of the schedule, and no call and no frame nests with it.
 2. A dropped carry owns the step before it, that step's region its inputs, and so on to a carry in a slot. Nothing else
    owns them: when autograd frees the last slot of a region, and no later carry needs the step, all of it is freed.
 3. Slots that are free by then hold carries that the recompute of a stretch comes by. They belong to one backward or
    session (Rule 4), and go earlier when there is no room for a carry before them.
 4. A stretch that runs again may record steps on its way, which then need not run once more, and put carries into
    stores. A step that is recorded in the forward is a plain one: autograd keeps it, and no stretch goes through it.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchremat._compat.autograd import current_graph_task
from torchremat.errors import UnsupportedError
from torchremat.regions.sessions import active_session, open_sessions
from torchremat.regions.slots import Key
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import Leaf, join, leaves_of, split

if TYPE_CHECKING:
    from torchremat.regions.region import Region


class Carry:
    """The state that a step is given. See NOTE [ What a loop is made of ].

    Args:
        index: The number of that step.
        before: The carry before, None if that cannot be recomputed: for the first one.

    Attributes:
        held: Its tensors since the forward, if it is in a slot.
        store: The number of the store where these are, 0 if they are in a slot.
        kept: Its tensors in a backward, if it is in a slot, and while the step runs for the first time.
        key: That backward, or session.
        places: Which of its tensors the region of the step asks for: others it holds by itself, or twice.
        waiting: Its tensors on their way to that region; each is taken once.
    """

    __slots__ = ("__weakref__", "before", "held", "index", "kept", "key", "places", "region", "store", "waiting")

    def __init__(self, index: int, before: Carry | None, region: Region | None) -> None:
        self.index = index
        self.before = before
        self.region = region
        self.held: list[HeldTensor] | None = None
        self.store = 0
        self.kept: list[Tensor] | None = None
        self.key: Key | None = None
        self.places: Sequence[int] = ()
        self.waiting: dict[int, Tensor] | None = None

    @property
    def is_here(self) -> bool:
        """Whether it need not be recomputed."""
        return self.kept is not None or self.held is not None

    @property
    def takes_slot(self) -> bool:
        """Whether its tensors are in memory."""
        return self.kept is not None or (self.held is not None and not self.store)

    def keep(self, tensors: list[Tensor], key: Key | None) -> None:
        """Take a slot in a backward or session."""
        self.kept = tensors
        self.key = key

    def forget(self) -> None:
        """Leave the slot that a backward or session has given."""
        self.kept = self.key = None

    def drop(self) -> None:
        """Free its slot, if it can be recomputed."""
        if self.before is None:
            return
        self.forget()
        if not self.store:
            self.held = None

    def wait(self, tensors: list[Tensor]) -> None:
        """Let tensors wait for the region of the step."""
        self.waiting = {place: tensors[place] for place in self.places}


class HeldInput(HeldTensor):
    """A tensor that the region of a step holds by the loop around it: its carry's, or a slice.

    Args:
        tensor: The tensor, of no subclass and without attributes.
    """

    __slots__ = ()

    def __init__(self, tensor: Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self.version = version_of(tensor)
        self._kept = None
        self._unpack = bring
        self._alias = self._original = self._attributes = None

    @abstractmethod
    def bring(self) -> Tensor:
        """Return the tensor.

        Raises:
            ChangedError: It was written in place since the forward.
        """

    def unpack(self) -> Tensor:
        """Return the tensor for a recompute, a leaf of its own."""
        alias = self.bring().detach()
        return alias.requires_grad_() if self.requires_grad else alias


def bring(input: HeldInput) -> Tensor:
    """Return the tensor of a held input: the hook that unpacks it."""
    return input.bring()


def current_key() -> Key | None:
    """Return the session or the backward that runs now, None outside of any."""
    session = active_session() if open_sessions else None
    if session is not None:
        return session
    task = current_graph_task()
    return None if task == -1 else task


class Slices:
    """The slices of each tensor in a nesting along its first dimension, in the forward of a loop.

    Args:
        xs: The nesting; None for a loop that scans nothing.

    Attributes:
        tensors: The tensors of the nesting.
        length: How many slices there are, None for a loop that scans nothing.

    Raises:
        UnsupportedError: Something in it is not a tensor, or has another length than the first tensor.
    """

    def __init__(self, xs: object) -> None:
        self.tensors: list[Tensor] = []
        self._template = split(xs, self.tensors, [])
        self.length: int | None = None
        for place, leaf in leaves_of(self._template, "xs"):
            if not isinstance(leaf, Leaf):
                if leaf is None:
                    continue
                raise UnsupportedError(f"loop: {place} is {leaf!r}; tensors, or None, are scanned.")
            tensor = self.tensors[leaf.index]
            count = len(tensor) if tensor.dim() else None
            if count is None or (self.length is not None and count != self.length):
                raise UnsupportedError(
                    f"loop: {place} has the shape {tuple(tensor.shape)}; all tensors of xs need the same first "
                    f"dimension{'' if self.length is None else f', {self.length} here'}, one slice for each step."
                )
            self.length = count
        self._slices = [tensor.unbind() for tensor in self.tensors]

    def at(self, index: int) -> object:
        """Return the slices for a step."""
        return self.joined(self.tensors_at(index))

    def tensors_at(self, index: int) -> list[Tensor]:
        """Return the tensors in the slices for a step."""
        return [each[index] for each in self._slices]

    def joined(self, tensors: list[Tensor]) -> object:
        """Return the slices for a step, given the tensors in them."""
        return join(self._template, tensors)


class HeldSlices:
    """The scanned tensors, held for the recomputes of all steps."""

    __slots__ = ("_cached", "_held", "_lock")

    def __init__(self, tensors: list[Tensor], hold: Callable[[Tensor], HeldTensor]) -> None:
        self._held = [hold(tensor) for tensor in tensors]
        self._cached: tuple[Key | None, dict[int, Tensor]] = None, {}
        self._lock = threading.Lock()

    def slice_of(self, place: int, index: int) -> Tensor:
        """Return the slice of the tensor number `place` for a step.

        Raises:
            ChangedError: The tensor was written in place since the forward.
        """
        held = self._held[place]
        if not held.is_hooked:
            return held.unpack().detach()[index]
        # A region around the loop gives each of its saved tensors once in a backward.
        with self._lock:
            key = current_key()
            if self._cached[0] != key or key is None:
                self._cached = key, {}
            if place not in self._cached[1]:
                self._cached[1][place] = held.unpack()
            return self._cached[1][place].detach()[index]


class SlicedInput(HeldInput):
    """What the region of a step holds in place of its slice of a tensor."""

    __slots__ = ("index", "place", "slices")

    def __init__(self, tensor: Tensor, slices: HeldSlices, place: int, index: int) -> None:
        super().__init__(tensor)
        self.slices = slices
        self.place = place
        self.index = index

    def bring(self) -> Tensor:
        """Return the slice."""
        return self.slices.slice_of(self.place, self.index)
