"""The step in which every unit is a region, run and recorded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import nn

from torchremat.measuring.runs import StepObserver, Subject
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace
from torchremat.optimizing.rehearsal import marking_rehearsals
from torchremat.planning.devices.machines import Machine
from torchremat.planning.exactness.comparison import without_hidden
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.profiles.reading import Profile, read_profile
from torchremat.planning.profiles.units import Units
from torchremat.planning.profiles.watching import Watcher
from torchremat.regions.settings import Settings
from torchremat.regions.slots import recomputing_all
from torchremat.schedules.chain import Tree


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedStep:
    """The record of a step in which every unit was a region.

    Attributes:
        tree: The tree that it ran under.
        watcher: The notes of the watcher.
        run: The allocator's events.
    """

    tree: Tree
    watcher: Watcher
    run: MemoryTimeline

    def profile(self, trace: AllocationTrace | None = None) -> Profile:
        """Return the profile, or that of other events with the same marks, if given."""
        run = self.run if trace is None else replace(self.run, trace=trace)
        return read_profile(self.tree, self.watcher, run)


def watch(
    model: nn.Module,
    subject: Subject,
    units: Units,
    tree: Tree,
    machine: Machine,
    *,
    compares: bool = False,
    noting: Callable[[AllocationRecorder], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> StepObserver[WatchedStep]:
    """Observe a step in which every unit is a region, and record it.

    Args:
        model: The model.
        subject: The step.
        units: The units.
        tree: A tree in which each is a region.
        machine: Where it runs.
        compares: Whether to compare each recompute with its forward. What is done only for that is not in the record.
        noting: Returns a context for the step, in which more is recorded.
    """
    fixed = [*model.parameters(), *model.buffers()]
    before = subject.before(machine.device)
    with machine.record() as recorder:
        watcher = Watcher(units, recorder.mark, recorder.pointer_of, fixed, compares=compares, seconds=recorder.seconds)
        settings = Settings(observer=watcher, early_stop=not compares)
        with (
            recomputing_all(),  # nodes ask for saved tensors of kept units in this order
            installed(model, calls_of(units), tree, settings),
            noting(recorder),
            marking_rehearsals(recorder.mark) as rehearsed,
        ):
            start = recorder.mark("step")
            loss = yield
            backward = recorder.mark("forward")
            yield
            ends = recorder.mark("end")
        del loss  # what the graph still keeps is freed in the record
        recorder.mark("dropped")
    trace = recorder.trace.without_seconds(list(zip(rehearsed[::2], rehearsed[1::2], strict=True)))
    if watcher.comparison is not None:
        trace = without_hidden(trace, watcher.comparison.hidden)
        watcher.is_over = True
        watcher.comparison.run_again()
    run = MemoryTimeline(trace=trace, start=start, backward=backward, ends=ends, before=before)
    return WatchedStep(tree=tree, watcher=watcher, run=run)
