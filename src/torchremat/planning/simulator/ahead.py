"""A backward before whose gradient all regions are recomputed, the last one first.

    forward's end    what a tree keeps
    meanwhile        beside it what has been recomputed, and the peak of the recompute that runs
    backward         all that a tree without regions has, until the backward comes to it

How many regions are recomputed by the time the gradient comes is not known. The highest of all and of none is a bound
for any number: one that was reached finds in the backward what it finds after all, one that was not what it finds after
none, and before the backward there is less than of all.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.points import Live, ProgramPoint, RanForward
from torchremat.planning.simulator.prediction import live_bytes, over_bytes
from torchremat.planning.simulator.simulator import MemorySimulator


def recomputed_ahead(simulator: MemorySimulator) -> Iterator[Live | RanForward]:
    """Recompute all regions of a walk that has come to the end of its forward, as `Session.recompute` does.

    What a nested region takes is recomputed for it, by the regions around it.
    """
    simulator.is_ahead = True
    simulator.bytes = dict(simulator.bytes)
    for region in reversed(simulator.regions):
        for one in simulator.around[region.first][: simulator.depth[id(region)]]:
            if id(one) not in simulator.done and simulator.graphs.waits(one):
                yield from simulator.recompute(one, one.last)
    simulator.is_ahead = False


def after_lookahead(profile: Profile, simulator: MemorySimulator, *, kept_bytes: int) -> tuple[int, int]:
    """Return the highest live bytes while all is recomputed ahead, and from there on; over those before the forward.

    Args:
        profile: Of a step.
        simulator: Under a tree.
        kept_bytes: Live bytes at the end of the forward.
    """
    for _ in simulator.forward():
        pass
    beside = kept_bytes - simulator.total()
    recomputing = (
        state.held_bytes + over_bytes(profile, state)
        for state in recomputed_ahead(simulator)
        if isinstance(state, Live)
    )
    ahead = max(recomputing, default=0)
    highest = simulator.total() + beside + profile.after_bytes[ProgramPoint.END, 0]
    for state in simulator.backward():
        if isinstance(state, Live):
            highest = max(highest, live_bytes(profile, state) + over_bytes(profile, state))
    return max(0, ahead + beside), highest
