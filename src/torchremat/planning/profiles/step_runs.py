"""Runs of a step that takes gradients itself: what it needs under a tree is found by running it.

    forward ──► loss                        the interpreter knows this step: one backward, in the order of the graph
    forward ──► gradient ──► loss           there are two graphs, or more, and each backward through one of them
                                            recomputes, so the step is its own interpreter

A run takes as long as a step, and the search over runs tries few trees: see `searches.trials`. Processes that train
the model run it together, each under the same tree, and what one of them needs most counts for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import bug
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.runs import StepObserver, Subject, unobserved
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.planning.devices.machines import Machine
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.peers.peers import Peers
from torchremat.planning.profiles.units import Units
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import Tree

# Of each tree that fits, the fastest of so many runs counts: noise only adds.
_CLOCKED = 3

_MOST_POINTS = 400

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """What a run of a step has needed, relative to its start.

    Attributes:
        peak_bytes: The peak.
        where: What ran then.
        kept_bytes: Live bytes at the end of the forward.
        forward_bytes: Highest live bytes before the backward.
        backward_bytes: Highest live bytes from there on.
        seconds: Seconds of its forward and of all of it, recorded.
        curve: Seconds since its start, live bytes, and what ran, at its highest points.
    """

    peak_bytes: int
    where: str
    kept_bytes: int
    forward_bytes: int
    backward_bytes: int
    seconds: tuple[float, float]
    curve: tuple[tuple[float, int, str], ...]


class StepRunner:
    """Runs a step under trees, in all processes that train the model.

    Args:
        model: The model.
        subject: The step.
        units: The units that trees are over.
        machine: Where it runs.
        peers: The processes that run it together.

    Attributes:
        waiting_bytes: Bytes of reduced gradients that may be live in a backward beside those that a run has shown.
    """

    def __init__(self, model: nn.Module, subject: Subject, units: Units, machine: Machine, peers: Peers) -> None:
        self._model, self._subject, self._units, self._machine, self._peers = model, subject, units, machine, peers
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.waiting_bytes = 0

    def let(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Run in a context from now on, which makes the state that the step was profiled in."""
        self._around = around

    def everywhere(self, work: Callable[[], T]) -> list[T]:
        """Return what each process has found, so that all go on alike."""
        return self._peers.all(work)

    def run(self, tree: Tree) -> StepRun:
        """Return what the step needs under a tree in the process that needs most."""
        found = _most(self._peers.all(lambda: self._run(tree)))
        backward_bytes = found.backward_bytes + self.waiting_bytes
        return replace(found, peak_bytes=max(found.peak_bytes, backward_bytes), backward_bytes=backward_bytes)

    def seconds(self, tree: Tree) -> tuple[float, float] | None:
        """Return the seconds of the forward and of the whole step; None where these must come from its record."""
        if not self._machine.is_here:
            return None
        turns = [self._peers.all(lambda: self._clocked(tree)) for _ in range(_CLOCKED)]
        slowest = [max(one, key=lambda seconds: seconds[1]) for one in turns]
        return min(slowest, key=lambda seconds: seconds[1])

    def flops(self, tree: Tree) -> int:
        """Return the flops of the step under a tree, of this process."""
        # A run of its own: what counts holds tensors for longer.
        counter = FlopCounter()
        with self._around():
            self._subject.train(unobserved(self._installed(tree), counter))
        return counter.total

    def _installed(self, tree: Tree) -> AbstractContextManager[None]:
        return installed(self._model, calls_of(self._units), tree, Settings())

    def _clocked(self, tree: Tree) -> tuple[float, float]:
        with self._around():
            return self._subject.train(self._clock(tree))

    def _clock(self, tree: Tree) -> StepObserver[tuple[float, float]]:
        clock = partial(accelerator_of(self._machine.device).seconds, self._machine.device)
        with self._installed(tree):
            start_s = clock()
            yield
            forward_s = clock() - start_s
            yield
            return forward_s, clock() - start_s

    def _run(self, tree: Tree) -> StepRun:
        subject, machine, around = self._subject, self._machine, self._installed(tree)
        observer = observe_allocations(subject, machine.device, record=machine.record, around=around)
        with self._around():
            return _read(subject.train(observer), [unit.name for unit in self._units.units])


@dataclass(frozen=True, kw_only=True, eq=False)
class StepRuns:
    """What a step needs under trees: found by running it, each tree once, and noted.

    Attributes:
        plain_tree: The tree that keeps everything.
        runner: Runs the step; None if all is known that is asked for.
    """

    plain_tree: Tree
    runner: StepRunner | None = None
    _runs: dict[Tree, StepRun] = field(default_factory=dict[Tree, StepRun])
    _seconds: dict[Tree, tuple[float, float]] = field(default_factory=dict[Tree, "tuple[float, float]"])
    _flops: dict[Tree, int] = field(default_factory=dict[Tree, int])

    def under(self, tree: Tree) -> StepRun:
        """Return what the step needs under a tree."""
        if tree not in self._runs:
            self._runs[tree] = self._running.run(tree)
        return self._runs[tree]

    def seconds(self, tree: Tree) -> tuple[float, float]:
        """Return the seconds of the forward and of the whole step under a tree."""
        if tree not in self._seconds:
            self._seconds[tree] = self._running.seconds(tree) or self.under(tree).seconds
        return self._seconds[tree]

    def flops(self, tree: Tree) -> int:
        """Return the flops of the step under a tree."""
        if tree not in self._flops:
            self._flops[tree] = self._running.flops(tree)
        return self._flops[tree]

    @property
    def _running(self) -> StepRunner:
        if self.runner is None:
            raise bug("figures of a step were asked for that were not noted")
        return self.runner

    def beside(self, plain_tree: Tree, runner: StepRunner) -> StepRuns:
        """Return the runs of the same step over other units, whose plain tree needs the same."""
        found = StepRuns(plain_tree=plain_tree, runner=runner)
        found._runs[plain_tree] = self.under(self.plain_tree)
        found._seconds[plain_tree] = self.seconds(self.plain_tree)
        found._flops[plain_tree] = self.flops(self.plain_tree)
        return found

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The trees that are known."""
        return tuple(self._runs)

    def noted(self, trees: Iterable[Tree]) -> StepRuns:
        """Return the same for the plain tree and some others, without the means to run it."""
        every = dict.fromkeys((self.plain_tree, *trees))
        return StepRuns(
            plain_tree=self.plain_tree,
            _runs={tree: replace(self.under(tree), curve=()) for tree in every},
            _seconds={tree: self.seconds(tree) for tree in every},
            _flops={tree: self.flops(tree) for tree in every},
        )

    def mapped(self, size: Callable[[int], int], factor: float) -> StepRuns:
        """Return the same for a step of other sizes: with another figure in place of each, and longer by a factor."""
        return replace(
            self,
            _runs={tree: _mapped(run, size) for tree, run in self._runs.items()},
            _seconds={tree: (factor * forward_s, factor * all_s) for tree, (forward_s, all_s) in self._seconds.items()},
            _flops={tree: size(flops) for tree, flops in self._flops.items()},
        )


def _mapped(run: StepRun, size: Callable[[int], int]) -> StepRun:
    names = ("kept_bytes", "forward_bytes", "backward_bytes")
    found = replace(run, **{name: size(getattr(run, name)) for name in names})
    slack_bytes = size(run.peak_bytes - max(run.forward_bytes, run.backward_bytes))  # of the device's allocator
    return replace(found, peak_bytes=max(found.forward_bytes, found.backward_bytes) + slack_bytes)


def _most(told: Sequence[StepRun]) -> StepRun:
    """Return the run of the process that needs most, with the most bytes of any."""
    most = max(told, key=lambda one: one.peak_bytes)
    names = ("kept_bytes", "forward_bytes", "backward_bytes")
    return replace(most, **{name: max(getattr(one, name) for one in told) for name in names})


def _read(run: MemoryTimeline, units: Sequence[str]) -> StepRun:
    live = run.trace.live[1:]

    def what(event: int) -> str:
        module = run.module_at(event)
        unit = max((one for one in units if f"{module}.".startswith(f"{one}.")), key=len, default=module)
        return f"{run.phase_at(event)} of {unit or 'the step'}"

    pieces = np.array_split(np.arange(len(live)), min(len(live), _MOST_POINTS)) if len(live) else []
    highest = [int(piece[0] + live[piece].argmax()) for piece in pieces]
    between = run.trace.seconds_between
    return StepRun(
        peak_bytes=run.peak_beyond(run.before),
        where=what(run.peak_at) if len(run) else "the step",
        kept_bytes=run.kept_bytes,
        forward_bytes=run.forward_peak_bytes,
        backward_bytes=run.backward_peak_bytes,
        seconds=(between(run.start, run.backward), between(run.start, run.ends)),
        curve=tuple((float(run.seconds[one]), int(live[one]), what(one)) for one in highest),
    )
