"""What a measurement observes of a step, each in a run of its own: storages and flops, the allocator, a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import UntypedStorage

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.autograd import current_graph_task, enter_backward, top_saved_tensor_hooks
from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.lines import OperatorLines, noted
from torchremat.measuring.modules import OUTSIDE, OwnThread, has_compiled, module_stack
from torchremat.measuring.runs import StepObserver, Subject
from torchremat.measuring.storages import LIFTED, StorageMap, address_of, tensors_in
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark
from torchremat.regions.threads import thread
from torchremat.tensors.metadata import covers

# NOTE [ Which storages are counted ]
#
#   1. A storage that is first seen as an operator's result, and is not an argument's storage. A view or an in-place
#      result of a tensor from before the block belongs to that tensor, and is not counted.
#   2. Its bytes are read again whenever an operator returns it: `resize_` and `out=` change them.
#   3. It stops counting when its weak reference dies, wherever that happens: in Python, in a hook, or in an autograd
#      node.


class StorageTracker(EagerMode):
    """Counts the storages on `device` that are made while it is entered, including storages that outlive the block.

    A dispatch mode sees every operator's results; a weak reference on each new storage tells when it dies. It cannot
    see temporaries inside kernels, nor allocations of compiled code, which runs eagerly here. `measuring.allocator`
    sees both, but cannot run under a profiler; this can. See NOTE [ What records a step ].

    Missing on purpose: sparse tensors, and tensors made by anything but an operator (`torch.from_numpy`).

    Args:
        device: The device.
        lines: Is told of each operator, if given.

    Attributes:
        live_bytes: Bytes of the counted storages that are alive now.
    """

    def __init__(self, device: torch.device, lines: OperatorLines | None = None) -> None:
        super().__init__()
        self.device = device
        self._lines = lines
        self.live_bytes = 0
        self._tracked = StorageMap[tuple[int, int]](self._forget)  # addresses and sizes
        self._events: list[tuple[int, int, int]] = []
        self._marks: list[TraceMark] = []

    @property
    def trace(self) -> AllocationTrace:
        """The events so far: a storage made, resized or freed."""
        return AllocationTrace.of(self.device, self._events, self._marks)

    def mark(self, label: str) -> int:
        """See `AllocationRecorder`; for one thread."""
        number = len(self._marks)
        mark = TraceMark(id=number, label=label, time_ns=time.time_ns(), position=len(self._events))
        self._marks.append(mark)
        return number

    def refresh(self) -> None:
        """Read all sizes again: `UntypedStorage.resize_` is not an operator and goes unseen until the next use."""
        for storage in self._tracked.storages():
            self._see(storage)

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        if self._lines is not None:
            self._lines.see(func, len(self._events))
        result = func(*args, **(kwargs or {}))
        for storage in self._storages(result):
            # See NOTE [ Which storages are counted ], 1 and 2; `_forget` is 3.
            given = (address_of(one) for one in self._storages((args, kwargs)))
            if storage in self._tracked or func in LIFTED or address_of(storage) not in given:
                self._see(storage)
        return result

    def _see(self, storage: UntypedStorage) -> None:
        address, size = address_of(storage), storage.nbytes()
        _, known = self._tracked.get(storage) or (address, None)
        if known != size:
            self._tracked[storage] = address, size
            self._change(address, size - (known or 0))

    def _forget(self, known: tuple[int, int]) -> None:
        self._change(known[0], -known[1])

    def _change(self, address: int, delta_bytes: int) -> None:
        self._events.append((time.time_ns(), address, delta_bytes))
        self.live_bytes += delta_bytes

    def _storages(self, value: object) -> Iterator[UntypedStorage]:
        for tensor in tensors_in(value):
            if covers(self.device, tensor.device):
                yield tensor.untyped_storage()


@dataclass(frozen=True, kw_only=True, eq=False)
class Counted:
    """Results of the counted run, whose events are those of storages."""

    timeline: MemoryTimeline
    flops: int
    recomputed_flops: int


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Results of the plain run. Bytes come from the device's counters; None where it has none."""

    seconds: float
    peak_bytes: int | None = None
    kept_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None


# NOTE [ What a recompute looks like ]
#
# Backward without `create_graph` runs its own operators with grad mode off. A recompute builds a graph, so it runs with
# grad mode on, torch's reentrant and non-reentrant checkpoints and our regions alike. That misses one case: the forward
# of a custom autograd Function runs with grad mode off, in a recompute too. All non-reentrant recomputes then have
# saved-tensor hooks on top that backward itself did not begin with.
#
# The backward of a graph that a recompute has built (reentrant) runs with grad mode off again, and counts as backward.
# A backward in the forward, for a gradient that the step takes itself, may build a graph as well: there only our own
# regions are known.


class _Phase:
    """Whether a recompute is running. See NOTE [ What a recompute looks like ]."""

    def __init__(self) -> None:
        self._in_backward = False
        self._hooks: object = None

    def begin_backward(self) -> None:
        self._in_backward = True
        self._hooks = top_saved_tensor_hooks(False)

    def is_recomputing(self) -> bool:
        if not self._in_backward:
            return thread.now.recomputing > 0
        return torch.is_grad_enabled() or top_saved_tensor_hooks(False) != self._hooks


class _GradientMarks:
    """The marks that were made in gradients which a step has taken itself, before its backward.

    Attributes:
        marks: Their ids.
        is_over: Whether the backward has begun.
    """

    def __init__(self) -> None:
        self.marks: set[int] = set()
        self.is_over = False
        self._entered: set[int] = set()

    def mark(self, mark: Callable[[str], int], module: str) -> None:
        """Mark that a module runs."""
        found = mark(module)
        if not self.is_over and current_graph_task() >= 0:
            self.marks.add(found)
            enter_backward(self._entered, lambda _: mark(OUTSIDE))


def observe_storages(subject: Subject, device: torch.device, *, lines: bool = False) -> StepObserver[Counted]:
    """Observe storages and flops; with `lines` operators are noted as well."""
    own = OwnThread()
    phase = _Phase()
    noting = OperatorLines(phase.is_recomputing) if lines else None
    tracker, counter = StorageTracker(device, noting), FlopCounter(phase.is_recomputing)
    before = subject.before(device)
    with module_stack(subject.models, partial(_changed, own, tracker.mark)), tracker, counter:
        start = tracker.mark("start")
        loss = yield
        tracker.refresh()
        backward = tracker.mark("end of forward")
        phase.begin_backward()
        yield
        tracker.refresh()
        ends = tracker.mark("end")
        trace = tracker.trace  # without the frees of the gradients, which are not the step's events
    del loss
    own.check(device)
    is_eager = noting is not None and not (noting.is_compiled or any(map(has_compiled, subject.models)))
    timeline = MemoryTimeline(trace=trace, start=start, backward=backward, ends=ends, before=before)
    return Counted(
        timeline=noted(timeline, noting.ran) if noting is not None and is_eager else timeline,
        flops=counter.total,
        recomputed_flops=counter.recomputed,
    )


def observe_allocations(
    subject: Subject,
    device: torch.device,
    *,
    record: Callable[[], AbstractContextManager[AllocationRecorder]] | None = None,
    around: AbstractContextManager[object] | None = None,
) -> StepObserver[MemoryTimeline]:
    """Observe the allocator's events.

    Args:
        subject: The step.
        device: The device.
        record: Records its events; by default as they are.
        around: A context for the step.
    """
    own, gradients = OwnThread(), _GradientMarks()
    before = subject.before(device)
    with (
        record() if record is not None else record_allocations(device) as recorder,
        around or nullcontext(),
        module_stack(subject.models, partial(_changed, own, partial(gradients.mark, recorder.mark))),
    ):
        start = recorder.mark("start")
        loss = yield
        backward = recorder.mark("end of forward")
        gradients.is_over = True
        yield
        ends = recorder.mark("end")
    del loss  # its free is not the step's event
    own.check(device)
    return MemoryTimeline(
        trace=recorder.trace,
        start=start,
        backward=backward,
        ends=ends,
        before=before,
        gradients=frozenset(gradients.marks),
    )


def _changed(own: OwnThread, mark: Callable[[str], object], module: str) -> None:
    own.note(module)
    mark(module)


def observe_clock(device: torch.device) -> StepObserver[Plain]:
    """Observe a clock only; a device's counters run anyway, and are read."""
    accelerator = accelerator_of(device)
    start_s = accelerator.seconds(device)
    if not accelerator.counts:
        yield
        yield
        return Plain(seconds=accelerator.seconds(device) - start_s)
    accelerator.reset_peak(device)
    # Gradients set aside for this run are live as well, so only the difference to the start is the step's.
    start_bytes = accelerator.counters(device).allocated_bytes
    yield
    kept_bytes = accelerator.counters(device).allocated_bytes - start_bytes
    yield
    seconds = accelerator.seconds(device) - start_s
    counted = accelerator.counters(device)
    return Plain(
        seconds=seconds,
        peak_bytes=counted.peak_bytes - start_bytes,
        kept_bytes=kept_bytes,
        reserved_bytes=counted.peak_reserved_bytes,
        context_bytes=accelerator.context_bytes(device),
    )
