"""The operators of a traced forward: the values that each reads and makes, its seconds, and what autograd saves.

A dispatch mode sees them below autograd, like the policy of a region, and counts them the same way: operators that
compute nothing do not count, see `regions.selective.op_info`.

A value is a storage between two writes to it. Compiled code runs eagerly under a mode, so its operators are not those
of a later step; they are marked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.accelerators import taken_bytes
from torchremat._compat.dynamo import runs_compiled_code
from torchremat._compat.modes import EagerMode
from torchremat._compat.sharding import is_run_by_fsdp, shards_anything
from torchremat.measuring.storages import StorageMap
from torchremat.regions.selective.cache import written_by
from torchremat.regions.selective.op_info import OpInfo, op_info_of
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat.measuring.flops import FlopCounter
    from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
    from torchremat.measuring.writes import Looking


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

    @property
    def name(self) -> str:
        """The name in torch: `aten.mul.Tensor`."""
        return self.op_info.name


@dataclass(slots=True, kw_only=True)
class SeenValue:
    """A storage between two writes to it.

    Attributes:
        size_bytes: Size of the storage.
        pointer: Address of its memory.
        storage: A number for the storage.
        is_overwritten: Whether it was written to afterwards.
        is_leaf: Whether it is the memory of a leaf that requires grad, like a parameter.
        is_foreign: Whether its memory is not the allocator's. See NOTE [ Memory that is not the allocator's ].
    """

    size_bytes: int
    pointer: int
    storage: int
    is_overwritten: bool = False
    is_leaf: bool = False
    is_foreign: bool = False


@dataclass(slots=True)
class SavedValue:
    """A value that autograd saved.

    Attributes:
        value: Its number.
        position: Number of operators that had begun before.
        call: Index of the innermost call that was open; -1 for the step's own code.
        is_dropped: Whether its graph is freed by the end of the forward, so that no backward needs it.
    """

    value: int
    position: int
    call: int
    is_dropped: bool = False


@dataclass(kw_only=True)
class OperatorTrace:
    """The operators of a forward.

    Attributes:
        runs: In order.
        values: By number.
        saves: In order; tensors without visible memory are left out.
        storages: For the number of a storage here its number in the trace of the calls, if it is in that trace.
        is_sized_by_values: Whether an operator made an output whose size depends on values.
    """

    runs: list[Run] = field(default_factory=list[Run])
    values: list[SeenValue] = field(default_factory=list[SeenValue])
    saves: list[SavedValue] = field(default_factory=list[SavedValue])
    storages: dict[int, int] = field(default_factory=dict[int, int])
    is_sized_by_values: bool = False


# The time of an operator without flops: the bytes that it moves, and the call itself.
_BYTES_PER_S = 1e10
_CALL_S = 5e-6


def nominal_seconds(log: OperatorTrace, run: Run) -> float:
    """Return the seconds of an operator on a generic device, for plans that have to be the same everywhere."""
    moved = sum(log.values[value].size_bytes for value in (*run.reads, *run.makes))
    return moved / _BYTES_PER_S + _CALL_S


# NOTE [ Casts in a recompute ]
# Autocast keeps the casts of leaves until the outermost autocast ends, for further casts of the same leaf. When
# backward recomputes, that autocast has ended, so a recompute makes its own casts, and keeps them until it ends:
#
#   cast in the unit          autocast keeps the cast, and a recompute makes a new one
#   found made by another     likewise: the recompute makes a cast that the traced forward lacks (`recast_bytes`)


def casts_of_leaves(log: OperatorTrace) -> frozenset[int]:
    """Return the values that autocast keeps."""
    casts = (run for run in log.runs if run.op_info.is_cast and run.reads)
    return frozenset(one for run in casts if all(log.values[v].is_leaf for v in run.reads) for one in run.makes)


def numbers_of(log: OperatorTrace, values: Iterable[int]) -> frozenset[int]:
    """Return the numbers in the trace of the calls for the storages of values, without unknown storages."""
    storages = (log.values[value].storage for value in values)
    return frozenset(log.storages[storage] for storage in storages if storage in log.storages)


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


class _SeenStorage(NamedTuple):
    """The number of a storage, and the number of the value that it has now."""

    number: int
    value: int


class OperatorTracer(EagerMode):
    """Logs the operators that run while it is entered.

    Args:
        flops: Counts their flops; it is no mode beside this one.
        recorder: Takes marks around each operator; None if no allocations are recorded.
        looking: Is told of each operator before it runs, if given: one mode costs less than two.

    Attributes:
        trace: The operators that ran so far.
        call: Index of the innermost call that is open; set by the code that follows the calls.
    """

    def __init__(self, flops: FlopCounter, recorder: AllocationRecorder | None, looking: Looking | None = None) -> None:
        super().__init__()
        self._looking = looking
        self.trace = OperatorTrace()
        self.call = -1
        self._flops = flops
        self._recorder = recorder
        self._seconds = time.perf_counter if recorder is None else recorder.seconds
        self._storages = StorageMap[_SeenStorage]()
        self._count = 0
        # Values whose memory may not be the allocator's, each with a mark at which the value was live.
        self._strangers: list[tuple[int, int]] = []
        self._beside_fsdp = shards_anything()

    def take_device_time(self, allocations: AllocationTrace) -> None:
        """Replace the seconds of operators by those of the device: until now they are the launch times.

        Args:
            allocations: The recording of the same time.
        """
        for run in self.trace.runs if allocations.has_device_time else ():
            run.seconds = max(0.0, allocations.seconds_between(run.begins, run.ends))

    def find_foreign(self, allocations: AllocationTrace) -> frozenset[int]:
        """Record which values are in memory that is not the allocator's, and return the numbers of their storages.

        Args:
            allocations: The recording of the same time.
        """
        values = self.trace.values
        strangers = ((values[value], mark) for value, mark in self._strangers)
        found = frozenset(one.storage for one, mark in strangers if not allocations.has(one.pointer, mark))
        for value in values if found else ():
            value.is_foreign = value.storage in found
        return found

    def mark(self) -> int:
        """Mark this point among the allocations; -1 if none are recorded."""
        return -1 if self._recorder is None else self._recorder.mark("operator")

    def save(self, tensor: Tensor) -> list[SavedValue]:
        """Record that autograd saves a tensor, and return the saved values: one for each of its storages."""
        saves = [SavedValue(value, len(self.trace.runs), self.call) for value in self.values(tensor)]
        self.trace.saves += saves
        return saves

    def also_known_as(self, memory: UntypedStorage, tensor: Tensor, number: int) -> None:
        """Record the number that the trace of the calls gives to the memory of a tensor."""
        self.trace.storages[self.trace.values[self.value(memory, tensor)].storage] = number

    def values(self, tensor: Tensor) -> list[int]:
        """Return the numbers of the values that a tensor has now; none if it has no visible memory."""
        return [self.value(memory, tensor) for memory in memories_of(tensor)]

    def value(self, memory: UntypedStorage, tensor: Tensor) -> int:
        """Return the number of the value that the memory of a tensor has now."""
        known = self._storages.get(memory)
        if known is None:
            return self._new(memory, tensor)
        if tensor.is_leaf and tensor.requires_grad:
            self.trace.values[known.value].is_leaf = True
        return known.value

    def _new(self, memory: UntypedStorage, tensor: Tensor) -> int:
        number, self._count = self._count, self._count + 1
        value = len(self.trace.values)
        # A hook gets a view of a parameter, whose base is the leaf.
        base = tensor if tensor._base is None else tensor._base
        self.trace.values.append(
            SeenValue(
                size_bytes=taken_bytes(memory),
                pointer=self._pointer_of(memory),
                storage=number,
                is_leaf=base.is_leaf and base.requires_grad,
            )
        )
        self._storages[memory] = _SeenStorage(number, value)
        # On a simulated device a real tensor has no address, and stands for memory of the device.
        if self.trace.values[value].pointer > 0 and (not memory.resizable() or self._is_elsewhere(memory)):
            self._strangers.append((value, self.mark()))
        return value

    def _is_elsewhere(self, memory: UntypedStorage) -> bool:
        """Return whether a storage is on another device than the recorded one."""
        return self._recorder is not None and memory.device != self._recorder.device

    def _pointer_of(self, memory: UntypedStorage) -> int:
        """Return the address of a storage among the allocations; 0 if none are recorded."""
        return 0 if self._recorder is None else self._recorder.pointer_of(memory)

    def _written(self, tensor: Tensor) -> list[int]:
        """Return the new values of a tensor that was written."""
        return [self._written_to(memory, tensor) for memory in memories_of(tensor)]

    def _written_to(self, memory: UntypedStorage, tensor: Tensor) -> int:
        known = self._storages.get(memory)
        if known is None:
            return self._new(memory, tensor)
        values = self.trace.values
        values[known.value].is_overwritten = True
        pointer = self._pointer_of(memory)
        values.append(SeenValue(size_bytes=taken_bytes(memory), pointer=pointer, storage=known.number))
        self._storages[memory] = _SeenStorage(known.number, len(values) - 1)
        return len(values) - 1

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        op_info = op_info_of(func)
        if self._looking is not None:
            self._looking.see(op_info, args, named)
        if op_info.is_ignored:
            return func(*args, **named)
        if self._beside_fsdp and is_run_by_fsdp(None):
            # A region neither counts them nor runs them again.
            for tensor in written_by(op_info.writes, args, named):
                self._written(tensor)
            return self._flops.run(func, args, named)
        tensors = tensors_in((args, dict(named)))
        reads = dict.fromkeys(value for tensor in tensors for value in self.values(tensor))
        flops, call, storages = self._flops.total, self.call, self._count
        begins = self.mark()
        start_s = self._seconds()
        result = self._flops.run(func, args, named)
        seconds = self._seconds() - start_s
        ends = self.mark()
        if op_info.is_sized_by_values:
            # Among indices, only masks are counted.
            masks = any(one.dtype in (torch.bool, torch.uint8) for one in tensors[1:])
            self.trace.is_sized_by_values |= masks or func is not torch.ops.aten.index.Tensor
        makes: dict[int, None] = {}
        for tensor in written_by(op_info.writes, args, named):
            makes.update(dict.fromkeys(self._written(tensor)))
        for tensor in tensors_in(result):
            new = (value for value in self.values(tensor) if self.trace.values[value].storage >= storages)
            makes.update(dict.fromkeys(new))
        self.trace.runs.append(
            Run(
                op_info=op_info,
                call=call,
                reads=tuple(reads),
                makes=tuple(makes),
                flops=self._flops.total - flops,
                seconds=seconds,
                signature=_signature(op_info, tensors, args, named),
                begins=begins,
                ends=ends,
                is_compiled=runs_compiled_code(),
            )
        )
        return result


def _signature(
    op_info: OpInfo, tensors: list[Tensor], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[object, ...]:
    shapes = tuple((tuple(one.shape), one.dtype, one.device.type) for one in tensors)
    numbers = tuple(one for one in (*args, *kwargs.values()) if isinstance(one, bool | int | float | str | torch.dtype))
    return (id(op_info), shapes, numbers)
