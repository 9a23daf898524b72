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
from torchremat.planning.walks.memory import Walk
from torchremat.planning.walks.moments import Live, Moment, Ran
from torchremat.planning.walks.prediction import live_bytes, over_bytes


def recomputed_ahead(walk: Walk) -> Iterator[Live | Ran]:
    """Recompute all regions of a walk that has come to the end of its forward, as `Session.recompute` does.

    What a nested region takes is recomputed for it, by the regions around it.
    """
    walk.is_ahead = True
    walk.bytes = dict(walk.bytes)
    for region in reversed(walk.regions):
        for one in walk.around[region.first][: walk.depth[id(region)]]:
            if id(one) not in walk.done and walk.graphs.waits(one):
                yield from walk.recompute(one, one.last)
    walk.is_ahead = False


def after_lookahead(profile: Profile, walk: Walk, *, kept_bytes: int) -> tuple[int, int]:
    """Return the highest live bytes while all is recomputed ahead, and from there on; over those before the forward.

    Args:
        profile: Of a step.
        walk: Under a tree.
        kept_bytes: Live bytes at the end of the forward.
    """
    for _ in walk.forward():
        pass
    beside = kept_bytes - walk.total()
    recomputing = (
        state.held_bytes + over_bytes(profile, state) for state in recomputed_ahead(walk) if isinstance(state, Live)
    )
    ahead = max(recomputing, default=0)
    highest = walk.total() + beside + profile.after_bytes[Moment.END, 0]
    for state in walk.backward():
        if isinstance(state, Live):
            highest = max(highest, live_bytes(profile, state) + over_bytes(profile, state))
    return max(0, ahead + beside), highest
