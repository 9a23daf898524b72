"""How far a plan can be from the best possible: two lower bounds, and their assumptions in words."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from torchremat.planning.bounds.plain_step import PlainStep, Unseen
from torchremat.planning.bounds.relaxation import Relaxation, regions_of, underestimate
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost
from torchremat.planning.simulator.prediction import Prediction
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping
from torchremat.schedules.bounds import Regions, lower_bound
from torchremat.schedules.chain import Tree, kept
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.persistent import least_cost

_ALL = (
    "every operator of the forward runs with the same kernels and costs as in one plain step, alone or again",
    "a tensor is held as its whole storage or not at all, and comes back by recomputing alone",
    "backward runs the operators that it runs in a plain step, in their order",
)
_EXECUTED = (
    "what runs again does so in regions, and these take what was measured of them: for each tensor that is saved, and "
    "where they begin or pass over an operator"
)
_PERSISTENT = (
    "nested regions span whole calls of those that the plan is over, recompute each of these at once, neither in part "
    "nor in parts, and take the bytes of the solver's chain"
)
_STEPPING = "the optimizer steps as under the plan ({}), and what that adds to a step is not counted"
_NO_BOUND = "the plain step as observed does not fit the budget, though the plan does"
_STORED = "tensors wait in stores, and the bounds are of schedules that recompute all that they do not hold"
_NO_CHAIN = "nested regions: the calls of this step make no chain"
_NO_TREE = "nested regions: none over whole calls fits the budget, by the bytes of the solver's chain"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How far a plan can be from the best possible under its budget.

    A plan that recomputes nothing, and whose copies to stores cost nothing, is optimal. Other plans with stores have no
    bounds, since the bounds cover schedules that recompute every value that is not held.

    Attributes:
        unit: The unit of the costs: the quantity that the plan minimises.
        cost: Cost of the plan's recomputes, and of the copies to and from stores, if it minimises seconds.
        step_cost: Cost of a plain step, forward and backward.
        bound_all: Lower bound on the recompute cost of any schedule; None if unknown.
        bound_persistent: The same for all nested regions over the calls that the plan chooses among; None if unknown,
            or if none of them fits the budget. A plan that keeps or recomputes calls in parts may cost less: then it is
            the cost of the plan.
        seconds: Time to compute the bounds.
        assumptions: The assumptions of the bounds, in words.
        missing: Why a bound is None, in words.
    """

    unit: Cost
    cost: float
    step_cost: float
    bound_all: float | None
    bound_persistent: float | None
    seconds: float
    assumptions: tuple[str, ...]
    missing: tuple[str, ...] = ()

    @property
    def gap(self) -> float | None:
        """Upper bound on the plan's excess time over any schedule, as a share of a plain step."""
        return self._share(self.bound_all)

    @property
    def gap_persistent(self) -> float | None:
        """The same against nested regions alone."""
        return self._share(self.bound_persistent)

    def _share(self, bound: float | None) -> float | None:
        if bound is None:
            return None
        return (self.cost - bound) / self.step_cost if self.step_cost else 0.0

    @property
    def claim(self) -> str:
        """The certificate in one line."""
        words: list[str] = []
        if self.gap is not None:
            words.append(f"at most {_percent(self.gap)} of a step above the best of all schedules")
        if self.gap_persistent is not None:
            words.append(f"at most {_percent(self.gap_persistent)} above the best of nested regions")
        found = ", ".join(words) or "not known: " + "; ".join(self.missing)
        return f"{found}, in {self.unit}" if words else found

    def __str__(self) -> str:
        lines = [self.claim, "", f"plan        {self._costs(self.cost)}"]
        lines.append(f"all         {self._costs(self.bound_all)}")
        lines.append(f"persistent  {self._costs(self.bound_persistent)}")
        lines += ["", *(f"if {one}" for one in self.assumptions)]
        lines += [f"missing: {one}" for one in self.missing]
        return "\n".join(lines)

    def _costs(self, cost: float | None) -> str:
        if cost is None:
            return "not known"
        share = _percent(cost / self.step_cost if self.step_cost else 0.0)
        amount = f"{cost / 1e9:.3f} GFLOP" if self.unit == "flops" else f"{1e3 * cost:.2f} ms"
        return f"{amount} recomputed, {share} of a step"


def _percent(share: float) -> str:
    # Rounded up: "at most" must hold for the printed number.
    return f"{math.ceil(1000 * share - 1e-6) / 10:.1f}%"


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """The data of a certificate, without the model; computing the certificate takes about a second.

    Attributes:
        unit: The unit of the costs.
        cost: Cost of the plan's recomputes.
        step_cost: Cost of a plain step.
        limit_bytes: The budget minus the bytes live before a step.
        step: The plain step.
        regions: The overhead of regions; None if it does not count.
        nested: The calls that the plan chooses among; None if they make no chain.
        stores: Whether tensors wait in stores.
        stepping: How the optimizer steps, in the plan and in all schedules that the bounds are of.
    """

    unit: Cost
    cost: float
    step_cost: float
    limit_bytes: int
    step: PlainStep | Unseen
    nested: Relaxation | None
    regions: Regions | None = None
    stores: bool = False
    stepping: Stepping = PLAIN_STEPPING

    def certificate(self) -> Certificate:
        """Compute the bounds."""
        missing: list[str] = []
        start_s = time.perf_counter()
        everything, persistent = None, None
        if not self.cost:
            everything = persistent = 0.0
        elif self.stores:
            missing.append(_STORED)
        else:
            if isinstance(self.step, Unseen):
                missing.append(self.step.reason)
            else:
                everything = lower_bound(self.step.flow, self.step.pulls, self.limit_bytes, regions=self.regions).cost
                if math.isinf(everything):
                    everything = None
                    missing.append(_NO_BOUND)
            if self.nested is None:
                missing.append(_NO_CHAIN)
            else:
                persistent = least_cost(self.nested.chain, self.limit_bytes + self.nested.slack_bytes)
                if math.isinf(persistent):
                    persistent = None
                    missing.append(_NO_TREE)
        return Certificate(
            unit=self.unit,
            cost=self.cost,
            step_cost=self.step_cost,
            # Recomputes that stop early were measured separately from operators, so a bound may exceed the plan.
            bound_all=None if everything is None else min(everything, self.cost),
            bound_persistent=None if persistent is None else min(persistent, self.cost),
            seconds=time.perf_counter() - start_s,
            assumptions=tuple(self._assumptions(everything, persistent)),
            missing=tuple(missing),
        )

    def _assumptions(self, everything: float | None, persistent: float | None) -> Iterator[str]:
        if everything is not None:
            yield from _ALL
            if self.regions is not None:
                yield _EXECUTED
        if persistent is not None:
            yield _PERSISTENT
        if self.stepping != PLAIN_STEPPING:
            yield _STEPPING.format(self.stepping)


def claim_of(
    profile: Profile,
    tree: Tree,
    prediction: Prediction,
    *,
    unit: Cost,
    step: PlainStep | Unseen,
    limit_bytes: int,
    stores: bool = False,
    stepping: Stepping = PLAIN_STEPPING,
) -> Claim:
    """Return the data for the certificate of a tree."""
    cost = prediction.seconds + prediction.moving_s if unit == "seconds" else float(prediction.flops)
    flops = 3 * profile.units.trace.flops if isinstance(step, Unseen) else step.flops
    nested = underestimate(profile, unit)
    if nested is not None and not any(keep.option for keep in kept(tree)):
        # For most models it needs no more than the profile; if this tree shows otherwise, the bound is dropped.
        found = interpret(nested.chain, tree)
        if found.peak_bytes > prediction.peak_bytes + nested.slack_bytes or found.cost > cost * (1 + 1e-6):
            nested = None
    return Claim(
        unit=unit,
        cost=cost,
        step_cost=profile.seconds if unit == "seconds" else float(flops),
        limit_bytes=limit_bytes,
        step=step,
        nested=nested,
        regions=regions_of(profile, step.flow) if unit == "seconds" and isinstance(step, PlainStep) else None,
        stores=stores,
        stepping=stepping,
    )
