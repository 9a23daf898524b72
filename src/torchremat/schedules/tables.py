"""The tables of the persistent solver: least cost of every end of every region, for every number of free slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchremat.schedules.chain import Chain
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
#   W(s, t, m)  the same if it is live, and whoever wants to hold it pays for it out of m
#   T(s, m)     least extra cost of s..n-1 at the top level
#
#   V(s, t, m) = min over options:        forward_s + cost + W(s+1, t, m - held);   truncated_s + cost if s = t
#                    over cuts s < j <= t: forward_s + .. + forward_j-1 + V(s, j-1, m) + W(j, t, m)
#   W(s, t, m) = min over options:        as in V, where `held` includes the linked input if the option saves it
#                    over cuts:           as in V with m - linked_s for m
#   T(s, m)    = min over options:        cost + T(s+1, m - held)
#                    over ends s < j <= n: V(s, j-1, m - h) + T(j, m - h), where h is what the region s..j-1 holds
#   T(n, m)    = 0 if the tail fits
#
# A term is infinite where m is less than its own peaks need. A nested region that ends where its parent ends is never
# cheaper nor lower than its children in its place, so there is no cut behind t.
#
# Sizes are rounded up to slots and the limit down, so what the tables call feasible is feasible in bytes. All rows fall
# with m: whatever fits into m slots fits into more.
#
# Layout: `v[s][t - s]` holds V(s, t) plus forward_s + .. + forward_t, and `w[t][s]` holds W(s, t), each a row over m.
# For one (s, t) all cuts are then the sum of two contiguous blocks, and one minimum over its rows.


@dataclass(frozen=True, kw_only=True)
class TopRegions:
    """The regions of the top level that begin at one stage, shortest first.

    Attributes:
        held: Slots that each holds from its first forward to its last backward.
        need: Slots that must be free before it, so that its first forward fits.
        forwards: Cost of one forward of all its stages, which `v` counts too much.
    """

    held: Slots
    need: Slots
    forwards: Costs


class Tables:
    """V, W and T of one chain, for 0 to `slots` free slots. See NOTE [ Tables of the persistent solver ]."""

    def __init__(self, chain: Chain, *, slot_bytes: int, slots: int) -> None:
        self.chain = chain
        self.sizes = Rounding(chain, slot_bytes=slot_bytes, slots=slots)
        n = len(chain.stages)
        self._width = slots + 1
        self.v: list[Costs] = [np.empty((self.end(s) - s, self._width), np.float32) for s in range(n)]
        self.w: list[Costs] = [np.empty((t + 1, self._width), np.float32) for t in range(n)]
        self.top: Costs = np.full((n + 1, self._width), INFINITE)
        self._fill_regions()
        self._fill_top()

    def end(self, first: int) -> int:
        """Return the first stage from `first` on that no region may contain, or the length of the chain."""
        stages = self.chain.stages
        return next((index for index in range(first, len(stages)) if not stages[index].recomputable), len(stages))

    def top_regions(self, s: int) -> TopRegions:
        """Return the regions of the top level that begin at s; none if s cannot be recomputed."""
        sizes, end = self.sizes, self.end(s)
        held = self.chain.stages[s].linked_bytes + np.cumsum(sizes.external[s:end])
        peaks = np.maximum.accumulate(sizes.forward_base[s:end] + sizes.drops(s, end))
        return TopRegions(held=sizes.up_all(held), need=sizes.up_all(held + peaks), forwards=sizes.forwards(s, end))

    def _fill_regions(self) -> None:
        sizes, stages, n = self.sizes, self.chain.stages, len(self.chain.stages)
        lowest_v: Slots = np.zeros((n, n), np.int64)  # the first m that is finite, at [s, t]
        lowest_w: Slots = np.zeros((n, n), np.int64)  # the same at [t, s]
        bound: Costs = np.zeros((n + 1, n), np.float32)  # the cost of (s, t) with memory without end
        for s in reversed(range(n)):
            end = self.end(s)
            if end == s:
                continue
            own, paid = sizes.terms(s, again=True), sizes.terms(s, linked=True, again=True)
            bound[s, s] = min(term.stopped_cost for term in own)
            bound[s, s + 1 : end] = bound[s + 1, s + 1 : end] + min(term.cost for term in own)
            v_rows, w_rows = self._kept_rows(own, s, end), self._kept_rows(paid, s, end)
            linked = sizes.up(stages[s].linked_bytes)
            forwards, drops = sizes.forwards(s, end), np.maximum.accumulate(sizes.drops(s, end))
            for t in range(s, end):
                v, w = v_rows[t - s], w_rows[t - s]
                if t > s:
                    needs = sizes.up_all(drops[: t - s] + sizes.backward_base[t])
                    lowest = np.maximum(lowest_v[s, s:t], lowest_w[t, s + 1 : t + 1])
                    # From `high` on all of s..t can be kept, and no cut is cheaper.
                    high = int(np.count_nonzero(v > bound[s, t]))
                    self._add_cuts(s, t, needs=needs, lowest=lowest, high=high, linked=linked, v=v, w=w)
                np.add(v, forwards[t - s], out=self.v[s][t - s])
                self.w[t][s] = w
                lowest_v[s, t], lowest_w[t, s] = first_finite(v), first_finite(w)

    def _kept_rows(self, terms: list[Term], s: int, end: int) -> Costs:
        """Return the least costs if s is kept: one row for each t in s..end-1."""
        sizes = self.sizes
        rows: Costs = np.full((end - s, self._width), INFINITE)
        for term in terms:
            alone = sizes.kept_need(term, int(sizes.backward_base[s]) + term.stopped_bytes)
            np.minimum(rows[0, alone:], term.stopped_cost, out=rows[0, alone:])
        if end == s + 1:
            return rows
        rests: Costs = np.stack([self.w[t][s + 1] for t in range(s + 1, end)])
        for term in terms:
            needs = np.maximum(sizes.up_all(sizes.backward_base[s + 1 : end] + term.full_bytes), term.backward)
            free = np.arange(term.held, self._width)
            costs = np.where(free < needs[:, None], INFINITE, term.cost)
            costs += rests[:, : len(free)]
            np.minimum(rows[1:, term.held :], costs, out=rows[1:, term.held :])
        return rows

    def _add_cuts(
        self, s: int, t: int, *, needs: Slots, lowest: Slots, high: int, linked: int, v: Costs, w: Costs
    ) -> None:
        """Lower V(s, t) and W(s, t) to their cheapest cuts, below `high` slots; `needs` and `lowest` are by cut."""
        low = int(np.maximum(needs, lowest).min())
        late = np.flatnonzero(needs > lowest)
        step = max(64, _TILE // (t - s))
        for start in range(low, high, step):
            stop = min(high, start + step)
            sums = self.v[s][: t - s, start:stop] + self.w[t][s + 1 : t + 1, start:stop]
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
            for index, held in enumerate(regions.held):
                inside = self.v[s][index]
                low = max(int(regions.need[index]), int(held) + first_finite(inside))
                free = slice(low - held, self._width - held)
                costs = inside[free] - regions.forwards[index] + self.top[s + index + 1, free]
                np.minimum(row[low:], costs, out=row[low:])


def first_finite(costs: Costs) -> int:
    """Return the first finite place of a row that falls with m, or its length."""
    return int(np.count_nonzero(costs == INFINITE))
