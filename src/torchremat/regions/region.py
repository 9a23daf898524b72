"""A region: a piece of forward whose saved tensors are dropped and recomputed.

The rules are design.md's 1-12; `# See Rule n` marks the lines that obey them. The mechanism in four sentences. While a call
runs in a region, every tensor that autograd saves is replaced by a `Slot`, a number that knows its region. The region keeps
what it needs to run its calls again, and only the slots, which autograd owns, keep the region. When a backward asks the
first slot for its tensor, all calls run again and the n-th tensor saved then is the n-th that was saved before. The
recomputed graph itself is thrown away: gradients flow through the first one.

    forward    call 0 ─────── call 1 ──────       each `s` is a Slot; region ◄── every slot
               s0  s1  s2     s3  s4              region ──► inputs, functions, generator states
    backward                            s4 asked: run call 0, call 1 up to the save of s4, all five are here

Missing on purpose: any list of live regions. Autograd owns the slots, so that what autograd would free is freed (rule 12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from torchremat import ambient
from torchremat._compat import (
    at_end_of_backward,
    current_graph_task,
    current_node,
    is_python_node,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from torchremat.errors import CheckpointError, MutationError, bug
from torchremat.regions.guards import Buffers, Objects
from torchremat.regions.session import Session, active_session
from torchremat.saved.structure import join, place_of, split
from torchremat.saved.tensor import SavedTensor

Check = Literal["metadata", "none"]


class Observer(Protocol):
    """Is told what happens to a region; made for the profiler."""

    def began(self, region: Region, call: int, tensors: list[Tensor]) -> None:
        """A call begins to run in the region, for the first time, with these inputs."""
        ...

    def saved(self, region: Region, call: int, tensor: Tensor) -> None:
        """Autograd saves a tensor in the first run of a call."""
        ...

    def ended(self, region: Region, call: int, output: object, state_bytes: int) -> None:
        """A call has run; the region keeps so many bytes of generator states and buffers for it."""
        ...

    def recomputing(self, region: Region) -> None:
        """A recompute begins."""
        ...

    def recomputed(self, region: Region) -> None:
        """A recompute has ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a region behaves."""

    check: Check = "metadata"
    preserve_rng: bool = True
    early_stop: bool = True
    observer: Observer | None = None


class Slot:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "index", "region")

    def __init__(self, region: Region, index: int) -> None:
        self.region = region
        self.index = index


class _Stop(BaseException):
    """Ends a recompute at its last needed tensor. No `Exception`: user code that swallows those must not swallow it."""

    def __init__(self, recompute: _Recompute) -> None:
        self.recompute = recompute


class _Thread(threading.local):
    def __init__(self) -> None:
        self.recomputing = 0
        self.scopes: list[object] = []  # kept by `runs`: the scopes that are open, innermost last


thread = _Thread()


def is_recomputing() -> bool:
    """Return whether this thread is running the recompute of a region."""
    return thread.recomputing > 0


# Where an argument of a call comes from: an input that the region holds, by number, or the output of an earlier call.
_Source = int | tuple[int, int]


class _Call:
    """What one call needs to run again."""

    __slots__ = ("autocast", "body", "buffers", "device", "generators", "objects", "slots", "sources", "template")

    def __init__(self, body: Body, template: object, sources: list[_Source]) -> None:
        self.body = body
        self.template = template
        self.sources = sources
        self.slots = -1  # how many slots the region has after the call; negative while it runs for the first time
        self.autocast = ()
        self.device: torch.device | None = None
        self.generators: tuple[tuple[torch.device, Tensor], ...] = ()
        self.buffers: Buffers | None = None
        self.objects: Objects | None = None

    @property
    def is_running(self) -> bool:
        return self.slots < 0

    @property
    def state_bytes(self) -> int:
        return sum(state.nbytes for _, state in self.generators) + (self.buffers.nbytes if self.buffers else 0)


# A call's function with its positional and keyword arguments, called as body(args, kwargs). A body is run in a recompute
# as in the forward, so it must look up nothing that may have changed since.
Body = Callable[[tuple[object, ...], dict[str, object]], object]


class Region:
    """Calls that are recomputed together, in the order in which they ran."""

    __slots__ = (
        "__weakref__",
        "_calls",
        "_held",
        "_known",
        "_last_use",
        "_lock",
        "_metadata",
        "_pinned",
        "_runs_backward",
        "_slots",
        "_unpacked",
        "_values",
        "label",
        "settings",
    )

    def __init__(self, settings: Settings, label: object = None) -> None:
        self.settings = settings
        self.label = label
        self._calls: list[_Call] = []
        self._held: list[SavedTensor] = []
        self._slots: list[ReferenceType[Slot]] = []
        self._metadata: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        # Tensors that have been seen, by id, with the version they had: outputs of calls and inputs that are held already.
        self._known: dict[int, tuple[ReferenceType[Tensor], int, _Source]] = {}
        self._last_use: dict[_Source, int] = {}
        self._values: dict[object, dict[int, tuple[Tensor, int]]] = {}
        self._unpacked: dict[int, set[int]] = {}
        self._pinned: tuple[object, dict[int, tuple[Tensor, int]]] | None = None
        self._runs_backward = False
        self._lock = threading.RLock()
        session = active_session()
        if session is not None:
            session.created(self)

    @property
    def calls(self) -> int:
        """How many calls have run in the region."""
        return len(self._calls)

    # ------------------------------------------------------------------------------------------------------- forward

    def call(
        self, body: Body, args: tuple[object, ...], kwargs: dict[str, object], modules: list[nn.Module], *, last: bool = True
    ) -> object:
        """Run `body` with its arguments as the next call of the region and return its result.

        Args:
            body: What runs, now and in every recompute.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            modules: The modules that run in it, for their buffers and devices.
            last: Whether no further call will join, so that outputs need not be remembered.
        """
        settings = self.settings
        tensors: list[Tensor] = []
        objects: list[object] = []
        template = split((args, kwargs), tensors, objects)
        number = len(self._calls)
        call = _Call(body, template, [self._source(tensor, number) for tensor in tensors])
        devices = _devices(tensors, modules)
        call.autocast = ambient.autocast_states({device.type for device in devices})
        call.device = ambient.default_device()
        # All of the state is there from the start: a backward inside the call may ask for a recompute (rule 6).
        call.generators = ambient.generator_states(devices) if settings.preserve_rng else ()
        call.buffers = Buffers(modules)
        call.objects = Objects(objects) if objects else None
        first_slot = len(self._slots)
        self._calls.append(call)
        observer = settings.observer
        if observer is not None:
            observer.began(self, number, tensors)
            pack = partial(self._pack_observed, observer, number)
        else:
            pack = self._pack
        del tensors, objects
        push_saved_tensor_hooks(pack, unpack)  # See Rule 1
        try:
            output = body(args, kwargs)
        except BaseException:
            # What was saved is dropped with the half-made graph; the next call, if any, takes this one's place.
            del self._calls[number:], self._slots[first_slot:], self._metadata[first_slot:]
            raise
        finally:
            pop_saved_tensor_hooks()
        call.generators = ambient.drawn(call.generators)
        if not call.buffers.settle():
            call.buffers = None
        if call.objects is not None and not call.objects.settle():
            call.objects = None
        call.slots = len(self._slots)
        if observer is not None:
            observer.ended(self, number, output, call.state_bytes)
        if not last:
            self._remember(output, number)
        else:
            self._known.clear()
        return output

    def _source(self, tensor: Tensor, number: int) -> _Source:
        known = self._known.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        # By identity *and* version: after `h.add_(1)` between two calls `h` is the same object and another value.
        if known is not None and known[0]() is tensor and known[1] == version:
            source = known[2]
        else:
            source = len(self._held)
            self._held.append(SavedTensor(tensor))  # See Rule 2
            self._known[id(tensor)] = (ref(tensor), version, source)
        self._last_use[source] = number
        return source

    def _remember(self, output: object, number: int) -> None:
        tensors: list[Tensor] = []
        split(output, tensors, [])
        for place, tensor in enumerate(tensors):
            if not tensor.is_inference():
                self._known[id(tensor)] = (ref(tensor), tensor._version, (number, place))

    def _pack(self, tensor: Tensor) -> object:
        slot = Slot(self, len(self._slots))
        self._slots.append(ref(slot))
        self._metadata.append((tensor.shape, tensor.dtype, tensor.device))
        return slot

    def _pack_observed(self, observer: Observer, number: int, tensor: Tensor) -> object:
        observer.saved(self, number, tensor)
        return self._pack(tensor)

    # ------------------------------------------------------------------------------------------------------ backward

    def unpack(self, slot: Slot) -> Tensor:
        """Return the tensor of a slot, recomputing the region if it is not there."""
        index = slot.index
        if index >= len(self._slots) or self._slots[index]() is not slot:
            raise CheckpointError(
                "a tensor was asked for that a region saved in a forward which raised; run that forward again before its backward."
            )
        session = active_session()
        task = current_graph_task()
        if session is None and task < 0:
            # Outside any backward nothing is kept. See Rule 7
            values: dict[int, tuple[Tensor, int]] = {}
            self._recompute(values, index)
            return self._taken(values, index)
        with self._lock:
            if session is not None:
                return self._unpack_in_session(session, task, index)
            return self._unpack_in_task(task, index)

    def _unpack_in_task(self, task: int, index: int) -> Tensor:
        node = current_node()
        if self._pinned is not None:
            pinned_for, pinned = self._pinned
            if pinned_for == (task, id(node)) and index in pinned:
                return self._taken(pinned, index)
            if pinned_for != (task, id(node)):
                self._pinned = None
        values = self._values.get(task)
        if values is None:
            values = self._values[task] = {}
            at_end_of_backward(partial(_forget, ref(self), task))
            self._recompute(values, None)
        elif index not in values:
            self._recompute(values, index)
        # The node holds the tensor while it runs; nobody else needs it. See Rule 4
        value = values.pop(index)
        if isinstance(node, is_python_node):
            # A Python node may read `ctx.saved_tensors` again, so what it has unpacked stays until the next node asks.
            if self._pinned is None:
                self._pinned = ((task, id(node)), {})
            self._pinned[1][index] = value
        return self._taken({index: value}, index)

    def _unpack_in_session(self, session: Session, task: int, index: int) -> Tensor:
        values = self._values.get(session)
        if values is None:
            session.owns(self)
            values = self._values[session] = {}
            self._recompute(values, None)
        elif index not in values:
            self._recompute(values, index)
        tensor = self._taken(values, index)
        if session.passes is not None and task >= 0:
            tasks = self._unpacked.setdefault(index, set())
            tasks.add(task)
            if len(tasks) >= session.passes:  # See Rule 4
                del values[index], self._unpacked[index]
        return tensor

    def _taken(self, values: dict[int, tuple[Tensor, int]], index: int) -> Tensor:
        tensor, version = values[index]
        if tensor._version != version:
            raise MutationError(
                f"{self.name(self._call_of(index))}: a tensor that autograd saved (number {index}, shape {tuple(tensor.shape)}) was written "
                f"in place afterwards in the same region: it was at version {version} and is at {tensor._version} now. "
                "Plain autograd refuses this as well; make the operation out of place."
            )
        return tensor

    def recompute_for(self, session: Session) -> bool:
        """Recompute ahead of any backward on behalf of a session; return whether anything had to be done. See Rule 9."""
        with self._lock:
            if session in self._values or not any(slot() is not None for slot in self._slots):
                return False
            session.owns(self)
            values = self._values[session] = {}
            self._recompute(values, None)
            return True

    def forget(self, key: object) -> None:
        """Drop the recomputed tensors that belong to a session or to a backward that has ended."""
        self._values.pop(key, None)
        if isinstance(key, Session):
            self._unpacked.clear()
        elif self._pinned is not None and cast("tuple[int, int]", self._pinned[0])[0] == key:
            self._pinned = None

    # ----------------------------------------------------------------------------------------------------- recompute

    def _recompute(self, values: dict[int, tuple[Tensor, int]], only: int | None) -> None:
        if self._calls and self._calls[-1].is_running:
            # A backward runs inside the region's own forward (rule 6), and will do so again in the recompute, whose
            # graph then has to be able to give back what it saves.
            self._runs_backward = True
        if only is not None:
            wanted = {only}
        else:
            wanted = {i for i, slot in enumerate(self._slots) if slot() is not None}
        recompute = _Recompute(self, values, wanted)
        observer = self.settings.observer
        if observer is not None:
            observer.recomputing(self)
        recompute.run()
        if observer is not None:
            observer.recomputed(self)

    def _call_of(self, index: int) -> int:
        return next((i for i, call in enumerate(self._calls) if index < call.slots), len(self._calls) - 1)

    def name(self, call: int) -> str:
        """Return the words for a call of this region in a message."""
        return f"region {self.label}" if self.label is not None else f"region of {_name_of(self._calls[call].body)}"


class _Recompute:
    """One run of a region's calls for the tensors that they save."""

    __slots__ = ("count", "last", "region", "values", "wanted")

    def __init__(self, region: Region, values: dict[int, tuple[Tensor, int]], wanted: set[int]) -> None:
        self.region = region
        self.values = values
        self.wanted = wanted
        self.last = max(wanted, default=-1)
        self.count = 0

    def run(self) -> None:
        region = self.region
        tensors: dict[_Source, Tensor] = {}
        with torch.enable_grad(), _as_if_no_region_were_active():
            for number, call in enumerate(list(region._calls)):
                if not self._run_call(call, number, tensors):
                    break
                for source in [source for source in tensors if region._last_use.get(source) == number]:
                    del tensors[source]
                self._check_count(number, call)
        missing = self.wanted - self.values.keys()
        if missing:
            raise CheckpointError(self._too_few(len(region._calls) - 1))

    def _run_call(self, call: _Call, number: int, tensors: dict[_Source, Tensor]) -> bool:
        """Run one call again; return whether it ran to its end."""
        region = self.region
        for source in call.sources:
            if source not in tensors:
                if isinstance(source, tuple):
                    raise bug(f"call {number} links to output {source}, which the recompute does not have")
                held = region._held[source]
                changed = held.is_changed()
                if changed is not None:
                    raise MutationError(self._changed_input(call, number, source, held.version, changed))
                tensors[source] = held.unpack()
        if call.objects is not None and (written := call.objects.written()):
            raise MutationError(
                f"{region.name(number)}: the forward wrote in place to the tensor `{written}` inside an argument, so it cannot be recomputed. "
                "Keep this call out of the region, or pass the tensor as an argument of its own and write out of place."
            )
        arguments = join(call.template, [tensors[source] for source in call.sources])
        args, kwargs = cast("tuple[tuple[object, ...], dict[str, object]]", arguments)
        del arguments
        surroundings = ambient.Ambient(call.autocast, call.device, call.generators)
        push_saved_tensor_hooks(self.pack, self.unpack)
        try:
            with surroundings.around(), _guarded(call.buffers), _guarded(call.objects):
                output = call.body(args, kwargs)
        except _Stop as stop:
            if stop.recompute is not self:
                raise
            return False
        finally:
            pop_saved_tensor_hooks()
        del args, kwargs
        outputs: list[Tensor] = []
        split(output, outputs, [])
        for place, tensor in enumerate(outputs):
            # A link stays attached: a later call may write to it in place, which a leaf that requires grad refuses.
            if region._last_use.get((number, place), -1) > number:
                tensors[number, place] = tensor
        return True

    def pack(self, tensor: Tensor) -> object:
        region = self.region
        index = self.count
        self.count += 1
        if index >= len(region._slots):
            return self._extra(index)
        if region.settings.check == "metadata":
            before = region._metadata[index]
            now = (tensor.shape, tensor.dtype, tensor.device)
            if before != now:
                raise CheckpointError(self._differs(index, before, now))
        if index in self.wanted:
            value = tensor.detach()
            self.values[index] = (value, 0 if value.is_inference() else value._version)
            if index == self.last and (region.settings.early_stop or region._calls[-1].is_running):
                raise _Stop(self)  # See Rule 5
        return tensor.detach() if region._runs_backward else index  # See Rule 6

    def unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        raise bug(f"the graph of a recompute was asked for its saved tensor {packed}")

    def _extra(self, index: int) -> object:
        raise CheckpointError(
            f"{self.region.name(self.region.calls - 1)}: the recompute saved more tensors than the forward, which saved {len(self.region._slots)}. "
            "The function does not do the same twice: look for state that the forward changes (a cache, a counter, "
            "train/eval, a random draw) or a branch on data."
        )

    def _check_count(self, number: int, call: _Call) -> None:
        if self.count != call.slots:
            raise CheckpointError(self._too_few(number))

    def _too_few(self, number: int) -> str:
        region = self.region
        expected = region._calls[number].slots if region._calls else len(region._slots)
        return (
            f"{region.name(number)}: the recompute saved {self.count} tensors, the forward had saved {expected}. The function "
            "does not do the same twice: look for state that the forward changes (a cache, a counter, train/eval, a "
            "random draw) or a branch on data."
        )

    def _differs(self, index: int, before: object, now: object) -> str:
        words = [
            f"shape {tuple(shape)}, {dtype}, {device}"
            for shape, dtype, device in cast("list[tuple[torch.Size, torch.dtype, torch.device]]", [before, now])
        ]
        return (
            f"{self.region.name(self.region._call_of(index))}: saved tensor {index} of {len(self.region._slots)} differs. Forward: {words[0]}. "
            f"Recompute: {words[1]}. The function does not do the same twice: look for state that the forward changes (a "
            "cache, a counter, autocast, train/eval) or a branch on data."
        )

    def _changed_input(self, call: _Call, number: int, source: int, before: int | None, now: int) -> str:
        place = place_of(call.template, call.sources.index(source)) or ""
        where = f"args{place[3:]}" if place.startswith("[0]") else f"kwargs{place[3:]}"
        return (
            f"{self.region.name(number)}: its input {where} was changed in place between forward and recompute: version {before} then, "
            f"{now} now. Recomputing would give wrong gradients. Make the change out of place, pass a clone, or "
            "run backward before it."
        )


@contextmanager
def _as_if_no_region_were_active() -> Generator[None]:
    """See Rule 3. Hooks that are active are covered by those of the recompute; what is left are the open scopes."""
    thread.recomputing += 1
    own, thread.scopes = thread.scopes, []
    try:
        yield
    finally:
        thread.scopes = own
        thread.recomputing -= 1


@contextmanager
def _nothing() -> Generator[None]:
    yield


def _guarded(guard: Buffers | Objects | None):
    return guard.around() if guard is not None else _nothing()


def unpack(slot: object) -> Tensor:
    """Return the tensor of a slot: the hook that autograd calls."""
    return cast("Slot", slot).region.unpack(cast("Slot", slot))


def _forget(region: ReferenceType[Region], task: int) -> None:
    alive = region()
    if alive is not None:
        alive.forget(task)


def _devices(tensors: list[Tensor], modules: list[nn.Module]) -> list[torch.device]:
    """Return the devices, beside the CPU, that a call can draw random numbers on."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    devices = {tensor.device for tensor in tensors}
    for module in modules:
        devices.update(parameter.device for parameter in module.parameters())
    devices.add(torch.device("cuda", torch.cuda.current_device()))
    return [device for device in devices if device.type not in ("cpu", "meta")]


def _name_of(body: object) -> str:
    function = body.func if isinstance(body, partial) else body  # pyright: ignore[reportUnknownMemberType]
    if isinstance(body, partial) and body.args:  # pyright: ignore[reportUnknownMemberType]
        function = body.args[0]  # pyright: ignore[reportUnknownMemberType]
    return getattr(function, "__qualname__", None) or type(function).__name__
