"""`StepRecorder`: records a step as a list of events, real or on fakes.

A dispatch mode sees the operators below autograd, like the policy of a region, and counts them the same way: operators
that compute nothing do not count, see `regions.selective.op_info`. Calls of modules and saved tensors are told to it.

A storage and a tensor have one number each, in the order in which they are first seen. A value is a storage between two
writes to it. Compiled code runs eagerly under a mode, so its operators are not those of a later step; they are marked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.accelerators import accelerator_of, taken_bytes
from torchremat._compat.collectives import wait_for
from torchremat._compat.dynamo import runs_compiled_code
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat._compat.operators import READ_AS_NUMBER
from torchremat._compat.sharding import is_run_by_fsdp, shards_anything
from torchremat.ambient.hidden import hidden
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.step_record import GraphDropped, Run, Seen, SeenValue, StepRecord, StorageFreed, TensorSaved
from torchremat.measuring.storages import StorageMap
from torchremat.measuring.traces import AllocationRecorder
from torchremat.measuring.writes import Looking
from torchremat.regions.selective.cache import written_by
from torchremat.regions.selective.op_info import OpInfo, op_info_of
from torchremat.stores.stored_parameters import StoredParameter, parameter_in
from torchremat.tensors.metadata import shape_of
from torchremat.tensors.parts import is_wrapper, memories_of
from torchremat.tensors.structure import tensors_in


class _KnownStorage(NamedTuple):
    """The number of a storage, and the number of the value that it has now."""

    number: int
    value: int


class _GraphSave:
    """The object that a graph holds in place of a saved tensor."""

    __slots__ = ("__weakref__",)


class StepRecorder(EagerMode):
    """Records the operators that run while it is entered, and the events that it is told of.

    Args:
        flops: Counts their flops; it is no mode beside this one.
        allocations: Takes marks around each operator, and has the time; None if no allocations are recorded.
        looking: Is told of each operator before it runs, if given: one mode costs less than two.

    Attributes:
        record: The step so far.
        call: Index of the innermost call that is open; the code that follows the calls sets it.
        marks: Whether it takes marks; two for each operator take longer than all the rest.
        sees_all: Whether operators count that a region does not: those that compute nothing, and FSDP2's own.
    """

    def __init__(
        self, flops: FlopCounter, allocations: AllocationRecorder | None, looking: Looking | None = None
    ) -> None:
        super().__init__()
        self.record = StepRecord()
        self.call = -1
        self.marks = allocations is not None
        self.sees_all = False
        self._looking = looking
        self._flops = flops
        self._allocations = allocations
        self._seconds = time.perf_counter if allocations is None else allocations.seconds
        self._storages = StorageMap[_KnownStorage](self._freed)
        self._parameters: dict[int, _KnownStorage] = {}  # of offloads, by their ids: they live as long as the model
        self._moving: set[int] = set()  # the numbers of their storages
        self._count = 0
        self._tensors: dict[int, tuple[int, ReferenceType[Tensor]]] = {}
        self._seen_tensors = 0
        self._graphs: list[ReferenceType[_GraphSave]] = []
        self._beside_fsdp = shards_anything()

    def mark(self) -> int:
        """Mark this point among the allocations; -1 if it takes no marks."""
        return self._allocations.mark("operator") if self.marks and self._allocations is not None else -1

    def save(self, tensor: Tensor) -> object:
        """Record that autograd saves a tensor, and return the object to save in its place."""
        events, packed = self.record.events, _GraphSave()
        saved = TensorSaved(self._shown(tensor), self.call)
        save = len(events)
        events.append(saved)
        self._graphs.append(ref(packed, lambda _: events.append(GraphDropped(save))))
        return packed

    def seen(self, tensor: Tensor) -> list[Seen]:
        """Return the tensor as a call sees it now, one entry for each of its storages."""
        known = self._tensors.get(id(tensor))
        if known is None or known[1]() is not tensor:
            known = self._tensors[id(tensor)] = self._seen_tensors, ref(tensor)
            self._seen_tensors += 1
        version = 0 if tensor.is_inference() else tensor._version
        return [Seen(known[0], version, storage, tensor.requires_grad) for storage in self.storages(tensor)]

    def identity(self, tensor: Tensor) -> int:
        """Return the number of a tensor that a call has seen."""
        return self._tensors[id(tensor)][0]

    def storages(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the storages that a tensor shows, the largest first; -1 alone if it has no visible memory."""
        return tuple(self.record.values[value].storage for value in self._shown(tensor)) or (-1,)

    def _shown(self, tensor: Tensor) -> list[int]:
        """Return the values that a tensor shows to a call or to autograd."""
        if type(tensor) is StoredParameter:
            return [self._waiting(tensor)]
        record, found = self.record, list[int]()
        for memory in memories_of(tensor):
            value = self._value(memory, tensor)
            found.append(value)
            storage = record.values[value].storage
            if storage not in record.shown:
                record.shown[storage] = taken_bytes(memory)
        return found

    def close(self) -> None:
        """Record no more frees."""
        self._storages.clear()
        self._graphs.clear()

    def _freed(self, known: _KnownStorage) -> None:
        if known.number not in self._moving:
            self.record.events.append(StorageFreed(known.number))

    def _waiting(self, parameter: StoredParameter) -> int:
        """Return the value of a parameter that is not in memory, without bringing it back."""
        known = self._parameters.get(id(parameter))
        if known is None:
            block_bytes = accelerator_of(parameter.device).block_bytes
            size_bytes = -(-parameter.nbytes // block_bytes) * block_bytes
            known = self._add(parameter, size_bytes=size_bytes, pointer=0)
            self._moves(parameter, known)
            self.record.shown[known.number] = size_bytes
        return known.value

    def _moves(self, parameter: Tensor, known: _KnownStorage) -> None:
        """Take note of the storage of a parameter of an offload, which has other memory each time it comes back."""
        self._parameters[id(parameter)] = known
        self._moving.add(known.number)

    def _known(self, memory: UntypedStorage) -> _KnownStorage | None:
        known = self._storages.get(memory)
        if known is None and (parameter := parameter_in(memory)) is not None:
            known = self._parameters.get(id(parameter))
            if known is not None:
                self._storages[memory] = known
        return known

    def _value(self, memory: UntypedStorage, tensor: Tensor) -> int:
        known = self._known(memory)
        if known is None:
            return self._new(memory, tensor)
        if tensor.is_leaf and tensor.requires_grad:
            self.record.values[known.value].is_leaf = True
        if is_wrapper(tensor):
            self.record.values[known.value].is_part = True
        return known.value

    def _new(self, memory: UntypedStorage, tensor: Tensor) -> int:
        pointer = self._pointer_of(memory)
        # A hook gets a view of a parameter, whose base is the leaf.
        base = tensor if tensor._base is None else tensor._base
        known = self._storages[memory] = self._add(base, size_bytes=taken_bytes(memory), pointer=pointer)
        if (parameter := parameter_in(memory)) is not None:
            self._moves(parameter, known)
        # On a simulated device a real tensor has no address, and stands for memory of the device.
        if pointer > 0 and (not memory.resizable() or self._is_elsewhere(memory)):
            self.record.strangers.append((known.value, self.mark()))
        return known.value

    def _add(self, tensor: Tensor, *, size_bytes: int, pointer: int) -> _KnownStorage:
        """Give a storage its numbers, which is that of `tensor`."""
        number, self._count = self._count, self._count + 1
        known = _KnownStorage(number, len(self.record.values))
        self.record.values.append(
            SeenValue(
                size_bytes=size_bytes,
                pointer=pointer,
                storage=number,
                device=tensor.device,
                is_leaf=tensor.is_leaf and tensor.requires_grad,
                is_part=is_wrapper(tensor),
            )
        )
        return known

    def _is_elsewhere(self, memory: UntypedStorage) -> bool:
        """Return whether a storage is on another device than the recorded one."""
        return self._allocations is not None and memory.device != self._allocations.device

    def _pointer_of(self, memory: UntypedStorage) -> int:
        """Return the address of a storage among the allocations; 0 if none are recorded."""
        return 0 if self._allocations is None else self._allocations.pointer_of(memory)

    def _written(self, tensor: Tensor) -> list[int]:
        """Return the new values of a tensor that was written."""
        return [self._written_to(memory, tensor) for memory in memories_of(tensor)]

    def _written_to(self, memory: UntypedStorage, tensor: Tensor) -> int:
        known = self._known(memory)
        if known is None:
            return self._new(memory, tensor)
        values = self.record.values
        values[known.value].is_overwritten = True
        values.append(
            SeenValue(
                size_bytes=taken_bytes(memory),
                pointer=self._pointer_of(memory),
                storage=known.number,
                device=values[known.value].device,
            )
        )
        now = self._storages[memory] = _KnownStorage(known.number, len(values) - 1)
        if known.number in self._moving and (parameter := parameter_in(memory)) is not None:
            self._moves(parameter, now)
        return now.value

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        named = kwargs or {}
        if hidden.now:
            return func(*args, **named)
        op_info = op_info_of(func)
        if self._looking is not None:
            self._looking.see(op_info, args, named)
        if not self.sees_all:
            if op_info.is_ignored:
                return func(*args, **named)
            if self._beside_fsdp and is_run_by_fsdp(None):
                # A region neither counts them nor runs them again.
                for tensor in written_by(op_info.writes, args, named):
                    self._written(tensor)
                return self._flops.run(func, args, named)
        tensors = tensors_in((args, dict(named)) if named else args)
        reads = dict.fromkeys([self._value(memory, tensor) for tensor in tensors for memory in memories_of(tensor)])
        flops, call, storages = self._flops.total, self.call, self._count
        begins = self.mark()
        start_s = self._seconds()
        exchanges = op_info.communicates
        if exchanges:
            result = op_info.run(*args, **named)
            if not op_info.is_paired:
                wait_for(result)  # its seconds are those until it is done
        elif wrappers := {type(one) for one in tensors if is_wrapper(one)}:
            with _Exchanging(wrappers) as inside:
                result = self._flops.run(func, args, named)
            exchanges = inside.found
        else:
            result = self._flops.run(func, args, named)
        seconds = self._seconds() - start_s
        ends = self.mark()
        record = self.record
        varies = func is READ_AS_NUMBER or (exchanges and any(map(_are_sizes, args)))
        if op_info.is_sized_by_values:
            # Among indices, only masks are counted.
            masks = any(one.dtype in (torch.bool, torch.uint8) for one in tensors[1:])
            varies = masks or func is not torch.ops.aten.index.Tensor
            record.is_sized_by_values |= varies
        makes: dict[int, None] = {}
        for tensor in written_by(op_info.writes, args, named):
            makes.update(dict.fromkeys(self._written(tensor)))
        for tensor in tensors_in(result):
            for memory in memories_of(tensor):
                value = self._value(memory, tensor)
                if record.values[value].storage >= storages:
                    makes[value] = None
        record.events.append(
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
                exchanges=exchanges,
                varies=varies,
            )
        )
        return result


class _Exchanging(EagerMode):
    """Finds out whether an operator on wrappers, like DTensors, exchanges something inside."""

    def __init__(self, wrappers: set[type]) -> None:
        super().__init__()
        self._wrappers = wrappers
        self.found = False

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if not self._wrappers.isdisjoint(types):
            return NotImplemented  # the class goes first, and what it runs comes back here
        self.found |= op_info_of(func).communicates
        return func(*args, **(kwargs or {}))


def _are_sizes(argument: object) -> bool:
    """Return whether an argument of a collective says how much goes to, or comes from, each process."""
    if not isinstance(argument, list) or len(cast("list[object]", argument)) < 2:
        return False
    first, *others = cast("list[object]", argument)
    differ = isinstance(first, Tensor) and any(one.shape != first.shape for one in tensors_in(others))
    return type(first) is int or differ


def _signature(op_info: OpInfo, tensors: list[Tensor], args: Args, kwargs: Mapping[str, object]) -> tuple[object, ...]:
    shapes = tuple([(tuple(shape_of(one)), one.dtype, one.device.type) for one in tensors])
    return (id(op_info), shapes, tuple([one for one in (*args, *kwargs.values()) if isinstance(one, _NUMBERS)]))


_NUMBERS = (bool, int, float, str, torch.dtype)
