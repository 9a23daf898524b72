"""A tree that was judged: its peak and its cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchremat.planning.profiles.reading import Profile
from torchremat.planning.simulator.offload_choices import NO_OFFLOADS, Offloads
from torchremat.planning.simulator.prediction import Prediction
from torchremat.schedules.chain import Tree


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A tree over the units of a profile, with its prediction; `cost` is in the unit of the planner's cost.

    `offloads` are the kept units whose saved tensors go to a store.
    """

    profile: Profile
    tree: Tree
    prediction: Prediction
    cost: float
    offloads: Offloads = field(default_factory=lambda: NO_OFFLOADS, hash=False)

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over a plain step's."""
        added_s = self.prediction.seconds + self.prediction.moving_s
        return 1 + added_s / self.profile.seconds if self.profile.seconds else 1.0
