"""How far a plan can be from the best possible: two lower bounds, and the words for what they rest on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torchremat.planning.chains import Cost
from torchremat.planning.pulls import PlainStep
from torchremat.schedules.bounds import lower_bound
from torchremat.schedules.chain import Chain
from torchremat.schedules.persistent import least_cost

_ALL = (
    "every operator of the forward runs with the same kernels and costs as in one plain step, alone or again",
    "a tensor is held as its whole storage or not at all, and comes back by recomputing alone",
    "backward runs the operators that it runs in a plain step, in their order",
)
_PERSISTENT = "a plan is a tree of regions over the calls of this plan, and its bytes are those of the solver's chain"
_SAME_KERNELS = "the step runs compiled code, whose operators nobody sees"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """How far a plan can be from the best possible under its budget.

    Attributes:
        unit: Of the costs: what the plan minimises.
        cost: What the plan's recomputes take.
        step_cost: What a plain step takes, forward and backward.
        bound_all: What recomputing takes at least in any schedule; None if that is not known.
        bound_persistent: The same for all nested regions over the calls that the plan chooses among; None as above.
        seconds: That the bounds took.
        assumptions: What the bounds rest on, in words.
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
        """How much longer a step under the plan takes than under any schedule, at most, as a share of a plain step."""
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
    # Rounded up: "at most" has to hold for what is printed.
    return f"{math.ceil(1000 * share - 1e-6) / 10:.1f}%"


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """All that a certificate is worked out from, without the model; working it out takes a second or so.

    Attributes:
        unit: Of the costs.
        cost: Of the plan's recomputes.
        step_cost: Of a plain step.
        limit_bytes: The budget without what lies there before a step.
        step: The plain step; None if there is none, for the reason below.
        reason: Why there is no plain step.
        chain: The calls that the plan chooses among, each with no more bytes and cost than it has; None if the plan
            has choices that are none of a chain.
        slack_bytes: How much more the chain may take than the limit.
        recomputes: Whether the plan recomputes anything; if not, it is the best.
    """

    unit: Cost
    cost: float
    step_cost: float
    limit_bytes: int
    step: PlainStep | None
    reason: str
    chain: Chain | None
    slack_bytes: int

    def certificate(self, *, most_seconds: float = 4.0) -> Certificate:
        """Work the bounds out.

        Args:
            most_seconds: For the bound over all schedules; see `lower_bound`.
        """
        missing: list[str] = []
        seconds, everything, persistent = 0.0, None, None
        if not self.cost:
            everything, persistent = 0.0, 0.0
        else:
            if self.step is None:
                missing.append(self.reason)
            else:
                found = lower_bound(self.step.flow, self.step.pulls, self.limit_bytes, most_seconds=most_seconds)
                seconds, everything = found.seconds, found.cost
            if self.chain is None:
                missing.append("nested regions: backward does not come to the calls in their reversed order")
            else:
                persistent = least_cost(self.chain, self.limit_bytes + self.slack_bytes)
        return Certificate(
            unit=self.unit,
            cost=self.cost,
            step_cost=self.step_cost,
            bound_all=None if everything is None else min(everything, self.cost),
            bound_persistent=None if persistent is None else min(persistent, self.cost),
            seconds=seconds,
            assumptions=(*(_ALL if everything is not None else ()), *([_PERSISTENT] if persistent is not None else ())),
            missing=tuple(missing),
        )
