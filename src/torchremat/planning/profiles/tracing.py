"""One forward of the user's step, traced: which modules run when, with which tensors, and what they save.

No saved tensor is kept meanwhile, so the forward needs about the memory of one without grad, and a tensor between two
calls lives exactly as long as the Python code around holds it. Both are needed: the order of calls is observed, not
guessed from types, and the live ranges show which boundaries stay alive whatever the plan is.

The recorder notes operators at the same time, see `measuring.recorder`; this module works on whole calls.

Compiled modules and methods save other tensors than their eager code, and only the operators of eager code are visible.
So with such three forwards run: one runs eagerly and shows operators, one compiles, one shows everything else.

A step that takes a gradient itself, `torch.autograd.grad(..., create_graph=True)`, runs once more, and keeps what is
saved.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat._compat.checkpoints import is_plain_backward
from torchremat._compat.collectives import holds_work
from torchremat._compat.data_parallel import is_data_parallel
from torchremat._compat.dynamo import is_called_compiled, is_compiled, outside_graphs
from torchremat._compat.modes import except_traced
from torchremat._compat.sharding import is_sharded
from torchremat._compat.tensors import is_nested_strided
from torchremat._compat.transforms import (
    check_transform_around,
    innermost_transform,
    left_to_transform,
    transforms_beside_hooks,
)
from torchremat.ambient.hidden import hiding
from torchremat.errors import StepError, UnsupportedError
from torchremat.measuring.dropping import never, nothing_kept
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.modules import OwnThread, has_compiled, intercepted
from torchremat.measuring.recorder import StepRecorder
from torchremat.measuring.step import loss_of
from torchremat.measuring.step_record import (
    CallCarried,
    CallEntered,
    CallHolds,
    CallLeft,
)
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.measuring.untouched import untouched
from torchremat.measuring.writes import Looking
from torchremat.planning.profiles.traces import CallReader, Trace, TracedCall, around, named
from torchremat.planning.training.conditions import conditions_of, elements_in
from torchremat.regions.threads import thread
from torchremat.state.reach import tensors_inside
from torchremat.stores.stored_parameters import StoredParameter
from torchremat.tensors.parts import memories_of
from torchremat.tensors.structure import split, tensors_in

Step = Callable[[nn.Module], object]


class _CallFollower:
    """Follows the calls of modules in a traced forward, and tells the recorder.

    Attributes:
        calls: The calls so far, as far as they are known when they begin.
        fixed: Storages of parameters and buffers, by the recorder's numbers.
        loops: How many loops have begun.
        untraced: The names of the modules that loops called, or code inside of a transform of torch.func, and of those
            that were given nested tensors.
        parameter_names: The names of parameters, by storage.
    """

    def __init__(self, model: nn.Module, log: StepRecorder) -> None:
        self.hook: object = None  # of the traced forward, for its saves
        self.thread = OwnThread()
        self.log = log
        self.calls: list[TracedCall] = []
        self.counts: dict[str, int] = {}
        self.objects_of: dict[int, list[object]] = {}
        self.parameters = {id(one) for one in model.parameters()}
        self.versions: list[list[tuple[Tensor, int]]] = []  # at each call's entry, of its module's parameters
        self.loops = 0
        self.inside_loops = 0
        self.untraced: set[str] = set()
        self.fixed = frozenset(number for tensor in _named(model) for number in log.storages(tensor))
        named = model.named_parameters()
        self.parameter_names = {number: name for name, one in named for number in log.storages(one)}

    @outside_graphs  # compiled code calls it, and dynamo would trace what is called from there
    def save(self, tensor: Tensor) -> object:
        return self.log.save(tensor)

    @outside_graphs
    def keep(self, tensor: Tensor) -> object:
        packed = self.log.save(tensor)
        with hiding():  # with its graph, which refers to what is saved, it would never be freed
            return _KeptSave(tensor.detach(), packed)

    def transforms(self) -> None:
        """Record that a reverse-mode transform of torch.func begins."""
        for call in around(self.calls, self.log.call):
            call.is_transforming = True

    @contextmanager
    def loop(self) -> Generator[None]:
        """Note that the open calls have a loop, which manages its own memory: calls made in it are not looked at."""
        for call in around(self.calls, self.log.call):
            call.is_looping = True
        self.loops += 1
        self.inside_loops += 1
        try:
            yield
        finally:
            self.inside_loops -= 1

    def carried(self, value: object) -> None:
        """Record a value where it is put, and where it is taken: calls begun between get it outside their arguments."""
        storages = tuple(one for tensor in tensors_in(value) for one in self.log.storages(tensor))
        self.log.record.events.append(CallCarried(self.log.call, storages))

    def ended(self) -> None:
        """Record which tensors the other arguments hold, and release these arguments; and which parameters changed."""
        for index in list(self.objects_of):
            inside = tensors_inside(self.objects_of.pop(index))
            storages = tuple(chain.from_iterable(map(self.log.storages, inside)))
            self.log.record.events.append(CallHolds(index, storages))
        for call, versions in zip(self.calls, self.versions, strict=True):
            call.is_overwritten = any(parameter._version != version for parameter, version in versions)

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
        # A region inside of `vmap` or `jvp` cannot be recomputed once the transform is over: its caller may be one.
        if self.inside_loops or innermost_transform() is not None:
            self.untraced.add(name)
            return function(*args, **kwargs)
        if is_called_compiled():
            raise UnsupportedError(
                f"{named(name)} is called by a compiled function that is neither a method of a module nor one of its "
                "attributes, and to see its calls would compile that function anew each time. Compile the module "
                "itself, by `module.compile()`, or make the compiled function an attribute of the module that calls it."
            )
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
        if any(map(is_nested_strided, tensors)):  # as the fast path of a frozen `nn.TransformerEncoder` makes them
            self.untraced.add(name)
            return function(*args, **kwargs)
        if any(tensor.is_nested for tensor in tensors):
            raise UnsupportedError(
                f"{named(name)} is given a nested tensor, whose recompute would make another. Give padded batches."
            )
        attributes = [*vars(module).values()]
        log, index = self.log, len(self.calls)
        if objects:
            self.objects_of[index] = objects
        number = self.counts.get(name, 0)
        self.counts[name] = number + 1
        parameters = [*module.parameters()]
        outer = log.call
        self.calls.append(
            TracedCall(
                name=name,
                kind=type(module).__name__,
                number=number,
                parent=outer if outer >= 0 else None,
                grad=torch.is_grad_enabled(),
                input_elements=elements_in(tensors),
                conditions=None if outer >= 0 else conditions_of(module),
                signature=_signature(module, parameters, tensors),
            )
        )
        inputs = [seen for tensor in tensors for seen in log.seen(tensor)]
        own = (one for one in parameters if id(one) in self.parameters)  # `functional_call` has others
        self.versions.append([(one, one._version) for one in own if not one.is_inference()])
        log.call = index
        log.record.events.append(CallEntered(index, inputs, log.mark()))
        try:
            output = function(*args, **kwargs)
        finally:
            log.call = outer
        ends = log.mark()
        now = {log.identity(one): one._version for one in tensors if not one.is_inference()}
        mutated = [place for place, one in enumerate(inputs) if now.get(one.identity, one.version) != one.version]
        outputs = [seen for tensor in tensors_in(output) for seen in log.seen(tensor)]
        returned: list[object] = []
        split(output, [], returned)
        self.calls[index].is_handed_work = holds_work((*objects, *returned, *attributes, *vars(module).values()))
        log.record.events.append(CallLeft(index, outputs, mutated, ends))
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
    try:
        seen = _traced(model, step, record, aside, keeps=False)
    except _TakesGradientError:
        return replace(_traced(model, step, record, aside, keeps=True), takes_gradients=True)
    if not has_compiled(model):
        return seen
    with aside(), nothing_kept():
        loss_of(step(model))
    with aside():
        # No mode is entered, under which compiled code would run eagerly.
        return _joined(model, _read(model, _run_traced(model, step, StepRecorder(FlopCounter(), None)), 0), seen)


def _traced(
    model: nn.Module,
    step: Step,
    record: Callable[[], AbstractContextManager[AllocationRecorder]] | None,
    aside: Callable[[], AbstractContextManager[Looking | None]],
    *,
    keeps: bool,
) -> Trace:
    flops, recording = FlopCounter(), nullcontext() if record is None else record()
    with aside() as looking, recording as recorder, StepRecorder(flops, recorder, looking) as log:
        calls = _run_traced(model, step, log, keeps=keeps)
    return _read(model, calls, flops.total, None if recorder is None else recorder.trace)


class _TakesGradientError(Exception):
    """The step takes a gradient itself, whose backward asks for what is saved."""


class _KeptSave(NamedTuple):
    """A saved tensor, and what the recorder knows it by."""

    tensor: Tensor
    packed: object


def _kept(packed: object) -> Tensor:
    return packed.tensor if isinstance(packed, _KeptSave) else cast("Tensor", packed)  # of a trace


def _asked(packed: object) -> Tensor:
    if isinstance(packed, Tensor) or (is_plain_backward() and not torch.is_grad_enabled()):
        return never(packed)
    raise _TakesGradientError


def _run_traced(model: nn.Module, step: Step, log: StepRecorder, *, keeps: bool = False) -> _CallFollower:
    calls = _CallFollower(model, log)
    try:
        with intercepted(model, calls.run), transforms_beside_hooks(calls.transforms):
            calls.hook = left_to_transform(except_traced(calls.keep if keeps else calls.save))
            push_saved_tensor_hooks(calls.hook, _kept if keeps else _asked)
            thread.on_carried, thread.around_loop = calls.carried, calls.loop
            try:
                result = step(model)
            finally:
                thread.on_carried = thread.around_loop = None
                pop_saved_tensor_hooks()
                calls.hook = None  # it references the calls
        loss = loss_of(result)
        del result  # logits and caches other than the loss are freed before backward, as in each run
        calls.ended()
    finally:
        log.close()
    del loss
    return calls


def _read(model: nn.Module, own: _CallFollower, flops: int, allocations: AllocationTrace | None = None) -> Trace:
    """Return the calls as the events show them, with storages numbered in the order in which calls have seen them.

    Plans of several shapes compare these numbers, and with another shape other operators may run.
    """
    record = own.log.record
    numbers = {-1: -1, **{storage: number for number, storage in enumerate(record.shown)}}
    reader = CallReader(record, own.calls, numbers, {numbers[storage]: 0 for storage in own.fixed})
    reader.read()
    foreign = frozenset[int]()
    if allocations is not None:
        record, foreign = record.timed(allocations), record.foreign(allocations)
    uncounted = foreign - own.fixed
    return Trace(
        calls=own.calls,
        storage_bytes={numbers[one]: 0 if one in uncounted else size for one, size in record.shown.items()},
        fixed=frozenset(numbers[storage] for storage in own.fixed),
        born=reader.born,
        died=reader.died,
        lasting=reader.lasting,
        step_saved=reader.step_saved,
        end=reader.time + 1,
        flops=flops,
        operators=record.numbered(numbers, len(record.shown), foreign),
        allocations=allocations,
        sharded=frozenset(name for name, module in model.named_modules() if is_sharded(module)),
        replicated=frozenset(name for name, module in model.named_modules() if is_data_parallel(module)),
        loops=own.loops,
        untraced=frozenset(own.untraced),
        parameters={numbers[storage]: name for storage, name in own.parameter_names.items()},
    )


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
    operators = eager.operators.numbered(numbers, len(own.storage_bytes))
    foreign = [ours for theirs, ours in numbers.items() if min(theirs, ours) >= 0 and not eager.storage_bytes[theirs]]
    storage_bytes = {**own.storage_bytes, **dict.fromkeys(foreign, 0)}
    return replace(
        own, flops=eager.flops, operators=operators, allocations=eager.allocations, storage_bytes=storage_bytes
    )


def _named(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a model.

    Raises:
        UnsupportedError: The bytes of one of them cannot be counted.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        try:
            if type(tensor) is not StoredParameter:
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
