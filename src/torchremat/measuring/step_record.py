"""A step as one list of events: its operators, the calls of modules, saved tensors and freed storages, in order.

`StepRecorder` makes it. Readers are functions of the list: `planning.profiles.tracing` reads the calls of a profile,
`planning.bounds.plain_step` the values that a backward needs. See NOTE [ What records a step ].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from torchremat.measuring.traces import AllocationTrace
from torchremat.regions.selective.op_info import OpInfo


@dataclass(frozen=True, slots=True)
class Seen:
    """A tensor as a call saw it.

    Attributes:
        identity: A number for the Python object.
        version: Its version then.
        storage: A number for its storage; -1 if it has no visible memory.
        requires_grad: Whether gradients flow to it.
    """

    identity: int
    version: int
    storage: int
    requires_grad: bool


class CallEntered(NamedTuple):
    """A call of a module began, with these tensors; the mark is -1 if no allocations were recorded."""

    call: int
    seen: list[Seen]
    mark: int


class CallLeft(NamedTuple):
    """A call returned these tensors; it had written in place to its arguments with the indices `mutated`."""

    call: int
    seen: list[Seen]
    mutated: list[int]
    mark: int


class TensorSaved(NamedTuple):
    """Autograd saved a tensor in a call (-1: in the step's code): a value for each part of it with visible memory."""

    values: list[int]
    call: int


class GraphDropped(NamedTuple):
    """The graph that held a saved tensor was freed; `save` is the index of its event."""

    save: int


class StorageFreed(NamedTuple):
    """A storage was freed."""

    storage: int


class CallCarried(NamedTuple):
    """Storages were put aside or taken in this call: calls begun between get them outside of their arguments."""

    call: int
    storages: tuple[int, ...]


class CallHolds(NamedTuple):
    """The other arguments of a call, a cache say, hold these storages at the end of the forward."""

    call: int
    storages: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Run:
    """An operator that ran.

    Attributes:
        op_info: The operator's op info.
        call: Index of the innermost call that was open; -1 for the step's own code.
        reads: Values, each once.
        makes: Values: new storages, and storages that it has written to.
        flops: Flops of the operator.
        seconds: Seconds of this one run.
        signature: The key shared by operators of equal cost.
        begins: The mark before it; -1 if no allocations were recorded.
        ends: The mark after it.
        is_compiled: Whether compiled code ran it.
        exchanges: Whether other processes took part in it.
        varies: Whether it tells of values: by the sizes of what it makes, by the sizes that it exchanges, as a number.
    """

    op_info: OpInfo
    call: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: int
    seconds: float
    signature: tuple[object, ...]
    begins: int
    ends: int
    is_compiled: bool
    exchanges: bool
    varies: bool

    @property
    def name(self) -> str:
        """The name in torch: `aten.mul.Tensor`."""
        return self.op_info.name


Event: TypeAlias = CallEntered | CallLeft | TensorSaved | GraphDropped | StorageFreed | CallCarried | CallHolds | Run


@dataclass(slots=True, kw_only=True)
class SeenValue:
    """A storage between two writes to it.

    Attributes:
        size_bytes: Size of the storage.
        pointer: Address of its memory.
        storage: A number for the storage.
        device: The device of the tensor in which it was first seen: a fake's storage is on none.
        is_overwritten: Whether it was written to afterwards.
        is_leaf: Whether it is the memory of a leaf that requires grad, like a parameter.
        is_part: Whether it was seen as a part of a tensor that wraps others: a policy finds it under no wrapper.
        is_foreign: Whether its memory is not the allocator's. See NOTE [ Memory that is not the allocator's ].
    """

    size_bytes: int
    pointer: int
    storage: int
    device: torch.device
    is_overwritten: bool = False
    is_leaf: bool = False
    is_part: bool = False
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that autograd saved.

    Attributes:
        value: Its number.
        position: Number of operators that had begun before.
        call: Index of the innermost call that was open; -1 for the step's own code.
        is_dropped: Whether its graph is freed by the end of the record, so that no backward needs it.
    """

    value: int
    position: int
    call: int
    is_dropped: bool


# NOTE [ Memory that is not the allocator's ]
# A storage may use the memory of a NumPy array, of a Python buffer, of another library. The allocator never reports it,
# and no peak includes it, so a plan must not count it. It is recognised as follows:
#
#   1. torch cannot resize the storage. This alone does not suffice: `x.numpy()` comes back as such a storage in the
#      memory of `x`, and the allocator does report a file that torch maps.
#   2. When it is first seen, its address is in no block that was allocated since the recording began.
#
# Memory of another device is not the recorded allocator's either: attention on CUDA saves its seed and its offset as
# two tensors of 8 bytes each on the CPU.
#
# Both also hold for such a storage from before, like a batch that was made from an array. It lives all the time, and
# counts at all program points of a step or at none. Other storages from before are counted, since on CUDA their frees
# are.


@dataclass(kw_only=True)
class StepRecord:
    """The events of a step, and the values that its operators read and make.

    Attributes:
        events: In order.
        values: By number.
        shown: By storage that calls and saved tensors have shown, in this order, its bytes then.
        strangers: Values whose memory may not be the allocator's, each with a mark at which the value was live.
        is_sized_by_values: Whether an operator made an output whose size depends on values.
    """

    events: list[Event] = field(default_factory=list[Event])
    values: list[SeenValue] = field(default_factory=list[SeenValue])
    shown: dict[int, int] = field(default_factory=dict[int, int])
    strangers: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    is_sized_by_values: bool = False

    @cached_property
    def runs(self) -> list[Run]:
        """The operators; to be read when the step is over."""
        return [event for event in self.events if isinstance(event, Run)]

    @cached_property
    def saves(self) -> list[SavedValue]:
        """The saved values; to be read when the step is over."""
        dropped = {event.save for event in self.events if isinstance(event, GraphDropped)}
        found, position = list[SavedValue](), 0
        for index, event in enumerate(self.events):
            if isinstance(event, Run):
                position += 1
            elif isinstance(event, TensorSaved):
                found += [SavedValue(value, position, event.call, index in dropped) for value in event.values]
        return found

    def foreign(self, allocations: AllocationTrace) -> frozenset[int]:
        """Return the storages whose memory is not the allocator's, whose events in the same time are given."""
        strangers = ((self.values[value], mark) for value, mark in self.strangers)
        return frozenset(one.storage for one, mark in strangers if not allocations.has(one.pointer, mark))

    def timed(self, allocations: AllocationTrace) -> StepRecord:
        """Return the record with the device's seconds, where they are known: the host's are those of launches."""
        if not allocations.has_device_time:
            return self
        events = [_timed(event, allocations) if isinstance(event, Run) else event for event in self.events]
        return replace(self, events=events)

    def numbered(self, numbers: Mapping[int, int], beyond: int, foreign: Iterable[int] = ()) -> StepRecord:
        """Return the record with other numbers for the storages of values.

        Args:
            numbers: The new numbers of some storages, by their present ones; all others get numbers from `beyond` on.
            beyond: Larger than each new number.
            foreign: Storages, by their present number, whose memory is not the allocator's.
        """
        alien = frozenset(foreign)
        values = [
            replace(
                value,
                storage=numbers.get(value.storage, beyond + value.storage),
                is_foreign=value.is_foreign or value.storage in alien,
            )
            for value in self.values
        ]
        return replace(self, values=values)


def _timed(run: Run, allocations: AllocationTrace) -> Run:
    return replace(run, seconds=max(0.0, allocations.seconds_between(run.begins, run.ends)))
