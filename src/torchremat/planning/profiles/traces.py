"""A traced forward as data: its calls, the tensors that they saw, and live ranges of storages. Made by `tracing`."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.conditions import Conditions
from torchremat.planning.profiles.operators import OperatorTrace


@dataclass(slots=True)
class SavedStorage:
    """A storage that autograd saved.

    Attributes:
        storage: Its number; -1 if it has no visible memory. Of a wrapper the number of its largest part.
        time: Time of the save.
        dropped: Time at which its graph was freed; None if the graph exists at the end of the forward.
        others: The numbers of the other parts of a wrapper.
    """

    storage: int
    time: int
    dropped: int | None = None
    others: tuple[int, ...] = ()

    @property
    def storages(self) -> tuple[int, ...]:
        """The numbers of all its parts."""
        return (self.storage, *self.others)


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as a call saw it.

    Attributes:
        identity: A number for the Python object.
        version: Its version then.
        storage: A number for its storage.
        requires_grad: Whether gradients flow to it.
    """

    identity: int
    version: int
    storage: int
    requires_grad: bool


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """One call of a module.

    Attributes:
        name: The module's name in the model.
        kind: The name of its type.
        number: The number of earlier calls of this name.
        parent: Index of the call that made it; None if the step made it.
        inputs: The tensors among its arguments.
        outputs: The tensors that it returned.
        mutated: Places in `inputs` whose tensors it wrote to in place.
        is_overwritten: Whether a parameter of its module was written in place after its entry, by itself or later.
        is_transforming: Whether a reverse-mode transform of torch.func ran in it, which no region can contain.
        is_looping: Whether a `torchremat.loop` ran in it, which manages its own memory: no region contains it.
        saved: The saves of autograd directly in it, not in the calls inside.
        entered: Time of entry: the number of entries and exits of calls before it.
        left: Time of exit.
        carried: Storages that are in its other arguments (a cache, say) when the forward has ended, and skips from
            outside of it that are popped in it.
        flops: Flops of its forward.
        flops_saved: Flops of its forward up to its last save that has a graph at the end.
        grad: Whether grad mode was on.
        input_elements: Elements in its inputs.
        conditions: The conditions that it found, if it is in no other call.
        signature: Its type, whether it is in training mode, and the shapes of its parameters and inputs; see
            `Units.signature`.
        operators: The operators that ran in it, as a range.
        begins: The mark at its entry; -1 if no allocations were recorded.
        ends: The mark at its exit.
    """

    name: str
    kind: str
    number: int
    parent: int | None
    inputs: list[Seen]
    outputs: list[Seen] = field(default_factory=list[Seen])
    mutated: list[int] = field(default_factory=list[int])
    is_overwritten: bool = False
    is_transforming: bool = False
    is_looping: bool = False
    saved: list[SavedStorage] = field(default_factory=list[SavedStorage])
    carried: tuple[int, ...] = ()
    entered: int
    left: int = -1
    flops: int = 0
    flops_saved: int = 0
    grad: bool = True
    input_elements: int = 0
    conditions: Conditions | None = None
    signature: tuple[object, ...] = ()
    operators: range = range(0)
    begins: int = -1
    ends: int = -1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A traced forward.

    Attributes:
        calls: In the order of entry.
        storage_bytes: Bytes of each storage number; 0 where the memory is not the allocator's.
        fixed: Storages of parameters, buffers and other tensors from before.
        born: For a storage number the time at which it was first seen.
        died: For a storage number the time by which it was freed; absent if it was alive at the end of the forward.
        lasting: The storages freed after a call had returned, before anything else ran: by `died` they were freed
            before it returned, since nothing is held for them, and at its last mark they were live.
        step_saved: The saves of autograd outside every call, in the step's own code.
        end: Time at the end of the forward.
        flops: Flops of the whole forward.
        operators: All operators that ran.
        allocations: The allocator's events meanwhile, with a mark before and after each operator; None if not recorded.
        sharded: The names of the modules that FSDP2 has sharded.
        loops: The number of times that a `torchremat.loop` ran.
        looped: The names of the modules that these called. Their calls are not among the calls.
    """

    calls: list[TracedCall]
    storage_bytes: dict[int, int]
    fixed: frozenset[int]
    born: dict[int, int]
    died: dict[int, int]
    step_saved: list[SavedStorage]
    end: int
    flops: int
    lasting: frozenset[int] = frozenset()
    operators: OperatorTrace = field(default_factory=OperatorTrace)
    allocations: AllocationTrace | None = None
    sharded: frozenset[str] = frozenset()
    loops: int = 0
    looped: frozenset[str] = frozenset()

    def is_never_unit(self, index: int) -> bool:
        """Whether a call is no unit whatever the grain, so that it stays code between the units, or is split."""
        call = self.calls[index]
        return call.is_overwritten or call.is_transforming or call.is_looping or call.name in self.looped

    def descendants(self, index: int) -> list[int]:
        """Return the calls made inside call `index`, itself included, at any depth, in order."""
        left = self.calls[index].left
        result = [index]
        for later in range(index + 1, len(self.calls)):
            if self.calls[later].entered > left:
                break
            result.append(later)
        return result

    def children(self, index: int | None) -> list[int]:
        """Return the calls that call `index` made itself; None stands for the step."""
        return [i for i, call in enumerate(self.calls) if call.parent == index]


def named(name: str) -> str:
    """Return the name of a module for a message."""
    return f"`{name}`" if name else "the model"
