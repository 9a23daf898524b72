"""Shapes with the same control flow through a model, and the figures learned from them.

A family is defined by its form: the same calls, the same storages with the same live ranges, the same units. Within a
family, figures are fitted over shapes. The control flow of a model may depend on the shape (`if length > n`); a profile
of another form begins another family. The control flow of a shape that never ran is unknown: if its neighbours below
and above belong to different families, the shape must be learned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from torchremat.errors import StepError
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.cuts import cut_options, with_cuts
from torchremat.planning.searches.granularity import align, mix
from torchremat.planning.searches.options import Selections, options_with
from torchremat.planning.shapes.figures import (
    Figures,
    ProfileForm,
    figures_of,
    figures_of_options,
    form_of,
    with_figures,
    with_option_figures,
)
from torchremat.planning.shapes.fits import Cover, Shape, cover
from torchremat.planning.simulator.simulator import Options

# How far beyond the shapes seen a fit is trusted: four times, in every dimension.
_REACH_OCTAVES = 2.0
# Within this distance of a shape whose bytes were measured, other shapes are trusted without measuring.
_NEAR_OCTAVES = 0.33
# Most families of batches that look alike; more than that do not come from shapes.
_MOST_FAMILIES = 8
# Number of cached fitted profiles: those of one shape, and some.
_MOST_FITTED = 16
# Share that is left free for each octave beyond the shapes seen.
_BEYOND_SHARE = 0.02


class Family:
    """The learned shapes of one form.

    Attributes:
        pairs: The profiles of the learned shapes.
        measured: Shapes whose steps were measured under a plan.
        over_share: By how much the worst measured step was above its prediction, as a share.
        changes: Number of times that a shape was learned.
        has_told_calls: Whether hooks see the calls that a trace sees; not where a model calls `forward` of a module.
    """

    def __init__(self, form: ProfileForm) -> None:
        self.form = form
        self.pairs: dict[Shape, ProfilePair] = {}
        self.measured: list[Shape] = []
        self.over_share = 0.0
        self.has_told_calls = True
        self.changes = 0
        # The profiles in the same order, prepared for mixing: with common boundaries, and with options.
        self._mixable: list[ProfilePair] = []
        # By the calls that are split: the profiles at the learned shapes, and their figures as rows.
        self._figures: dict[frozenset[int], tuple[list[Profile], Figures]] = {}
        # The ways of recomputing units in parts at the learned shapes, and their figures as rows, once needed.
        self._cuts: tuple[list[Options], Figures] | None = None
        # The last requested profiles, by shape and by the calls that are split.
        self._fitted: dict[tuple[Shape, frozenset[int]], Profile] = {}

    def add(self, shape: Shape, pair: ProfilePair) -> None:
        """Add a profile; one of the same shape is replaced."""
        self.changes += 1
        self.pairs.pop(shape, None)  # the new one is the last
        self.pairs[shape] = pair
        self._mix(self.pairs.values())

    def forget(self, shape: Shape) -> None:
        """Remove a learned shape."""
        self.changes += 1
        del self.pairs[shape]
        self._mix(self.pairs.values())

    @property
    def shapes(self) -> list[Shape]:
        """The learned shapes."""
        return list(self.pairs)

    def alone(self, shape: Shape) -> Family:
        """Return a family of one learned shape, which knows all that was measured."""
        found = Family(self.form)
        found.add(shape, self.pairs[shape])
        found.measured, found.has_told_calls = self.measured, self.has_told_calls
        return found

    def offer(self, selections: Selections, cost: Cost) -> ProfilePair:
        """Let units hold the outputs of some operators, at every shape; until another shape is learned.

        Returns:
            The profile at the largest shape with these options.
        """
        found = options_with([pair.blocks for pair in self.pairs.values()], selections, cost)
        pairs = zip(self.pairs.values(), found, strict=True)
        self._mix([replace(own, blocks=replace(own.blocks, options=options)) for own, options in pairs])
        return self.largest

    def _mix(self, pairs: Collection[ProfilePair]) -> None:
        if any(own.leaves is None for own in pairs):
            pairs = [replace(own, leaves=None) for own in pairs]
        self._mixable = [align(own) for own in pairs]
        self._figures.clear()
        self._fitted.clear()
        self._cuts = None

    @property
    def state(self) -> tuple[int, float]:
        """The state that plans depend on: they are made anew when it changes."""
        return self.changes, self.over_share

    def knows(self, shape: Shape) -> bool:
        """Return whether a shape was learned."""
        return shape in self.pairs

    def takes(self, names: list[str]) -> bool:
        """Return whether these are the called modules, in order; True if the family cannot tell."""
        return not self.has_told_calls or names == [call.name for call in self.largest.blocks.units.trace.calls]

    @property
    def is_sized_by_values(self) -> bool:
        """Whether batches of one shape may need different bytes: sizes in the model depend on values."""
        return any(own.blocks.units.trace.operators.is_sized_by_values for own in self.pairs.values())

    @property
    def largest(self) -> ProfilePair:
        """The profile at the largest shape, prepared for mixing."""
        return max(zip(self.pairs, self._mixable, strict=True), key=lambda one: math.prod(one[0]))[1]

    def cover(self, shape: Shape, *, exact: bool = False) -> Cover | None:
        """Return how figures at a shape follow from the learned ones; None if they do not, or the shape is too far."""
        found = cover(self.shapes, shape, exact=exact)
        return found if found is not None and self.beyond(shape) <= _REACH_OCTAVES else None

    def beyond(self, shape: Shape) -> float:
        """Return by how many octaves a shape is beyond all shapes seen, in the worst dimension."""
        seen = np.array([*self.pairs, *self.measured]).max(axis=0)
        return max((math.log2(max(a, 1) / max(b, 1)) for a, b in zip(shape, seen.tolist(), strict=True)), default=0.0)

    def is_near_measured(self, shape: Shape) -> bool:
        """Return whether the bytes of a step of about this shape were measured."""
        return any(apart(shape, one) <= _NEAR_OCTAVES for one in self.measured)

    def profile(self, found: Cover, split: frozenset[int] = frozenset()) -> Profile:
        """Return the profile at a shape, with the units of some calls split."""
        key = found.shape, split
        if key not in self._fitted:
            if len(self._fitted) >= _MOST_FITTED:
                self._fitted.clear()
            self._fitted[key] = self._profile(found, split)
        return self._fitted[key]

    def _profile(self, found: Cover, split: frozenset[int]) -> Profile:
        if split not in self._figures:
            profiles = [mix(pair, split) for pair in self._mixable]
            self._figures[split] = profiles, np.array([figures_of(one) for one in profiles])
        profiles, figures = self._figures[split]
        return with_figures(profiles[self._nearest_to(found)], found.weights @ figures[list(found.points)])

    def profile_in_parts(self, found: Cover) -> Profile:
        """Return the profile at a shape whose units may be recomputed in parts: cut as at the largest learned one."""
        if self._cuts is None:
            order = sorted(self.pairs, key=lambda shape: -math.prod(shape))
            by_shape = dict(zip(order, cut_options([self.pairs[shape].blocks for shape in order]), strict=True))
            options = [by_shape[shape] for shape in self.pairs]
            self._cuts = options, np.array([figures_of_options(one) for one in options])
        options, figures = self._cuts
        nearest, profile = self._nearest_to(found), self.profile(found)
        old, now = (one.units.trace.flops for one in (self.pairs[self.shapes[nearest]].blocks, profile))
        own = found.weights @ figures[list(found.points)]
        return with_cuts(profile, with_option_figures(options[nearest], own, now / old if old else 1.0))

    def _nearest_to(self, found: Cover) -> int:
        """Return the place of the nearest learned shape."""
        shapes = self.shapes
        return min(found.points, key=lambda point: apart(shapes[point], found.shape))

    def fixed_bytes(self, found: Cover) -> int:
        """Return the live bytes before a step of a shape: the most that was found, with the inputs at this shape."""
        most = 0
        for own in (pair.blocks for pair in self.pairs.values()):
            state = 0 if own.optimizer is None else own.optimizer.state_bytes
            most = max(most, own.before.total_bytes - own.before.input_bytes + state)
        return most + self.profile(found).before.input_bytes

    @property
    def optimizer_peak_bytes(self) -> int:
        """The peak of `optimizer.step()`; 0 without an optimizer."""
        own = self.largest.blocks
        return 0 if own.optimizer is None else own.before.total_bytes + own.optimizer.peak_bytes

    def spare_bytes(self, found: Cover, rise_bytes: int) -> int:
        """Return how many bytes a step at a shape may need beyond its predicted rise."""
        share = self.over_share + _BEYOND_SHARE * max(0.0, self.beyond(found.shape))
        return found.noise_bytes + math.ceil(share * rise_bytes)


class Families:
    """The families of batches that look alike: equal numbers of tensors and dimensions, and equal types."""

    def __init__(self) -> None:
        self.families: list[Family] = []

    def learn(self, shape: Shape, pair: ProfilePair) -> None:
        """Add a profile to the family that it belongs to."""
        form = form_of(pair)
        for one in self.families:
            if one.knows(shape) and not one.form.fits(form):  # the model has changed since
                one.forget(shape)
        self.families = [one for one in self.families if one.pairs]
        family = next((one for one in self.families if one.form.fits(form)), None)
        if family is None:
            if len(self.families) == _MOST_FAMILIES:
                raise StepError(
                    f"the step has taken {_MOST_FAMILIES + 1} different ways through the model, so those of other "
                    "shapes cannot be foreseen. Are calls left out at random (layer drop)? Then plan once, for a batch "
                    "of the largest shape and with all calls: `torchremat.plan`."
                )
            family = Family(form)
            self.families.append(family)
        family.add(shape, pair)

    def find(self, shape: Shape) -> tuple[Family, Cover] | None:
        """Return the family of a shape, and how its figures follow; None if the shape must be learned."""
        seen = [(one, family) for family in self.families for one in (*family.pairs, *family.measured)]
        below = _nearest(shape, ((one, family) for one, family in seen if _fits_into(one, shape)))
        above = _nearest(shape, ((one, family) for one, family in seen if _fits_into(shape, one)))
        if below is not None and above is not None and below is not above:
            return None
        family = _nearest(shape, seen)
        found = None if family is None else family.cover(shape)
        return None if family is None or found is None else (family, found)


def apart(one: Shape, other: Shape) -> float:
    """Return the distance of two shapes, in octaves of the dimension that differs most."""
    pairs = zip(one, other, strict=True)
    return max((abs(math.log2(max(a, 1) / max(b, 1))) for a, b in pairs), default=0.0)


def _fits_into(one: Shape, other: Shape) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def _nearest(shape: Shape, seen: Iterable[tuple[Shape, Family]]) -> Family | None:
    return min(seen, key=lambda one: apart(shape, one[0]), default=(None, None))[1]
