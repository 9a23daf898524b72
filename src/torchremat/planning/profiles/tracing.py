"""One forward of the user's step, traced: which modules run when, with which tensors, and what they save.

No saved tensor is kept meanwhile, so the forward needs about the memory of one without grad, and a tensor between two
calls lives exactly as long as the Python code around holds it. Both are needed: the order of calls is observed, not
guessed from types, and the live ranges show which boundaries stay alive whatever the plan is.

The operators are logged at the same time, see `operators`; this module works on whole calls.

Compiled modules save other tensors than their eager code, and only the operators of eager code are visible. So with
such modules three forwards run: one runs eagerly and shows operators, one compiles, one shows everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage, nn

from torchremat._compat.accelerators import taken_bytes
from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat._compat.dynamo import is_compiled, outside_graphs
from torchremat._compat.modes import except_traced
from torchremat._compat.sharding import is_sharded
from torchremat._compat.transforms import check_transform_around, left_to_transform, transforms_beside_hooks
from torchremat.errors import StepError, UnsupportedError
from torchremat.measuring.dropping import never, nothing_kept
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.interception import intercepted
from torchremat.measuring.modules import has_compiled
from torchremat.measuring.step import loss_of
from torchremat.measuring.storages import StorageMap
from torchremat.measuring.threads import OwnThread
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.measuring.untouched import untouched
from torchremat.measuring.writes import Looking
from torchremat.planning.conditions import conditions_of, elements_in
from torchremat.planning.profiles.operators import OperatorTracer
from torchremat.planning.profiles.saves import Saves
from torchremat.planning.profiles.traces import SavedStorage, Seen, Trace, TracedCall, named
from torchremat.regions.threads import thread
from torchremat.state.reach import tensors_inside
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import split, tensors_in

Step = Callable[[nn.Module], object]


class _Tracer:
    def __init__(self, model: nn.Module, flops: FlopCounter, log: OperatorTracer) -> None:
        self.hook: object = None  # of the traced forward, for its saves
        self.thread = OwnThread()
        self.flops = flops
        self.log = log
        self.calls: list[TracedCall] = []
        self.time = 0
        self.open: list[int] = []
        self.counts: dict[str, int] = {}
        self.storages = StorageMap[int](self.dies)
        self.storage_bytes: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.died: dict[int, int] = {}
        self.lasting: set[int] = set()
        self.objects_of: dict[int, list[object]] = {}
        self.identities: dict[int, tuple[int, ReferenceType[Tensor]]] = {}
        self.step_saved: list[SavedStorage] = []
        self.saves = Saves(lambda: self.time)
        self.tensors = 0
        self.parameters = {id(one) for one in model.parameters()}
        self.versions: list[list[tuple[Tensor, int]]] = []  # at each call's entry, of its module's parameters
        self.loops = 0  # that have begun
        self.inside_loops = 0
        self.looped: set[str] = set()
        self.idle_since = -1  # number of operators that had run when the last call returned
        self.fixed = frozenset(number for tensor in _named(model) for number in self.storages_of(tensor))

    def storages_of(self, tensor: Tensor, *, new: bool = False) -> tuple[int, ...]:
        """Return the numbers of a tensor's storages, the largest first; -1 alone if it has no visible memory.

        Args:
            tensor: The tensor.
            new: Whether an unseen storage was made since the last event.
        """
        return tuple(self.storage(one, tensor, new=new) for one in memories_of(tensor)) or (-1,)

    def storage(self, storage: UntypedStorage, tensor: Tensor, *, new: bool = False) -> int:
        """Return the number of a storage of a tensor; for `new` see `storages_of`."""
        known = self.storages.get(storage)
        if known is not None:
            return known
        number = self.storages[storage] = len(self.storage_bytes)
        self.storage_bytes[number] = taken_bytes(storage)
        self.born[number] = self.time + new
        self.log.also_known_as(storage, tensor, number)
        return number

    def dies(self, number: int) -> None:
        """Record that a storage is freed."""
        # A storage freed after a call returned, before anything else ran, was an argument with no other reference, or
        # the old value of the variable that takes its result.
        self.died[number] = self.time
        if self.idle_since == len(self.log.trace.runs):
            self.died[number] -= 1
            self.lasting.add(number)

    def seen(self, tensor: Tensor, *, new: bool = False) -> list[Seen]:
        """Return the tensor as seen, one entry for each of its storages."""
        known = self.identities.get(id(tensor))
        if known is None or known[1]() is not tensor:
            known = (self.tensors, ref(tensor))
            self.tensors += 1
            self.identities[id(tensor)] = known
        version = 0 if tensor.is_inference() else tensor._version
        needs = tensor.requires_grad
        return [Seen(known[0], version, storage, needs) for storage in self.storages_of(tensor, new=new)]

    @outside_graphs  # compiled code calls it, and dynamo would trace what is called from there
    def save(self, tensor: Tensor) -> object:
        values, (storage, *others) = self.log.save(tensor), self.storages_of(tensor, new=True)
        saved = SavedStorage(storage, self.time, others=tuple(others))
        calls = [self.calls[index] for index in self.open]
        (calls[-1].saved if calls else self.step_saved).append(saved)
        return self.saves.note(saved, values, ((call, self.flops.total - call.flops) for call in calls))

    def transforms(self) -> None:
        """Record that a reverse-mode transform of torch.func begins."""
        for index in self.open:
            self.calls[index].is_transforming = True

    @contextmanager
    def loop(self) -> Generator[None]:
        """Note that the open calls have a loop, which manages its own memory: calls made in it are not looked at."""
        for index in self.open:
            self.calls[index].is_looping = True
        self.loops += 1
        self.inside_loops += 1
        try:
            yield
        finally:
            self.inside_loops -= 1

    def carried(self, value: object) -> None:
        """Record a value where it is put, and where it is taken: calls begun between get it outside their arguments."""
        storages = [one for tensor in tensors_in(value) for one in self.storages_of(tensor, new=True)]
        for storage in storages:
            for call in (self.calls[index] for index in self.open):
                if self.born.get(storage, 0) < call.entered and storage not in call.carried:
                    call.carried = (*call.carried, storage)

    def look_into_objects(self) -> None:
        """Record which tensors the other arguments hold, and release these arguments."""
        for index in list(self.objects_of):
            inside = tensors_inside(self.objects_of.pop(index))
            call = self.calls[index]
            call.carried = tuple(dict.fromkeys((*call.carried, *chain.from_iterable(map(self.storages_of, inside)))))

    def run(
        self,
        name: str,
        module: nn.Module,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        self.thread.check_here(named(name))
        check_transform_around(named(name))
        if self.inside_loops:
            self.looped.add(name)
            return function(*args, **kwargs)
        hooks = top_saved_tensor_hooks(True)
        if hooks is None or hooks[0] is not self.hook:
            raise UnsupportedError(
                f"{named(name)} is called under saved-tensor hooks: the model checkpoints itself, or "
                "something like `save_on_cpu` is active. What it saves there is out of a plan's reach; switch that off "
                "(in transformers: `gradient_checkpointing_disable()`), the plan decides what is recomputed."
            )
        tensors: list[Tensor] = []
        objects: list[object] = []
        split((args, kwargs), tensors, objects)
        if any(tensor.is_nested for tensor in tensors):
            raise UnsupportedError(
                f"{named(name)} is given a nested tensor, whose bytes cannot be planned. Give padded batches."
            )
        self.time += 1
        self.idle_since = -1
        index = len(self.calls)
        if objects:
            self.objects_of[index] = objects
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        parameters = [*module.parameters()]
        call = TracedCall(
            name=name,
            kind=type(module).__name__,
            number=number,
            parent=self.open[-1] if self.open else None,
            inputs=[seen for tensor in tensors for seen in self.seen(tensor)],
            entered=self.time,
            flops=self.flops.total,
            grad=torch.is_grad_enabled(),
            input_elements=elements_in(tensors),
            conditions=None if self.open else conditions_of(module),
            signature=_signature(module, parameters, tensors),
        )
        self.calls.append(call)
        own = (one for one in parameters if id(one) in self.parameters)  # `functional_call` has others
        self.versions.append([(one, one._version) for one in own if not one.is_inference()])
        self.open.append(index)
        log, first = self.log, len(self.log.trace.runs)
        log.call = index
        call.begins = log.mark()
        try:
            output = function(*args, **kwargs)
        finally:
            self.open.pop()
            log.call = self.open[-1] if self.open else -1
        call.ends = log.mark()
        call.operators = range(first, len(log.trace.runs))
        versions = {self.identities[id(one)][0]: one._version for one in tensors if not one.is_inference()}
        call.mutated = [
            place for place, seen in enumerate(call.inputs) if versions.get(seen.identity, seen.version) != seen.version
        ]
        call.outputs = [seen for tensor in tensors_in(output) for seen in self.seen(tensor, new=True)]
        call.flops = self.flops.total - call.flops
        self.time += 1
        call.left = self.time
        self.idle_since = len(self.log.trace.runs)
        return output


def trace(
    model: nn.Module,
    step: Step,
    record: Callable[[], AbstractContextManager[AllocationRecorder]] | None = None,
    aside: Callable[[], AbstractContextManager[Looking | None]] | None = None,
) -> Trace:
    """Return a traced forward of `step(model)`; model, gradients, buffers, generators and hooks stay as they are.

    Args:
        model: The model.
        step: Returns the loss.
        record: Records the allocator's events in a block. If given, they are part of the trace.
        aside: Returns a context that preserves the state that the step touches, and yields what has to be told of each
            operator for that; `untouched` with the model if not given.

    Raises:
        StepError: The step returns no loss, or one without grad.
    """
    aside = aside or partial(untouched, model)
    recording = nullcontext() if record is None else record()
    flops = FlopCounter()
    with aside() as looking, recording as recorder, OperatorTracer(flops, recorder, looking) as log:
        seen = _run_traced(model, step, flops, log)
    if recorder is not None:
        seen = _recorded(seen, log, recorder.trace)
    if not has_compiled(model):
        return seen
    with aside(), nothing_kept():
        loss_of(step(model))
    with aside():
        flops = FlopCounter()  # no mode is entered, under which compiled code would run eagerly
        return _joined(model, _run_traced(model, step, flops, OperatorTracer(flops, None)), seen)


def _run_traced(model: nn.Module, step: Step, flops: FlopCounter, log: OperatorTracer) -> Trace:
    tracer = _Tracer(model, flops, log)
    try:
        with intercepted(model, tracer.run), transforms_beside_hooks(tracer.transforms):
            tracer.hook = left_to_transform(except_traced(tracer.save))
            push_saved_tensor_hooks(tracer.hook, never)
            thread.on_carried, thread.around_loop = tracer.carried, tracer.loop
            try:
                result = step(model)
            finally:
                thread.on_carried = thread.around_loop = None
                pop_saved_tensor_hooks()
                tracer.hook = None  # it references the tracer
        loss = loss_of(result)
        del result  # logits and caches other than the loss are freed before backward, as in each run
        tracer.look_into_objects()
        tracer.saves.close()
        for call, versions in zip(tracer.calls, tracer.versions, strict=True):
            call.is_overwritten = any(parameter._version != version for parameter, version in versions)
    finally:
        tracer.storages.clear()  # frees from here on are not recorded
    del loss
    return Trace(
        calls=tracer.calls,
        storage_bytes=tracer.storage_bytes,
        fixed=tracer.fixed,
        born=tracer.born,
        died=tracer.died,
        lasting=frozenset(tracer.lasting),
        step_saved=tracer.step_saved,
        end=tracer.time + 1,
        flops=flops.total,
        operators=log.trace,
        sharded=frozenset(name for name, module in model.named_modules() if is_sharded(module)),
        loops=tracer.loops,
        looped=frozenset(tracer.looped),
    )


def _recorded(seen: Trace, log: OperatorTracer, allocations: AllocationTrace) -> Trace:
    """Return a trace with the recorded allocations; see NOTE [ Memory that is not the allocator's ]."""
    log.take_device_time(allocations)
    numbers = log.trace.storages
    foreign = {numbers[storage] for storage in log.find_foreign(allocations) if storage in numbers} - seen.fixed
    storage_bytes = {**seen.storage_bytes, **dict.fromkeys(foreign, 0)}
    return replace(seen, storage_bytes=storage_bytes, allocations=allocations)


def _joined(model: nn.Module, own: Trace, eager: Trace) -> Trace:
    """Return a trace of compiled code with the operators of an eager trace."""
    if [(call.name, call.number) for call in own.calls] != [(call.name, call.number) for call in eager.calls]:
        raise StepError(
            "the step calls other modules when its compiled modules run eagerly than when they run compiled. A plan "
            "needs a step that calls the same modules each time."
        )
    numbers: dict[int, int] = {}
    for call, seen in zip(own.calls, eager.calls, strict=True):
        call.operators, call.begins, call.ends, call.flops = seen.operators, seen.begins, seen.ends, seen.flops
        # A compiled call saves at its end.
        call.flops_saved = seen.flops if is_compiled(model.get_submodule(call.name)) else seen.flops_saved
        pairs = (*zip(seen.inputs, call.inputs, strict=True), *zip(seen.outputs, call.outputs, strict=True))
        numbers.update((theirs.storage, ours.storage) for theirs, ours in pairs)
    log = eager.operators
    log.storages = {storage: numbers[number] for storage, number in log.storages.items() if number in numbers}
    foreign = [ours for theirs, ours in numbers.items() if min(theirs, ours) >= 0 and not eager.storage_bytes[theirs]]
    storage_bytes = {**own.storage_bytes, **dict.fromkeys(foreign, 0)}
    return replace(own, flops=eager.flops, operators=log, allocations=eager.allocations, storage_bytes=storage_bytes)


def _named(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model.

    Raises:
        UnsupportedError: The bytes of one of them cannot be counted.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        try:
            memories_of(tensor)
        except UnsupportedError as error:
            raise UnsupportedError(f"`{name}`: {error}") from None
        yield tensor


def _signature(module: nn.Module, parameters: list[nn.Parameter], tensors: list[Tensor]) -> tuple[object, ...]:
    """Return the cost key of a call, known before it runs: the type, the shapes of parameters, the inputs."""
    return (
        type(module).__qualname__,
        module.training,
        tuple([tuple(parameter.shape) for parameter in parameters]),
        tuple((tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.requires_grad) for tensor in tensors),
    )
