"""A traced forward as data: its calls, the tensors that they saw, live ranges of storages; and how events show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torchremat.measuring.step_record import (
    CallCarried,
    CallEntered,
    CallHolds,
    CallLeft,
    Event,
    GraphDropped,
    Run,
    Seen,
    StepRecord,
    StorageFreed,
    TensorSaved,
)
from torchremat.measuring.traces import AllocationTrace
from torchremat.planning.training.conditions import Conditions


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
        is_handed_work: Whether it was given, returned, or has in an attribute an exchange that may not be complete: a
            region would copy or compare tensors that others still write to.
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
    inputs: list[Seen] = field(default_factory=list[Seen])
    outputs: list[Seen] = field(default_factory=list[Seen])
    mutated: list[int] = field(default_factory=list[int])
    is_overwritten: bool = False
    is_transforming: bool = False
    is_looping: bool = False
    is_handed_work: bool = False
    saved: list[SavedStorage] = field(default_factory=list[SavedStorage])
    carried: tuple[int, ...] = ()
    entered: int = -1
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
        lasting: The storages freed after calls had returned in a row, before anything else ran, each with the time of
            the last return: by `died` they were freed before the first one returned, since nothing is held for them,
            and at the last marks of these calls they were live.
        step_saved: The saves of autograd outside every call, in the step's own code.
        end: Time at the end of the forward.
        flops: Flops of the whole forward.
        operators: All operators that ran. The storages that calls have seen have the same numbers there.
        allocations: The allocator's events meanwhile, with a mark before and after each operator; None if not recorded.
        sharded: The names of the modules that FSDP2 has sharded.
        replicated: The names of the modules that are a DistributedDataParallel.
        loops: The number of times that a `torchremat.loop` ran.
        untraced: The names of the modules that these called, or code inside of a transform of torch.func, and of those
            that were given nested tensors. Their calls are not among the calls.
        parameters: The names of parameters, by storage.
        takes_gradients: Whether the step runs a backward itself, for a gradient that its loss depends on.
    """

    calls: list[TracedCall]
    storage_bytes: dict[int, int]
    fixed: frozenset[int]
    born: dict[int, int]
    died: dict[int, int]
    step_saved: list[SavedStorage]
    end: int
    flops: int
    lasting: Mapping[int, int] = field(default_factory=dict[int, int])
    operators: StepRecord = field(default_factory=StepRecord)
    allocations: AllocationTrace | None = None
    sharded: frozenset[str] = frozenset()
    replicated: frozenset[str] = frozenset()
    loops: int = 0
    untraced: frozenset[str] = frozenset()
    parameters: Mapping[int, str] = field(default_factory=dict[int, str])
    takes_gradients: bool = False

    @property
    def communicates(self) -> bool:
        """Whether other processes took part in an operator."""
        return any(run.exchanges for run in self.operators.runs)

    def is_never_unit(self, index: int) -> bool:
        """Whether a call is no unit whatever the grain, so that it stays code between the units, or is split."""
        call = self.calls[index]
        itself = call.is_overwritten or call.is_transforming or call.is_looping or call.is_handed_work
        return itself or call.name in self.untraced or call.name in self.replicated

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


def around(calls: list[TracedCall], call: int | None) -> Iterator[TracedCall]:
    """Yield a call, the one that made it, and so on outward; none for the step's own code."""
    while call is not None and call >= 0:
        yield calls[call]
        call = calls[call].parent


# The time of an operator without flops: the bytes that it moves, and the call itself.
_BYTES_PER_S = 1e10
_CALL_S = 5e-6


def nominal_seconds(log: StepRecord, run: Run) -> float:
    """Return the seconds of an operator on a generic device, for plans that have to be the same everywhere."""
    moved = sum(log.values[value].size_bytes for value in (*run.reads, *run.makes))
    return moved / _BYTES_PER_S + _CALL_S


# NOTE [ Casts in a recompute ]
# Autocast keeps the casts of leaves until the outermost autocast ends, for further casts of the same leaf. When
# backward recomputes, that autocast has ended, so a recompute makes its own casts, and keeps them until it ends:
#
#   cast in the unit          autocast keeps the cast, and a recompute makes a new one
#   found made by another     likewise: the recompute makes a cast that the traced forward lacks (`recast_bytes`)


def casts_of_leaves(log: StepRecord) -> frozenset[int]:
    """Return the values that autocast keeps."""
    casts = (run for run in log.runs if run.op_info.is_cast and run.reads)
    return frozenset(one for run in casts if all(log.values[v].is_leaf for v in run.reads) for one in run.makes)


def storages_of(log: StepRecord, values: Iterable[int]) -> frozenset[int]:
    """Return the storages of values."""
    return frozenset(log.values[value].storage for value in values)


class CallReader:
    """Reads the calls of a forward out of its events; its time is the number of entries and exits of calls.

    Args:
        record: The events.
        calls: The calls, as far as they were known when they began; the rest is filled in.
        numbers: The numbers of storages, by the recorder's.
        born: The storages from before the forward, with the time 0.
    """

    def __init__(
        self, record: StepRecord, calls: list[TracedCall], numbers: Mapping[int, int], born: dict[int, int]
    ) -> None:
        self.record = record
        self.calls = calls
        self.numbers = numbers
        self.born = born
        self.died: dict[int, int] = {}
        self.lasting: dict[int, int] = {}
        self.step_saved: list[SavedStorage] = []
        self.time = 0
        self.runs = 0
        self.flops = 0
        self.idle_since: int | None = None  # the first return of a call since which nothing has run
        self.saves: dict[int, tuple[SavedStorage, list[tuple[TracedCall, int]]]] = {}  # with the calls' flops so far

    def read(self) -> None:
        """Read all events; at their end the graphs of saves exist that were not dropped."""
        for index, event in enumerate(self.record.events):
            self._pass(index, event)
        for saved, flops in self.saves.values():
            for call, so_far in flops if saved.dropped is None else ():
                call.flops_saved = so_far

    def _pass(self, index: int, event: Event) -> None:
        match event:
            case Run():
                self.runs += 1
                self.flops += event.flops
                self.idle_since = None
            case StorageFreed():
                if event.storage not in self.numbers:
                    return  # no call has seen it
                # A storage freed after calls returned, before anything else ran, was an argument with no other
                # reference, a variable of one of them, or the old value of the variable that takes its result.
                number = self.numbers[event.storage]
                self.died[number] = self.time
                if self.idle_since is not None:
                    self.lasting[number] = self.time
                    is_older = self.born.get(number, 0) < self.idle_since
                    self.died[number] = (self.idle_since if is_older else self.time) - 1
            case CallEntered():
                self.time += 1
                self.idle_since = None
                call = self.calls[event.call]
                call.entered, call.begins = self.time, event.mark
                call.inputs = self._seen(event.seen, self.time)
                call.operators, call.flops = range(self.runs, self.runs), self.flops
            case CallLeft():
                call = self.calls[event.call]
                call.outputs, call.mutated, call.ends = self._seen(event.seen, self.time + 1), event.mutated, event.mark
                call.operators, call.flops = range(call.operators.start, self.runs), self.flops - call.flops
                self.time += 1
                call.left = self.time
                self.idle_since = self.time if self.idle_since is None else self.idle_since
            case TensorSaved():
                storages = [self.record.values[value].storage for value in event.values] or [-1]
                first, *others = self._shows(storages, self.time + 1)
                saved = SavedStorage(first, self.time, others=tuple(others))
                calls = list(around(self.calls, event.call))
                (calls[0].saved if calls else self.step_saved).append(saved)
                self.saves[index] = saved, [(call, self.flops - call.flops) for call in calls]
            case GraphDropped():
                self.saves[event.save][0].dropped = self.time
            case CallCarried():
                for storage in self._shows(event.storages, self.time + 1):
                    for call in around(self.calls, event.call):
                        if self.born.get(storage, 0) < call.entered and storage not in call.carried:
                            call.carried = (*call.carried, storage)
            case CallHolds():
                call = self.calls[event.call]
                call.carried = tuple(dict.fromkeys((*call.carried, *self._shows(event.storages, self.time))))

    def _shows(self, storages: Iterable[int], time: int) -> list[int]:
        """Return the numbers of storages; the ones seen for the first time are born at this time."""
        found = [self.numbers[storage] for storage in storages]
        for number in found:
            if number >= 0:
                self.born.setdefault(number, time)
        return found

    def _seen(self, seen: list[Seen], time: int) -> list[Seen]:
        storages = self._shows((one.storage for one in seen), time)
        pairs = zip(seen, storages, strict=True)
        return [Seen(one.identity, one.version, storage, one.requires_grad) for one, storage in pairs]
