"""Two more kinds of backward: one with all regions recomputed ahead of the gradient, and one in two passes.

Ahead, the regions are recomputed before the gradient arrives, the last one first:

    forward's end    the bytes that a tree keeps
    meanwhile        in addition all recomputed tensors, and the peak of the running recompute
    backward         all bytes of a tree without regions, each until the backward reaches it

The number of regions recomputed by the time the gradient arrives is unknown. The larger of the peaks for all and for
none bounds the peak for any number: a region that was reached sees in the backward the same as if all were recomputed,
a region that was not reached sees the same as if none were, and before the backward fewer bytes are live than with all
recomputed.

Split, as in zero-bubble pipelines, into an input and a weight pass:

    input pass      a unit's backward begins      all its saved tensors are there, recomputed or kept
                    and ends                      recomputed tensors that no weight needs are freed; the rest stays
    between them    kept tensors of units, inputs of regions, tensors that weights need, gradients for weights
    weight pass     all of these are freed, group by group

The saved tensors of kept units stay until the weight pass, since torch retains the graph. So between the passes a stage
can hold less with regions than without them.

The gradients that wait for the weight pass are the same under each tree, so a profile of such a backward counts them
among the bytes that are live whatever the plan is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.points import Live, ProgramPoint, RanForward, UnitBytes
from torchremat.planning.simulator.prediction import live_bytes, over_bytes
from torchremat.planning.simulator.simulator import MemorySimulator
from torchremat.schedules.chain import RegionNode


def recomputed_ahead(simulator: MemorySimulator) -> Iterator[Live | RanForward]:
    """Recompute all regions of a simulation that has reached the end of its forward, as `Session.recompute` does.

    The regions around a nested region recompute its inputs.
    """
    simulator.is_ahead = True
    simulator.live.bytes = dict(simulator.live.bytes)
    for region in reversed(simulator.regions):
        for one in simulator.around[region.first][: simulator.depth[id(region)]]:
            if id(one) not in simulator.done and simulator.graphs.waits(one):
                yield from simulator.recompute(one, one.last)
    simulator.is_ahead = False


def after_lookahead(profile: Profile, simulator: MemorySimulator, *, kept_bytes: int) -> tuple[int, int]:
    """Return the peaks of the recompute ahead and of the rest of the step, over the live bytes before the forward."""
    for _ in simulator.forward():
        pass
    others = kept_bytes - simulator.live.total()
    recomputing = (
        state.held_bytes + over_bytes(profile, state)
        for state in recomputed_ahead(simulator)
        if isinstance(state, Live)
    )
    ahead = max(recomputing, default=0)
    highest = simulator.live.total() + others + profile.after_bytes[ProgramPoint.END, 0]
    for state in simulator.backward():
        if isinstance(state, Live):
            highest = max(highest, live_bytes(profile, state) + over_bytes(profile, state))
    return max(0, ahead + others), highest


@dataclass(frozen=True, kw_only=True)
class SplitUnitBytes(UnitBytes):
    """Bytes that one unit needs if its backward is split.

    Attributes:
        needed: The boundary storages in `saved` that weights need.
        needed_bytes: Bytes that weights need of its other saved tensors.
        stays_peak_bytes: Peak of the input pass of its backward if nothing is freed, over the live bytes before it.
        is_left: Whether its graph is freed with the input pass, since no weight is behind it.
    """

    needed: frozenset[int]
    needed_bytes: int
    stays_peak_bytes: int
    is_left: bool


class InputPassSimulator(MemorySimulator):
    """A simulation whose backward is an input pass: at its end, tensors for the weight pass are still held."""

    def drop(self, unit: int, *, again: bool) -> None:
        """Release recomputed tensors that no weight needs."""
        size = self._of(unit)
        if again:
            super().drop(unit, again=True)
            self.live.hold(self.named(unit, size.needed))
            self.live.inside += size.needed_bytes
        if unit == self.order[-1]:
            self._end()

    def _end(self) -> None:
        """Release graphs with no weight behind them."""
        left = {unit for unit in self.order if self._of(unit).is_left}
        for unit in left:
            if not self.around[unit]:
                super().drop(unit, again=False)
            for region in self.around[unit]:
                if left.issuperset(range(region.first, region.last + 1)):
                    super().leave(region)

    def _of(self, unit: int) -> SplitUnitBytes:
        return cast("SplitUnitBytes", self.sizes[unit])

    def leave_inter_call(self, storage: int) -> None:
        """Release nothing: the graph stays."""

    def leave(self, region: RegionNode) -> None:
        """Release nothing: the graph has the region."""

    def let_go(self, region: RegionNode, gone: set[int]) -> None:
        """Release nothing: a session keeps the inputs of nested regions, which each pass may ask for."""


@dataclass(frozen=True, kw_only=True)
class SplitPrediction:
    """Bytes that a split backward needs under a tree, relative to the start of the forward.

    Attributes:
        input_bytes: Peak of the input pass.
        between_bytes: Live bytes between the passes.
        weight_bytes: Peak of the weight pass.
    """

    input_bytes: int = 0
    between_bytes: int = 0
    weight_bytes: int = 0


def input_pass(
    profile: Profile, simulator: InputPassSimulator, *, kept_bytes: int, ahead: bool = False
) -> tuple[int, int]:
    """Return the peak of an input pass, and the live bytes after it."""
    for _ in simulator.forward():
        pass
    others = kept_bytes - simulator.live.total()
    for _ in recomputed_ahead(simulator) if ahead else ():
        pass
    live = simulator.live.total() + others
    highest = live + profile.after_bytes[ProgramPoint.END, 0]
    for state in simulator.backward():
        if isinstance(state, Live):
            point, unit = state.key
            live = live_bytes(profile, state)
            match point:
                case ProgramPoint.RECOMPUTE:
                    over = over_bytes(profile, state)
                case ProgramPoint.BACKWARD if not simulator.around[unit]:
                    over = cast("SplitUnitBytes", profile.sizes[unit]).stays_peak_bytes
                case _:
                    over = profile.after_bytes[state.key]
            highest = max(highest, live + over)
    return highest, live
