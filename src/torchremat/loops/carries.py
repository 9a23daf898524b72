"""The state between two steps of a loop, and how it comes back.

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

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchremat._compat.autograd import current_graph_task
from torchremat.regions.sessions import active_session, open_sessions
from torchremat.regions.slots import Key
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of

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
