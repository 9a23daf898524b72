"""The hooks that autograd calls for saved tensors of a region, and how long recomputed tensors stay.

See Rules 4, 7 and 8.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import current_graph_task, current_node, python_node, retains_graph
from torchremat._compat.dynamo import outside_graphs
from torchremat.regions.calls import Call
from torchremat.regions.sessions import Session, active_session
from torchremat.regions.slots import Key, Recomputable, Slot, alive, written_in_region
from torchremat.regions.threads import thread
from torchremat.tensors.packed import unpacked_in_graphs
from torchremat.tensors.versioned import Versioned

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack


@outside_graphs
def noted(note: Callable[[Tensor], object], pack: Pack, tensor: Tensor) -> object:
    """Pack a tensor, and pass it to `note`."""
    packed = pack(tensor)
    note(tensor)
    return packed


@unpacked_in_graphs(Slot, "unpack_of_region")
def unpack(slot: Slot | Tensor) -> Tensor:
    """Return the tensor of a slot: the hook that autograd calls."""
    if type(slot) is not Slot and isinstance(slot, Tensor):
        return slot  # See NOTE [ What is traced in a region ]
    # A tensor that is recomputed already is handed out without any lock: no other node asks for it.
    if slot.task != current_graph_task() or thread.now.recomputing:
        return slot.region.unpack(slot)
    tensor = slot.tensor
    if tensor._version != slot.version:
        raise written_in_region(slot.region, slot.index, Versioned(tensor, slot.version))
    return tensor


@outside_graphs
def told(note: Callable[[Recomputable, int, Tensor], object], slot: Slot | Tensor) -> Tensor:
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
            return  # another thread runs the same node for its own backward
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


class Waiting(Recomputable):
    """A region as a place where recomputed tensors wait: for whom, and which of these ask for a tensor again.

    Attributes:
        owners: The backwards and sessions, each with the first save that is there, see NOTE [ A recompute in parts ].
        stays_for: The backward whose recomputed tensors stay: see `let_go`.
    """

    __slots__ = ("_asked", "_lock", "owners", "slots", "stays_for")

    owners: dict[Key, int]
    stays_for: int | None
    _asked: dict[int, set[int]] | None  # by slot, the backward calls of a session that have asked for it
    _lock: threading.RLock

    def has_run(self, call: Call) -> None:
        """Note what a call has saved, which has run for the first time."""
        call.slots = len(self.slots)
        if self.fingerprints is not None:
            self.fingerprints.settle()

    def was_asked(self, index: int) -> bool:
        """Return whether a backward call of a session has asked for a tensor."""
        return self._asked is not None and index in self._asked

    def is_needed_again(self, slot: Slot, session: Session | None, task: int) -> bool:
        """Return whether a tensor that is handed out now has to wait for a further request."""
        # The node holds the tensor while it runs; no other node needs it. See Rule 4
        if session is not None and not self._is_last_pass(session, task, slot.index):
            return True
        if thread.now.recomputing:
            # The input of a nested region, asked for once by each recompute of it.
            return thread.now.is_partial
        # If the graph is not retained, the slot dies with the node. Otherwise a node written in Python may ask again
        # until it has run; torch's own nodes do not.
        return not retains_graph() or pin(slot, task if session is None else session)

    def is_done_with(self, slot: Slot) -> bool:
        """Return whether an input pass runs, and no weight pass will ask for the tensor of a slot."""
        session = active_session()
        return session is not None and session.drops and self._is_last_pass(session, current_graph_task(), slot.index)

    def _is_last_pass(self, session: Session, task: int, index: int) -> bool:
        if session.drops:
            return task >= 0 and not thread.now.recomputing and session.is_done_with()
        if session.passes is None or task < 0:
            return False
        if self._asked is None:
            self._asked = {}
        tasks = self._asked.setdefault(index, set())
        tasks.add(task)
        return len(tasks) >= session.passes

    def let_go(self) -> None:
        """Release the inputs if the running backward frees its graph and the whole region has been recomputed.

        The recomputed tensors then stay as long as their slots, as they would without the region: another backward
        through other nodes asks for them.
        """
        with self._lock:
            task = current_graph_task()
            if task in self.owners and not retains_graph() and all(slot.task == task for slot in alive(self.slots)):
                self.stays_for = task
                self.held.clear()

    def forget(self, key: Key) -> None:
        """Drop the recomputed tensors that belong to a session or to a backward that has ended."""
        self.owners.pop(key, None)
        if key == self.stays_for:
            return
        for one in self.slots:
            if (slot := one()) is not None:
                slot.drop(key)
        if isinstance(key, Session):
            self._asked = None
