"""What a plan is made from: a traced forward, and one watched step in which every unit is a region.

Such a step needs little memory, less than any plan that keeps something, and still shows everything: the allocator's
events of a unit's forward say what it would need if its saved tensors stayed (leave out their frees), or if it
stopped at its last save (cut there). So one pass gives (full, truncated) x (seconds, bytes) of every unit.

    pass             shows
    1. traced        the order of calls, links, lifetimes, flops
    2. watched       bytes and seconds of each unit, and what else is live at each moment
    3. forward       the seconds of a forward that nothing watches, to which the others are scaled
    4. watched       as 2, with the calls inside of units in the place of those units that make several
    optimizer        the bytes of one `optimizer.step()`, if there is an optimizer
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from torchremat.measuring.allocator import AllocationTrace, Recorder
from torchremat.measuring.before import BytesBefore
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.measuring.heap import free_unused, heap_set_aside
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.step import run_backward
from torchremat.planning.elsewhere.machines import Here, Machine
from torchremat.planning.layout import calls_of, check_bare, installed
from torchremat.planning.profiles.optimizers import measure_optimizer
from torchremat.planning.profiles.reading import Profile, read_profile
from torchremat.planning.profiles.tracing import Step, trace
from torchremat.planning.profiles.units import Units, find_units, splittable
from torchremat.planning.profiles.watching import Watcher, every_unit, halves
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import Tree

# A fine step with more units than this is not watched: nobody could plan with so many.
_MOST_UNITS = 2000


@dataclass(frozen=True, kw_only=True)
class Grains:
    """The coarse profile of a step, and the fine one if units can be taken apart. See `mixing`."""

    coarse: Profile
    fine: Profile | None


def profile(
    model: nn.Module,
    step: Step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
) -> Grains:
    """Profile a training step; afterwards model, gradients, buffers, generators, hooks and optimizer are as before.

    Args:
        model: The model.
        step: Called as `step(model)`; runs the forward on a sample batch and returns the loss, see `measure`.
        optimizer: If given, the bytes of its state and of its step are measured.
        device: Whose bytes count; that of the first parameter if not given.

    Raises:
        StepError: The step returns no loss, calls no module of the model, or other modules each time.
        PlanError: Modules of the model are wrapped already.
        UnsupportedError: A profiler is active, the device has no allocation events, or the model checkpoints itself.
    """
    subject = subject_of(step, model, optimizer, needs_model=True)
    return profile_subject(model, subject, Here(subject.device(device)))


def profile_subject(model: nn.Module, subject: Subject, machine: Machine, *, fine: bool = True) -> Grains:
    """Profile the step of a subject, which is one of `model`, on a machine; see `profile`.

    Args:
        model: The model.
        subject: The step.
        machine: Where it runs.
        fine: Whether the calls inside of units are watched as well; it takes as long as the rest.
    """
    check_bare(model)
    with machine.entered(), heap_set_aside():
        return _grains(model, subject, machine, fine=fine)


def _grains(model: nn.Module, subject: Subject, machine: Machine, *, fine: bool) -> Grains:
    units = find_units(trace(model, subject.step, machine.record))
    split = splittable(units)
    finest = find_units(units.trace, split) if split else units
    coarse = _measured_somehow(model, subject, units, finest, machine)
    seconds = machine.forward_seconds(subject)
    own = None if subject.optimizer is None else measure_optimizer(subject, subject.optimizer, machine)
    coarse = replace(_scaled(coarse, seconds), optimizer=own)
    if not fine or coarse.units is finest or len(finest.units) > _MOST_UNITS or not _fits(finest, machine):
        return Grains(coarse=coarse, fine=None)
    try:
        parts = _measured(model, subject, finest, every_unit(finest), machine)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return Grains(coarse=coarse, fine=None)
    return Grains(coarse=coarse, fine=_scaled(parts, seconds))


def _measured_somehow(model: nn.Module, subject: Subject, units: Units, finest: Units, machine: Machine) -> Profile:
    """Run the watched step, in the first of these ways that fits. Each needs less memory, and more time.

    units             each a region
    units in pieces   a region around several of them
    calls in halves   of those inside of units, each a region; around both halves of a half one more, and so on
    """
    ways = [(units, every_unit(units))]
    if len(units.units) > 3:
        ways.append((units, every_unit(units, max(2, math.isqrt(len(units.units))))))
        if not _fits(units, machine):
            del ways[0]
    if len(finest.units) <= _MOST_UNITS:
        ways.append((finest, halves(finest)))
    *others, last = ways
    for own, tree in others:
        try:
            return _measured(model, subject, own, tree, machine)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            let_go(error)
        free_unused()
    return _measured(model, subject, *last, machine)


def _fits(units: Units, machine: Machine) -> bool:
    """Whether a step in which each unit is a region holds little enough for what is free now."""
    held = {storage for unit in units.units for storage in unit.inputs}
    free = machine.free_bytes()
    return free is None or 2 * sum(units.trace.storage_bytes[storage] for storage in held) < free


def _measured(model: nn.Module, subject: Subject, units: Units, tree: Tree, machine: Machine) -> Profile:
    found = watch(model, subject, units, tree, machine).profile()
    return replace(found, overheads=machine.overheads(), generator_bytes=machine.generator_bytes)


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedStep:
    """A step in which every unit was a region, as it was taken down.

    Attributes:
        units: The units.
        tree: The tree that it ran under.
        watcher: What was noted.
        trace: The allocator's events.
        before: What lay in memory before.
        marks: The ids of those at the step's beginning, at the end of its forward, and at its end.
    """

    units: Units
    tree: Tree
    watcher: Watcher
    trace: AllocationTrace
    before: BytesBefore
    marks: tuple[int, int, int]

    def profile(self, trace: AllocationTrace | None = None) -> Profile:
        """Return the profile; of other events with the same marks, if they are given."""
        events = self.trace if trace is None else trace
        return read_profile(self.units, self.tree, self.watcher, events, self.before, marks=self.marks)


def watch(
    model: nn.Module,
    subject: Subject,
    units: Units,
    tree: Tree,
    machine: Machine,
    *,
    noting: Callable[[Recorder], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> WatchedStep:
    """Run a step in which every unit is a region, and take it down.

    Args:
        model: The model.
        subject: The step.
        units: The units.
        tree: A tree in which each is a region.
        machine: Where it runs.
        noting: Returns a context for the step, in which more is noted.
    """
    fixed = [*model.parameters(), *model.buffers()]
    with subject.untouched():
        before = subject.before(machine.device)
        with machine.record() as recorder:
            watcher = Watcher(units, recorder.mark, recorder.pointer_of, fixed)
            with installed(model, calls_of(units), tree, Settings(observer=watcher)), noting(recorder):
                begins = recorder.mark("step")
                loss = subject.forward()
                forward = recorder.mark("forward")
                run_backward(loss)
                ends = recorder.mark("end")
            del loss
    marks = begins, forward, ends
    return WatchedStep(units=units, tree=tree, watcher=watcher, trace=recorder.trace, before=before, marks=marks)


def _scaled(profile: Profile, forward_seconds: float | None) -> Profile:
    """Return the profile with its seconds scaled to those of a forward that nothing watches.

    If there is none, they are those of the kernels alone, and what a region takes by itself is missing.
    """
    if forward_seconds is None:
        region_s = profile.overheads.region_s
        costs = (replace(cost, seconds_truncated=cost.seconds_truncated + region_s) for cost in profile.costs)
        return replace(profile, costs=tuple(costs))
    factor = forward_seconds / profile.forward_seconds
    costs = tuple(cost.slower(factor) for cost in profile.costs)
    return replace(profile, costs=costs, seconds=profile.seconds * factor, forward_seconds=forward_seconds)
