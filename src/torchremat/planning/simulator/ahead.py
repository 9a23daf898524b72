"""A backward with all regions recomputed before the gradient arrives, the last one first.

    forward's end    the bytes that a tree keeps
    meanwhile        in addition all recomputed tensors, and the peak of the running recompute
    backward         all bytes of a tree without regions, each until the backward reaches it

The number of regions recomputed by the time the gradient arrives is unknown. The larger of the peaks for all and for
none bounds the peak for any number: a region that was reached sees in the backward the same as if all were recomputed,
a region that was not reached sees the same as if none were, and before the backward fewer bytes are live than with all
recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.points import Live, ProgramPoint, RanForward
from torchremat.planning.simulator.prediction import live_bytes, over_bytes
from torchremat.planning.simulator.simulator import MemorySimulator


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
    """Return the peaks of the recompute ahead and of the rest of the step, over the live bytes before the forward.

    Args:
        profile: Profile of a step.
        simulator: Simulator of a tree.
        kept_bytes: Live bytes at the end of the forward.
    """
    for _ in simulator.forward():
        pass
    beside = kept_bytes - simulator.live.total()
    recomputing = (
        state.held_bytes + over_bytes(profile, state)
        for state in recomputed_ahead(simulator)
        if isinstance(state, Live)
    )
    ahead = max(recomputing, default=0)
    highest = simulator.live.total() + beside + profile.after_bytes[ProgramPoint.END, 0]
    for state in simulator.backward():
        if isinstance(state, Live):
            highest = max(highest, live_bytes(profile, state) + over_bytes(profile, state))
    return max(0, ahead + beside), highest
