"""The hooks that autograd calls for the saved tensors of a region, and how long a handed out tensor stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import current_graph_task, current_node, python_node
from torchremat._compat.dynamo import outside_graphs
from torchremat.regions.slots import Key, Recomputable, Slot, written_in_region
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
    if isinstance(slot, Tensor):
        return slot  # See NOTE [ What is traced in a region ]
    # A tensor that is recomputed already is handed out without any lock: no other node asks for it.
    if slot.task != current_graph_task() or thread.now.recomputing:
        return slot.region.unpack(slot)
    tensor = slot.tensor
    if tensor._version != slot.version:
        raise written_in_region(slot.region.recording, slot.index, Versioned(tensor, slot.version))
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
