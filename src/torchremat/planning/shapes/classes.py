"""Classes of shapes, each with a tree ready to be put on the model; and everything learned to make them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from torchremat.planning.layout import Calls, HeldOperators, calls_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.results.descriptions import held_of
from torchremat.planning.searches.trials import Ladder, ladder_of
from torchremat.planning.shapes.batches import Look
from torchremat.planning.shapes.choosers import Chooser
from torchremat.planning.shapes.families import Families, Family
from torchremat.planning.shapes.fits import Cover, Shape
from torchremat.planning.simulator.prediction import Prediction, predict
from torchremat.schedules.chain import RegionNode, Tree

# Kinds of batches that are remembered, with their profiles; beyond that, the least recently seen are dropped.
_MOST_KINDS = 32


@dataclass(frozen=True, kw_only=True)
class PlannedShape:
    """The plan for one class of shapes; bytes are absolute.

    Attributes:
        shape: The largest shape of the class.
        steps: Number of steps that ran under it.
        peak_bytes: Predicted peak at that shape.
        measured_bytes: The highest measured peak; None if none of its steps was measured.
        slowdown: Predicted seconds of a step over a plain step's.
        recomputed_flops: Flops that recomputes add.
        recomputed_calls: Number of unit forwards that recomputes run; some, like those of norms, have no flops.
    """

    shape: Shape
    steps: int
    peak_bytes: int
    measured_bytes: int | None
    slowdown: float
    recomputed_flops: int
    recomputed_calls: int


@dataclass(frozen=True, kw_only=True)
class ForeseenBytes:
    """What is predicted for a step of one shape.

    Attributes:
        fixed_bytes: Live bytes before the step.
        rise_bytes: The peak over these.
        noise_bytes: Largest error of these figures.
    """

    fixed_bytes: int
    rise_bytes: int
    noise_bytes: int


@dataclass(eq=False, kw_only=True)
class ShapeClass:
    """A class of shapes.

    Attributes:
        family: The source of its figures.
        state: The state of the family when the class was planned.
        cover: How its figures follow from the family, at the largest shape of the class.
        split: Calls whose units are split.
        tree: The choice.
        calls: The keys that identify its units.
        held: The operators whose outputs units kept in part hold.
        fixed_bytes: Live bytes before a step.
        prediction: The prediction of a step, over `fixed_bytes`.
        slowdown: Predicted seconds of a step over a plain step's.
        fits: Whether the peak is within the budget; if not, the tree is the one with the lowest peak.
        steps: Number of steps that ran under it.
        measured_bytes: The highest measured peak, if any was.
    """

    family: Family
    state: tuple[int, float]
    cover: Cover
    split: frozenset[int]
    tree: Tree
    calls: Calls
    held: tuple[HeldOperators, ...]
    fixed_bytes: int
    prediction: Prediction
    slowdown: float
    fits: bool
    steps: int = 0
    measured_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """The predicted peak, absolute."""
        return self.fixed_bytes + self.prediction.peak_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes that a step may need beyond the predicted peak."""
        return self.family.spare_bytes(self.cover, self.prediction.peak_bytes)

    @property
    def has_regions(self) -> bool:
        """Whether anything is recomputed."""
        return bool(self.held) or any(isinstance(node, RegionNode) for node in self.tree)

    def profile(self, cover: Cover) -> Profile:
        """Return the profile at a shape that the tree is for."""
        if any(one.cuts for one in self.held):
            return self.family.profile_in_parts(cover)
        return self.family.profile(cover, self.split)

    def foreseen(self, shape: Shape) -> ForeseenBytes:
        """Return what its plan needs at a shape of the class. Ask before more is learned: see `Family.state`."""
        found = self.family.cover(shape, exact=True) or self.cover
        return ForeseenBytes(
            fixed_bytes=self.family.fixed_bytes(found),
            rise_bytes=predict(self.profile(found), self.tree).peak_bytes,
            noise_bytes=found.noise_bytes,
        )

    @property
    def planned(self) -> PlannedShape:
        """The class in readable form."""
        return PlannedShape(
            shape=self.cover.shape,
            steps=self.steps,
            peak_bytes=self.peak_bytes,
            measured_bytes=self.measured_bytes,
            slowdown=self.slowdown,
            recomputed_flops=self.prediction.flops,
            recomputed_calls=self.prediction.calls,
        )


@dataclass(eq=False)
class _Kind:
    """Everything learned from batches that look alike."""

    families: Families = field(default_factory=Families)
    choosers: dict[Family, Chooser] = field(default_factory=dict[Family, Chooser])
    takes_apart: bool | None = None  # asked for once, after the first profile
    families_alone: dict[Shape, tuple[int, Family]] = field(default_factory=dict[Shape, "tuple[int, Family]"])

    def alone(self, family: Family, shape: Shape) -> Family | None:
        """Return the family of a learned shape alone; None if it was not learned, or no other was."""
        if len(family.pairs) < 2 or not family.knows(shape):
            return None
        changes, found = self.families_alone.get(shape, (-1, None))
        if found is None or changes != family.changes:
            self.choosers = {one: chooser for one, chooser in self.choosers.items() if one is not found}
            found = family.alone(shape)
            self.families_alone[shape] = family.changes, found
        found.over_share = family.over_share = max(found.over_share, family.over_share)
        return found


class Classes:
    """The classes of the shapes seen so far, under one limit."""

    def __init__(self, limit_bytes: int, most: int, options: PlanOptions) -> None:
        self.limit_bytes = limit_bytes
        self._options = options
        self._most = most
        self._kinds: OrderedDict[tuple[object, ...], _Kind] = OrderedDict()
        self._classes: OrderedDict[tuple[object, ...], ShapeClass] = OrderedDict()

    def __iter__(self) -> Iterator[ShapeClass]:
        return iter(self._classes.values())

    def forget(self) -> None:
        """Drop everything learned."""
        self._kinds.clear()
        self._classes.clear()

    def learn(self, look: Look, pair: ProfilePair) -> None:
        """Record the profile of a batch."""
        self._kind(look).families.learn(look.shape, pair)

    def takes_apart(self, look: Look) -> bool:
        """Return whether a profile of a batch should show the calls inside units, which doubles its time.

        It should not if all units can be kept in part, judged by the information available before the profile.
        """
        kind = self._kind(look)
        if kind.takes_apart is None and kind.families.families:
            kind.takes_apart = any(self._chooser(kind, one).takes_apart for one in kind.families.families)
        return kind.takes_apart is not False

    def ladders(self, look: Look) -> list[Ladder]:
        """Return the trees that batches of this kind were run under, if the step takes gradients itself."""
        largest = [one.largest.blocks for one in self._kind(look).families.families]
        return [ladder_of(one) for one in largest if one.runs is not None]

    def knows(self, look: Look) -> bool:
        """Return whether a batch of this very shape was learned."""
        return any(family.knows(look.shape) for family in self._kind(look).families.families)

    def drop(self, planned: ShapeClass) -> None:
        """Forget a class."""
        self._classes = OrderedDict((key, one) for key, one in self._classes.items() if one is not planned)

    def find(self, look: Look) -> ShapeClass | None:
        """Return the class of a batch, planned now if it is new or if more was learned since; None: learn it first.

        Where the largest shape of its class does not fit, a batch is in a class of its own shape alone. If that does
        not fit either and was learned, its own profile decides all, as in `plan`, and not the largest shape learned.
        """
        kind = self._kind(look)
        found = kind.families.find(look.shape)
        if found is None:
            return None
        family, cover = found
        largest = self._class_at(look, kind, family, cover)
        exact = None if largest.fits else family.cover(look.shape, exact=True)
        if exact is None:
            return largest
        own = largest if exact.shape == cover.shape else self._class_at(look, kind, family, exact)
        alone = None if own.fits else kind.alone(family, look.shape)
        exact = None if alone is None else alone.cover(look.shape, exact=True)
        if alone is None or exact is None:
            return own
        lowest = self._class_at(look, kind, alone, exact, is_alone=True)
        needed, others = (one.peak_bytes + one.spare_bytes for one in (lowest, own))
        return lowest if lowest.fits or needed < others else own

    def _class_at(self, look: Look, kind: _Kind, family: Family, cover: Cover, *, is_alone: bool = False) -> ShapeClass:
        key = (look.kind, cover.shape, is_alone)
        known = self._classes.get(key)
        if known is None or known.family is not family or known.state != family.state:
            fresh = self._classes[key] = self._planned(self._chooser(kind, family), family, cover)
            if known is not None:
                fresh.steps, fresh.measured_bytes = known.steps, known.measured_bytes
            known = fresh
        self._classes.move_to_end(key)
        if len(self._classes) > self._most:
            self._classes.popitem(last=False)
        return known

    def _chooser(self, kind: _Kind, family: Family) -> Chooser:
        return kind.choosers.setdefault(family, Chooser(family, self._options))

    def _kind(self, look: Look) -> _Kind:
        kind = self._kinds.setdefault(look.kind, _Kind())
        self._kinds.move_to_end(look.kind)
        if len(self._kinds) > _MOST_KINDS:
            self._kinds.popitem(last=False)
        return kind

    def _planned(self, chooser: Chooser, family: Family, cover: Cover) -> ShapeClass:
        fixed_bytes = family.fixed_bytes(cover)
        found = chooser.choose(cover, self.limit_bytes - fixed_bytes)
        candidate = found.candidate
        return ShapeClass(
            family=family,
            state=family.state,
            cover=cover,
            split=found.split,
            tree=candidate.tree,
            calls=calls_of(candidate.profile.units),
            held=held_of(candidate.profile, candidate.tree),
            fixed_bytes=fixed_bytes,
            prediction=candidate.prediction,
            slowdown=candidate.slowdown,
            fits=found.fits and family.optimizer_peak_bytes <= self.limit_bytes,
        )
