"""The cheapest persistent schedule of a chain under a limit of bytes, by dynamic programming.

Persistent means that a kept tensor stays until its backward; these schedules are exactly the trees of `chain.py`.

Deliberately missing: schedules that are not persistent. They can be cheaper; finding the best is NP-hard in general.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from torchremat.errors import BudgetError, bug
from torchremat.schedules.chain import Chain, KeepNode, Node, RegionNode, Tree
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.rounding import default_slot, rounded_down
from torchremat.schedules.tables import INFINITE, Tables, first_finite


class Persistent:
    """The cheapest trees of a chain for every limit up to `limit_bytes`. See NOTE [ What a tree means ].

    Source: O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, "Optimal checkpointing for heterogeneous
    chains: how to train deep neural networks with limited memory", hal-02352969. We differ: a stage has several
    options, a recompute stops at its last save, inputs need not be saved, the outermost region holds the external
    inputs, and every position has its own base. See NOTE [ Tables of the persistent solver ].

    Building takes time in n^3 x slots and memory in n^2 x slots for n stages; the trees are then read off the tables.
    Costs are float32 inside, so among trees whose costs agree in seven digits any may be returned.

    Args:
        chain: What to schedule.
        limit_bytes: The highest limit that callers will ask for.
        slot_bytes: Granularity of memory: sizes are rounded up to multiples, limits down. With 1 the result is optimal.
            By default chosen so that rounding loses little, with fewer slots for more stages.
        most_seconds: After so many seconds the tables leave out regions that begin at the remaining stages, the first
            ones.

    Attributes:
        lowest_slots: The fewest slots for which the tables have a tree; more than `most_slots` if they have none.
        most_slots: The most slots that the tables reach.
    """

    def __init__(
        self, chain: Chain, limit_bytes: int, slot_bytes: int | None = None, *, most_seconds: float = math.inf
    ) -> None:
        if limit_bytes < 0 or (slot_bytes is not None and slot_bytes < 1):
            raise BudgetError(f"limit_bytes={limit_bytes} must be at least 0 and slot_bytes={slot_bytes} at least 1")
        self.chain = chain
        useful_bytes = _useful_bytes(chain, limit_bytes)
        self.slot_bytes = default_slot(chain, useful_bytes) if slot_bytes is None else slot_bytes
        # Each of the up to n tensors that a tree holds at a time is rounded up, so a tree for more slots than the limit
        # has may fit in bytes. With 200 unequal stages at a tenth of their memory that wins back a quarter of it.
        spare = len(chain.stages) if self.slot_bytes > 1 else 0
        self.most_slots = useful_bytes // self.slot_bytes + spare
        self._tables = Tables(chain, slot_bytes=self.slot_bytes, slots=self.most_slots, most_seconds=most_seconds)
        self.lowest_slots = first_finite(self._tables.top[0])
        # Choices made before: most trees differ in few of them.
        self._chosen_top: dict[tuple[int, int], _NextNode | None] = {}
        self._chosen: dict[tuple[int, int, int, bool], _NextNode | None] = {}

    @property
    def is_whole(self) -> bool:
        """Whether the tables have all regions: `most_seconds` sufficed."""
        return self._tables.are_whole

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """The numbers of slots at which the cheapest tree gets cheaper, in order: one for each cost."""
        costs = self._tables.top[0]
        falls = np.flatnonzero(costs[1:] < costs[:-1]) + 1
        has_any = self.lowest_slots <= self.most_slots
        return np.unique(np.append(falls, self.lowest_slots)) if has_any else np.zeros(0, np.int64)

    def tree_at(self, slots: int) -> Tree:
        """Return the cheapest tree for a number of slots between `lowest_slots` and `most_slots`.

        For callers that judge trees by more than the chain: a tree for more slots than a limit has may still fit it.
        """
        runs = [_RegionRun(first=0, last=len(self.chain.stages) - 1, next=0, m=slots, nodes=[])]
        while True:
            run = runs[-1]
            if run.next > run.last:
                runs.pop()
                if not runs:
                    return tuple(run.nodes)
                runs[-1].nodes.append(RegionNode(tuple(run.nodes)))
                continue
            choice = self._next(run, is_top=len(runs) == 1)
            if choice is None:
                raise bug(f"no tree for stages {run.next} to {run.last} in {run.m} slots of {self.slot_bytes} bytes")
            begin, run.next, run.m = run.next, choice.last + 1, run.m - choice.held
            if choice.option is None:
                runs.append(_RegionRun(first=begin, last=choice.last, next=begin, m=run.m, nodes=[]))
            else:
                run.nodes.append(KeepNode(begin, choice.option))

    def _next(self, run: _RegionRun, *, is_top: bool) -> _NextNode | None:
        if is_top:
            asked = run.next, run.m
            if asked not in self._chosen_top:
                self._chosen_top[asked] = self._top_choice(*asked)
            return self._chosen_top[asked]
        within = run.next, run.last, run.m, run.next > run.first
        if within not in self._chosen:
            self._chosen[within] = self._choice(*within)
        return self._chosen[within]

    def _top_choice(self, s: int, m: int) -> _NextNode | None:
        """Return how the cheapest tree of s..n-1 begins with m slots free: the term of T(s, m) that is least."""
        tables, sizes = self._tables, self._tables.sizes
        base = int(sizes.forward_base[s])
        best, choice = INFINITE, None
        for option, term in enumerate(sizes.terms(s, linked=True, external=True)):
            if m >= sizes.kept_need(term, base + term.full_bytes):
                cost = term.cost + tables.top[s + 1, m - term.held]
                if cost < best:
                    best, choice = cost, _NextNode(last=s, held=term.held, option=option)
        regions = tables.top_regions(s)
        count = int(np.count_nonzero(regions.need <= m))  # needs rise with the length
        if count:
            index, free = np.arange(count), m - regions.held[:count]
            costs = tables.v[s][index, free] - regions.forwards[:count] + tables.top[s + 1 + index, free]
            if costs.min() < best:
                cut = int(costs.argmin())
                choice = _NextNode(last=s + cut, held=int(regions.held[cut]), option=None)
        return choice

    def _choice(self, s: int, t: int, m: int, pays: bool) -> _NextNode | None:
        """Return how the cheapest end of a region goes on: the term of V(s, t, m) or, if it pays, W(s, t, m)."""
        tables, sizes = self._tables, self._tables.sizes
        base, rest = int(sizes.backward_base[t]), s + 1 - tables.stretch_of[s].start
        best, choice = INFINITE, None
        for option, term in enumerate(sizes.terms(s, linked=pays, again=True)):
            if m >= sizes.kept_need(term, base + (term.stopped_bytes if s == t else term.full_bytes)):
                cost = term.stopped_cost if s == t else term.cost + tables.w[t][rest, m - term.held]
                if cost < best:
                    best, choice = cost, _NextNode(last=s, held=term.held, option=option)
        held = sizes.up(self.chain.stages[s].linked_bytes) if pays else 0
        needs = sizes.up_all(np.maximum.accumulate(sizes.drops(s, t)) + base)
        count = int(np.count_nonzero(needs <= m - held))
        if count:
            costs = tables.v[s][:count, m - held] + tables.w[t][rest : rest + count, m - held]
            if costs.min() < best:
                choice = _NextNode(last=s + int(costs.argmin()), held=held, option=None)
        return choice


def _useful_bytes(chain: Chain, limit_bytes: int) -> int:
    """Return a limit, or the bytes with which nothing is recomputed if these are fewer: tables stop there."""
    costs = [[option.cost for option in stage.options] for stage in chain.stages]
    tree = tuple(KeepNode(stage, option.index(min(option))) for stage, option in enumerate(costs))
    return min(limit_bytes, interpret(chain, tree).peak_bytes)


@dataclass(frozen=True, kw_only=True)
class _NextNode:
    last: int
    held: int  # slots
    option: int | None  # None: a region


@dataclass(kw_only=True, slots=True)
class _RegionRun:
    """A region, or the top level, while its nodes are chosen from left to right."""

    first: int
    last: int
    next: int
    m: int
    nodes: list[Node]


def least_cost(chain: Chain, limit_bytes: int, slot_bytes: int | None = None) -> float:
    """Return a lower bound on the cost of every tree whose peak is at most the limit; infinite if none exists.

    The same tables with all sizes rounded down, and the limit up.
    """
    useful_bytes = _useful_bytes(chain, limit_bytes)
    slot = default_slot(chain, useful_bytes) if slot_bytes is None else slot_bytes
    slots = -(-useful_bytes // slot)
    tables = Tables(rounded_down(chain, slot), slot_bytes=slot, slots=slots)
    # Costs are float32 inside.
    return float(tables.top[0, slots]) * (1 - 1e-5)
