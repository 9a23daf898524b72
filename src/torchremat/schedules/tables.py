"""The tables of the persistent solver: least cost of every end of every region, for every number of free slots."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from torchremat.schedules.chain import Chain, Stage
from torchremat.schedules.rounding import Rounding, Slots, Term

Costs = NDArray[np.float32]

INFINITE = np.float32(np.inf)

# Sums that are written and read again while they are in the cache of a core: 512 KiB.
_TILE = 131_072

# NOTE [ Tables of the persistent solver ]
#
# Memory m counts free slots, costs are extra costs. The stages s..t are the end of a region that is being recomputed.
#
#   V(s, t, m)  least cost of recomputing s..t and of its backward, if the linked input of s is held and not part of m
#   W(s, t, m)  the same if it is live, and holding it is paid for out of m
#   T(s, m)     least extra cost of s..n-1 at the top level
#
#   V(s, t, m) = min over options:        forward_s + cost + W(s+1, t, m - held);   truncated_s + cost if s = t
#                    over cuts s < j <= t: forward_s + .. + forward_j-1 + V(s, j-1, m) + W(j, t, m)
#   W(s, t, m) = min over options:        as in V, where `held` includes the linked input if the option saves it
#                    over cuts:           as in V with m - linked_s for m
#   T(s, m)    = min over options:        cost + T(s+1, m - held)
#                    over ends s < j <= n: V(s, j-1, m - h) + T(j, m - h), where h is held by the region s..j-1
#   T(n, m)    = 0 if the tail fits
#
# A term is infinite where m is less than its own peaks need. A nested region that ends where its parent ends is never
# cheaper or lower than its children in its place, so no cut is needed after t.
#
# Sizes are rounded up to slots and the limit down, so trees that are feasible in the tables are feasible in bytes. All
# rows fall with m: a tree that fits into m slots fits into more.
#
# Layout: `v[s][t - s]` holds V(s, t) plus forward_s + .. + forward_t, and `w[t][s - first]` holds W(s, t), each a row
# over m; `first` is the first stage of the stretch that t is in. For one (s, t) all cuts are then the sum of two
# contiguous blocks, and one minimum over its rows.
#
# In a stretch of equal stages V and W depend on the length alone. There the blocks are parts of two common ones, in
# which W is in the order of falling lengths; so a loop of n steps takes n rows instead of n^2, and time in n^2.


@dataclass(frozen=True, kw_only=True)
class TopRegions:
    """The regions of the top level that begin at one stage, shortest first.

    Attributes:
        held: Slots that each holds from its first forward to its last backward.
        need: Slots that must be free before it, so that its first forward fits.
        forwards: Cost of one forward of all its stages, which `v` counts in excess.
    """

    held: Slots
    need: Slots
    forwards: Costs


class Tables:
    """V, W and T of one chain, for 0 to `slots` free slots. See NOTE [ Tables of the persistent solver ].

    Regions that begin at the first stages are left out if they are not done after `most_seconds`; the tables are whole
    if none is left out.
    """

    def __init__(self, chain: Chain, *, slot_bytes: int, slots: int, most_seconds: float = math.inf) -> None:
        self._ends_s = time.perf_counter() + most_seconds
        self.are_whole = True
        self.chain = chain
        self.sizes = Rounding(chain, slot_bytes=slot_bytes, slots=slots)
        n = len(chain.stages)
        self._width = slots + 1
        self._alike = _alike(chain)
        self._top_regions: dict[int, TopRegions] = {}
        self._lowest_v: Slots = np.zeros((n, n), np.int64)  # the first m at which V(s, t) is finite, at [s, t]
        self.stretch_of: list[range] = [range(s, s) for s in range(n)]
        self.v: list[Costs] = [np.empty((0, self._width), np.float32)] * n
        self.w: list[Costs] = [np.empty((0, self._width), np.float32)] * n
        self._uniform = {stretch.start for stretch in chain.stretches if chain.is_uniform(stretch)}
        for stretch in chain.stretches:
            self._allocate(stretch)
        self.top: Costs = np.full((n + 1, self._width), INFINITE)
        self._fill_regions()
        self._fill_top()

    def _allocate(self, stretch: range) -> None:
        """Make the rows of a stretch; equal stages share theirs."""
        length, width = len(stretch), self._width
        is_uniform = stretch.start in self._uniform
        v, w = (np.empty((length if is_uniform else 0, width), np.float32) for _ in range(2))
        for place, stage in enumerate(stretch):
            self.stretch_of[stage] = stretch
            self.v[stage] = v[: length - place] if is_uniform else np.empty((length - place, width), np.float32)
            self.w[stage] = w[length - 1 - place :] if is_uniform else np.empty((place + 1, width), np.float32)

    def end(self, first: int) -> int:
        """Return the first stage from `first` on that no region with `first` may contain."""
        return self.stretch_of[first].stop

    def top_regions(self, s: int) -> TopRegions:
        """Return the regions of the top level that begin at s."""
        if s not in self._top_regions:
            sizes, end = self.sizes, self.end(s)
            held = self.chain.stages[s].linked_bytes + np.cumsum(sizes.external[s:end])
            peaks = np.maximum.accumulate(sizes.forward_base[s:end] + sizes.drops(s, end))
            self._top_regions[s] = TopRegions(
                held=sizes.up_all(held), need=sizes.up_all(held + peaks), forwards=sizes.forwards(s, end)
            )
        return self._top_regions[s]

    def _fill_regions(self) -> None:
        sizes, stages, n = self.sizes, self.chain.stages, len(self.chain.stages)
        lowest_v = self._lowest_v
        lowest_w: Slots = np.zeros((n, n), np.int64)  # the same at [t, s]
        bound: Costs = np.zeros((n + 1, n), np.float32)  # the cost of (s, t) with unlimited memory
        for s in reversed(range(n)):
            end, begin = self.end(s), self.stretch_of[s].start
            if time.perf_counter() > self._ends_s:
                self._leave_out(s)
                continue
            is_uniform = begin in self._uniform
            alike, known = (min(s + 1, end - 1), end - s - 1) if is_uniform else self._alike[s]
            known = min(known, end - s, self.end(alike) - alike)  # no region extends beyond
            if not is_uniform:
                self.v[s][:known] = self.v[alike][:known]
                first_alike = self.stretch_of[alike].start
                for length in range(known):
                    self.w[s + length][s - begin] = self.w[alike + length][alike - first_alike]
            ends = np.arange(known)
            lowest_v[s, s : s + known] = lowest_v[alike, alike : alike + known]
            lowest_w[s + ends, s] = lowest_w[alike + ends, alike]
            own, paid = sizes.terms(s, again=True), sizes.terms(s, linked=True, again=True)
            bound[s, s] = min(term.stopped_cost for term in own)
            bound[s, s + 1 : end] = bound[s + 1, s + 1 : end] + min(term.cost for term in own)
            first = s + known
            v_rows, w_rows = self._kept_rows(own, s, first, end), self._kept_rows(paid, s, first, end)
            linked = sizes.up(stages[s].linked_bytes)
            forwards, drops = sizes.forwards(s, end), np.maximum.accumulate(sizes.drops(s, end))
            for t in range(first, end):
                v, w = v_rows[t - first], w_rows[t - first]
                if t > s:
                    needs = sizes.up_all(drops[: t - s] + sizes.backward_base[t])
                    lowest = np.maximum(lowest_v[s, s:t], lowest_w[t, s + 1 : t + 1])
                    # From `high` on all of s..t can be kept, and no cut is cheaper.
                    high = int(np.count_nonzero(v > bound[s, t]))
                    self._add_cuts(s, t, needs=needs, lowest=lowest, high=high, linked=linked, v=v, w=w)
                np.add(v, forwards[t - s], out=self.v[s][t - s])
                self.w[t][s - begin] = w
                lowest_v[s, t], lowest_w[t, s] = first_finite(v), first_finite(w)

    def _leave_out(self, s: int) -> None:
        """Leave out regions, and ends of regions, that begin at s."""
        stretch, self.are_whole = self.stretch_of[s], False
        shared = len(self.v[s]) - 1 if stretch.start in self._uniform else 0  # with later stages, which have them
        self.v[s][shared:] = INFINITE
        for t in range(s + shared, stretch.stop):
            self.w[t][s - stretch.start] = INFINITE

    def _kept_rows(self, terms: list[Term], s: int, first: int, end: int) -> Costs:
        """Return the least costs if s is kept: one row for each t in first..end-1."""
        sizes = self.sizes
        rows: Costs = np.full((end - first, self._width), INFINITE)
        if first == end:
            return rows
        if first == s:
            for term in terms:
                alone = sizes.kept_need(term, int(sizes.backward_base[s]) + term.stopped_bytes)
                np.minimum(rows[0, alone:], term.stopped_cost, out=rows[0, alone:])
        for t in range(max(first, s + 1), end):
            row, rest = rows[t - first], self.w[t][s + 1 - self.stretch_of[s].start]
            for term in terms:
                need = sizes.kept_need(term, int(sizes.backward_base[t]) + term.full_bytes)
                low = max(need, term.held)
                if low < self._width and np.isfinite(term.cost):
                    costs = rest[low - term.held : self._width - term.held] + term.cost
                    np.minimum(row[low:], costs, out=row[low:])
        return rows

    def _add_cuts(
        self, s: int, t: int, *, needs: Slots, lowest: Slots, high: int, linked: int, v: Costs, w: Costs
    ) -> None:
        """Lower V(s, t) and W(s, t) to their cheapest cuts, below `high` slots; `needs` and `lowest` are by cut."""
        low, begin = int(np.maximum(needs, lowest).min()), self.stretch_of[s].start
        late = np.flatnonzero(needs > lowest)
        step = max(64, _TILE // (t - s))
        for start in range(low, high, step):
            stop = min(high, start + step)
            sums = self.v[s][: t - s, start:stop] + self.w[t][s + 1 - begin : t + 1 - begin, start:stop]
            for cut in late:
                sums[cut, : max(0, needs[cut] - start)] = INFINITE
            cheapest = np.minimum.reduce(sums, axis=0)
            np.minimum(v[start:stop], cheapest, out=v[start:stop])
            paying = w[start + linked : stop + linked]
            np.minimum(paying, cheapest[: len(paying)], out=paying)

    def _fill_top(self) -> None:
        sizes, n = self.sizes, len(self.chain.stages)
        self.top[n, sizes.up(self.chain.tail_bytes) :] = 0
        for s in reversed(range(n)):
            row = self.top[s]
            for term in sizes.terms(s, linked=True, external=True):
                low = sizes.kept_need(term, int(sizes.forward_base[s]) + term.full_bytes)
                costs = self.top[s + 1, low - term.held : self._width - term.held] + term.cost
                np.minimum(row[low:], costs, out=row[low:])
            regions = self.top_regions(s)
            begins = [0, *(np.flatnonzero(np.diff(regions.held)) + 1).tolist(), len(regions.held)]
            for first, last in pairwise(begins):
                self._add_regions(s, slice(first, last), row)

    def _add_regions(self, s: int, some: slice, row: Costs) -> None:
        """Lower T(s) to the cheapest of some regions that begin at s and hold the same."""
        regions, count = self.top_regions(s), some.stop - some.start
        if not count:
            return
        held = int(regions.held[some.start])
        inside, after = self.v[s][some], self.top[s + 1 + some.start : s + 1 + some.stop]
        needs, forwards = regions.need[some], regions.forwards[some, None]
        lowest = held + self._lowest_v[s, s + some.start : s + some.stop]
        late = np.flatnonzero(needs > lowest)
        step = max(64, _TILE // count)
        for start in range(int(np.maximum(needs, lowest).min()), self._width, step):
            stop = min(self._width, start + step)
            free = slice(start - held, stop - held)
            sums = inside[:, free] - forwards + after[:, free]
            for region in late:
                sums[region, : max(0, needs[region] - start)] = INFINITE
            np.minimum(row[start:stop], np.minimum.reduce(sums, axis=0), out=row[start:stop])


def _alike(chain: Chain) -> list[tuple[int, int]]:
    """Return for each stage a later stage with the longest equal run of stages from there on, and the run's length.

    The table entries of such a run do not depend on its position, so equal blocks are solved once.
    """
    numbers: dict[Stage, int] = {}
    kinds = np.array([numbers.setdefault(stage, len(numbers)) for stage in chain.stages])
    n = len(kinds)
    result = [(s, 0) for s in range(n)]
    runs: NDArray[np.int64] = np.zeros(n + 1, np.int64)  # from s on and from each other stage on
    for s in reversed(range(n)):
        runs[:-1] = np.where(kinds == kinds[s], runs[1:] + 1, 0)
        later = runs[s + 1 : n]
        if later.any():
            found = int(later.argmax())
            result[s] = s + 1 + found, int(later[found])
    return result


def first_finite(costs: Costs) -> int:
    """Return the index of the first finite entry of a row that falls with m, or its length."""
    return int(np.count_nonzero(costs == INFINITE))
