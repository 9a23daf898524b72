"""What a measurement observes of a step, each in a run of its own: storages and flops, the allocator, a clock."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.autograd import current_graph_task, enter_backward, top_saved_tensor_hooks
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.lines import OperatorLines, noted
from torchremat.measuring.modules import OUTSIDE, has_compiled, module_stack
from torchremat.measuring.runs import StepObserver, Subject
from torchremat.measuring.threads import OwnThread
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.measuring.traces import AllocationRecorder
from torchremat.measuring.tracker import StorageTracker
from torchremat.regions.threads import thread


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
