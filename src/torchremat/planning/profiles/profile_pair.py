"""The profiles of one step over coarser and finer units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchremat.planning.profiles.reading import Profile


@dataclass(frozen=True, kw_only=True)
class ProfilePair:
    """The coarse profile of a step, the fine one if units can be split, and one of the modules around the units.

    The first two make mixtures, see `granularity`; the last is used as it is.
    """

    blocks: Profile
    leaves: Profile | None
    around: Profile | None = None

    @property
    def all(self) -> tuple[Profile, ...]:
        """Those that there are."""
        return tuple(one for one in (self.blocks, self.leaves, self.around) if one is not None)

    def each(self, make: Callable[[Profile], Profile]) -> ProfilePair:
        """Return the same with another profile for each, so that none is left out."""
        leaves, around = (None if one is None else make(one) for one in (self.leaves, self.around))
        return ProfilePair(blocks=make(self.blocks), leaves=leaves, around=around)
