"""What the steps of `Adaptive` run under, and what their measured bytes mean: one process decides, for all."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal, cast

import torch

from torchremat.errors import bug
from torchremat.measuring.profiled import profiler_is_active
from torchremat.planning.budgets import optimizer_alone
from torchremat.planning.layout import Calls, HeldOperators
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.searches.trials import Ladder
from torchremat.planning.shapes.batches import Look
from torchremat.planning.shapes.classes import Classes, ForeseenBytes, PlannedShape, ShapeClass
from torchremat.schedules.chain import Tree
from torchremat.tensors.sizes import format_bytes

Over = Literal["raise", "warn"]


@dataclass(frozen=True, kw_only=True)
class ShapeDecision:
    """What one step runs under.

    Attributes:
        tree: The choice; see `ShapeClass`.
        calls: Likewise.
        held: Likewise.
        has_regions: Likewise.
        refusal: Why no plan fits; "" if one does.
        is_first: Whether no step of its class has run.
        is_unlike: Whether no step of about this shape was measured.
        is_measured: Whether its bytes have to be measured.
    """

    tree: Tree
    calls: Calls
    held: tuple[HeldOperators, ...]
    has_regions: bool
    refusal: str
    is_first: bool
    is_unlike: bool
    is_measured: bool


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A step that has run, in one process.

    Attributes:
        peak_bytes: Its peak; None if it was not measured.
        calls: The names of the called modules; None if they were not noted.
    """

    peak_bytes: int | None
    calls: list[str] | None


@dataclass(eq=False, kw_only=True)
class Decisions:
    """All that was learned, and the decisions that follow.

    A decision is a generator: it yields whether a profile is needed to go on, or only wanted, once for each, and then
    the decision. Between the two the profile is learned.

    Attributes:
        budget: The budget, as it was given.
        budget_bytes: The same in bytes.
        limit_bytes: The part of it to use.
        over: See `Adaptive`.
        classes: The classes of shapes.
        optimizer: The optimizer, for messages.
        look: The batch of this step.
    """

    budget: str
    budget_bytes: int
    limit_bytes: int
    over: Over
    classes: Classes
    optimizer: torch.optim.Optimizer | None
    look: Look | None = None
    _chosen: ShapeClass | None = None

    @property
    def batch(self) -> Look:
        """The batch of this step."""
        return cast("Look", self.look)

    @property
    def plans(self) -> tuple[PlannedShape, ...]:
        """The plans that are kept, and fit the budget or have run nevertheless; smallest shape first."""
        shapes = [one.planned for one in self.classes if one.fits or one.steps]
        return tuple(sorted(shapes, key=lambda one: (one.peak_bytes, one.shape)))

    def tighten(self, limit_bytes: int) -> None:
        """Use no more than the process with the least may use."""
        self.limit_bytes = self.classes.limit_bytes = limit_bytes

    def takes_apart(self) -> bool:
        """See `Classes.takes_apart`."""
        return self.classes.takes_apart(self.batch)

    def ladders(self) -> list[Ladder]:
        """See `Classes.ladders`."""
        return self.classes.ladders(self.batch)

    def learn(self, pair: ProfilePair) -> None:
        """Add the profile of this step's batch."""
        self.classes.learn(self.batch, pair)

    def forget(self) -> None:
        """Drop everything learned."""
        self.classes.forget()
        self._chosen = None

    def choosing(self) -> Generator[bool | ShapeDecision]:
        """Decide what the step runs under."""
        found = self.classes.find(self.batch)
        if found is None or (not found.fits and not self.classes.knows(self.batch)):
            # A fit alone does not refuse a batch: where a step pads or buckets, its bytes may be no polynomial.
            yield found is None
            if found is not None and not found.steps:
                self.classes.drop(found)
            found = self.classes.find(self.batch)
        if found is None:
            raise bug(f"the shape {self.batch.shape} was learned and is not known")
        self._chosen = found
        is_unlike = not found.family.is_near_measured(self.batch.shape)
        yield ShapeDecision(
            tree=found.tree,
            calls=found.calls,
            held=found.held,
            has_regions=found.has_regions,
            refusal="" if found.fits else self._nothing_fits(found),
            is_first=not found.steps,
            is_unlike=is_unlike,
            is_measured=is_unlike or self.batch.hides or found.family.is_sized_by_values,
        )

    def ended(self) -> None:
        """Note that the step has run."""
        if self._chosen is not None:
            self._chosen.steps += 1

    def reviewing(self, told: list[Measured]) -> Generator[bool | str]:
        """Compare the measured step with what was foreseen; the decision says why it was above the budget, or "".

        The excess over the prediction is left free from now on.
        """
        chosen = cast("ShapeClass", self._chosen)
        measured_bytes = max((one.peak_bytes for one in told if one.peak_bytes is not None), default=None)
        # Before anything is learned: what is learned may take the place of the figures that this step was planned with.
        foreseen = None if measured_bytes is None else chosen.foreseen(self.batch.shape)
        if not all(one.calls is None or chosen.family.takes(one.calls) for one in told) and not profiler_is_active():
            # The control flow differs from that of the neighbouring shapes: the prediction does not apply.
            yield True
            chosen.family.has_told_calls = not chosen.family.knows(self.batch.shape)
        if measured_bytes is None or foreseen is None:
            yield ""
            return
        yield from self._compared(chosen, foreseen, measured_bytes)

    def _compared(self, chosen: ShapeClass, foreseen: ForeseenBytes, measured_bytes: int) -> Generator[bool | str]:
        family, look = chosen.family, self.batch
        chosen.measured_bytes = max(measured_bytes, chosen.measured_bytes or 0)
        predicted_bytes = foreseen.fixed_bytes + foreseen.rise_bytes
        over_bytes = measured_bytes - predicted_bytes - foreseen.noise_bytes
        if over_bytes > 0 and not self.classes.knows(look):
            yield True
        if family.knows(look.shape) or not self.classes.knows(look):
            if look.shape not in family.measured:
                family.measured.append(look.shape)
            family.over_share = max(family.over_share, over_bytes / max(1, foreseen.rise_bytes))
        if measured_bytes <= self.budget_bytes or not chosen.fits:
            yield ""
            return
        yield (
            f"a step of this shape ({look.words}) was measured at {format_bytes(measured_bytes)}, above the "
            f"budget of {format_bytes(self.budget_bytes)} ({self.budget}); {format_bytes(predicted_bytes)} were "
            "predicted. Its gradients are valid. The plans for all shapes leave that much more free from now on."
        )

    def _nothing_fits(self, chosen: ShapeClass) -> str:
        optimizer_peak = chosen.family.optimizer_peak_bytes
        reserved_bytes = self.budget_bytes - self.limit_bytes
        if optimizer_peak > chosen.peak_bytes + chosen.spare_bytes:
            return optimizer_alone(
                self.budget_bytes,
                self.budget,
                self.optimizer,
                peak_bytes=optimizer_peak,
                reserved_bytes=reserved_bytes,
            )
        smallest = chosen.peak_bytes + chosen.spare_bytes + reserved_bytes
        what = "was not run" if self.over == "raise" else "runs under the plan that needs least"
        return (
            f"no plan fits the budget of {format_bytes(self.budget_bytes)} ({self.budget}) for this batch "
            f"({self.batch.words}); it {what}. Smallest budget that works: {smallest} bytes "
            f"({format_bytes(smallest)}), of which {format_bytes(chosen.fixed_bytes)} are live before a step. Make the "
            "batch smaller, or split it and call this once for each part."
        )
