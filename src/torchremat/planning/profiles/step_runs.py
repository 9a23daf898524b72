"""Runs of a step that takes gradients itself: what it needs under a tree is found by running it.

    forward ──► loss                        the interpreter knows this step: one backward, in the order of the graph
    forward ──► gradient ──► loss           there are two graphs, or more, and each backward through one of them
                                            recomputes, so the step is its own interpreter

A run takes as long as a step, and the search over runs tries few trees: see `searches.trials`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.runs import StepObserver, Subject, unobserved
from torchremat.measuring.timeline import MemoryTimeline
from torchremat.planning.devices.machines import Machine
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.profiles.traces import named
from torchremat.planning.profiles.units import Units
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import KeepNode, Tree

# Of each tree that fits, the fastest of so many runs counts: noise only adds.
_CLOCKED = 3

_MOST_POINTS = 400


class StepRuns:
    """Runs a step under trees, each once.

    Args:
        model: The model.
        subject: The step.
        units: The units that trees are over.
        machine: Where it runs.
        plain: Other runs of the same step, which may know the plain one.
    """

    def __init__(
        self, model: nn.Module, subject: Subject, units: Units, machine: Machine, plain: StepRuns | None = None
    ) -> None:
        self._model, self._subject, self._units, self._machine = model, subject, units, machine
        self._runs: dict[Tree, MemoryTimeline] = {}
        self._seconds: dict[Tree, tuple[float, float]] = {}
        self._flops: dict[Tree, int] = {}
        self._plain = plain
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext

    def let(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Run in a context from now on, which makes the state that the step was profiled in."""
        self._around = around

    @property
    def plain_tree(self) -> Tree:
        """The tree that keeps everything."""
        return tuple(map(KeepNode, range(len(self._units.units))))

    def under(self, tree: Tree) -> MemoryTimeline:
        """Return a run of the step under a tree."""
        if self._plain is not None and tree == self.plain_tree:
            return self._plain.under(self._plain.plain_tree)
        if tree not in self._runs:
            self._runs[tree] = self._run(tree)
        return self._runs[tree]

    def seconds(self, tree: Tree) -> tuple[float, float]:
        """Return the seconds of the forward and of the whole step under a tree."""
        if self._plain is not None and tree == self.plain_tree:
            return self._plain.seconds(self._plain.plain_tree)
        if tree not in self._seconds:
            if self._machine.is_here:
                self._seconds[tree] = min((self._clocked(tree) for _ in range(_CLOCKED)), key=lambda one: one[1])
            else:
                run = self.under(tree)
                between = run.trace.seconds_between
                self._seconds[tree] = between(run.start, run.backward), between(run.start, run.ends)
        return self._seconds[tree]

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

    def flops(self, tree: Tree) -> int:
        """Return the flops of the step under a tree."""
        if self._plain is not None and tree == self.plain_tree:
            return self._plain.flops(self._plain.plain_tree)
        if tree not in self._flops:
            # A run of its own: what counts holds tensors for longer.
            counter = FlopCounter()
            with self._around():
                self._subject.train(unobserved(self._installed(tree), counter))
            self._flops[tree] = counter.total
        return self._flops[tree]

    def _installed(self, tree: Tree) -> AbstractContextManager[None]:
        return installed(self._model, calls_of(self._units), tree, Settings())

    def _run(self, tree: Tree) -> MemoryTimeline:
        subject, machine, around = self._subject, self._machine, self._installed(tree)
        with self._around():
            return subject.train(observe_allocations(subject, machine.device, record=machine.record, around=around))


def what_at(run: MemoryTimeline, event: int) -> str:
    """Return in words what ran at an event of a run."""
    module = run.module_at(event)
    return f"the {run.phase_at(event)} of {named(module) if module else 'the step'}"


def highest_of(run: MemoryTimeline) -> list[int]:
    """Return the events of a run with the most live bytes in each of some pieces of it."""
    if not len(run):
        return []
    pieces = np.array_split(np.arange(len(run)), min(len(run), _MOST_POINTS))
    return [int(piece[0] + run.live_bytes[piece].argmax()) for piece in pieces]
