"""How far a plan can be from the best possible: two lower bounds, and their assumptions in words.

The bound over nested regions is of a chain that needs no more than the profile does, as `chains` makes one for plans:

    what                                        chains              here
    a storage that several units hold           counts for each     for the first that could hold it
    an input of which a part is saved           counts as a whole   does not count
    bytes outside the plan, negative ones too   cut off at 0        the slack is added to the limit
    code between two units                      as in the profile   takes nothing
    a unit of which backward needs nothing      may cost            costs nothing

For nested regions it assumes the same as the solver's chain: they hold their input until their own backward is over. In
fact they free it a little earlier, so the lowest nested trees may need a little less than this chain.

The bound over all schedules has the least overhead of the executor in it: in any schedule, an operator runs again in a
region, of one call or of many, and

    saved    each tensor that is saved in a region takes a while to put away, in the forward and in the recompute
    begun    where an operator runs again and the one before it does not, a region begins, or a policy is active that
             saw the one before, in the forward and in the recompute, and the saves there take longer

The number of regions depends on the schedule, so their other overhead is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from torchremat.measuring.step_record import StepRecord
from torchremat.planning.bounds.plain_step import TAKES_GRADIENTS, PlainStep, Unseen
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.searches.chains import Cost, chain_of
from torchremat.planning.simulator.points import ProgramPoint
from torchremat.planning.simulator.prediction import Prediction
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping
from torchremat.schedules.bounds import Regions, lower_bound
from torchremat.schedules.chain import Chain, Stage, Tree, kept
from torchremat.schedules.dataflow import Dataflow
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.persistent import least_cost


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A chain, and by how many bytes it may exceed a limit for every tree that is within the limit."""

    chain: Chain
    slack_bytes: int


def underestimate(profile: Profile, cost: Cost) -> Relaxation | None:
    """Return the chain; None if backward visits the units in an order other than the reverse of forward's."""
    order = list(profile.order)
    if order != sorted(order, reverse=True):
        return None
    chain, counted = chain_of(profile, cost), set[int]()
    slack = max(0, -min(profile.extra_bytes.values(), default=0))
    stages = [_stage(profile, unit, cost, stage, counted, slack) for unit, stage in enumerate(chain.stages)]
    if any(
        not size.has_backward or not unit.inputs for unit, size in zip(profile.units.units, profile.sizes, strict=True)
    ):
        # A recompute may end before such units, and then with the last save of one before.
        stages = [replace(stage, forward=min(stage.forward, stage.truncated)) for stage in stages]
    return Relaxation(chain=replace(chain, stages=tuple(stages)), slack_bytes=slack)


def _stage(profile: Profile, unit: int, cost: Cost, stage: Stage, counted: set[int], slack: int) -> Stage:
    own, size, trace = profile.units.units[unit], profile.sizes[unit], profile.units.trace
    links, costs = dict(own.links), profile.costs[unit]

    def take(storages: set[int]) -> set[int]:
        """Count storages not counted yet; storages that live to the end under any plan never count."""
        found = {storage for storage in storages if storage in trace.died} - counted
        counted.update(found)
        return found

    inputs = take(set(own.inputs))
    linked = {storage for storage in inputs if links.get(storage) == unit - 1}
    external = inputs - linked
    saved = take({*size.saved, *size.left} - set(own.inputs))

    def bytes_of(storages: set[int]) -> int:
        return sum(trace.storage_bytes[storage] for storage in storages)

    def outside(point: ProgramPoint) -> int:
        return profile.extra_bytes.get((point, unit), -slack) + slack

    during = outside(ProgramPoint.BACKWARD)
    base = min(during, outside(ProgramPoint.RECOMPUTE))
    option = replace(
        stage.options[0],
        saved_bytes=size.inside_bytes + bytes_of(saved),
        saves_input=bool(linked) and linked <= size.saved,
        saves_external=bool(external) and external <= size.saved,
        backward_peak_bytes=during - base + max(0, profile.after_bytes.get((ProgramPoint.BACKWARD, unit), 0)),
    )
    full, truncated = (
        (costs.seconds, costs.seconds_truncated) if cost == "seconds" else (costs.flops, costs.flops_truncated)
    )
    return replace(
        stage,
        forward=full if size.has_backward else 0.0,
        truncated=truncated if size.has_backward else 0.0,
        linked_bytes=bytes_of(linked),
        external_bytes=bytes_of(external),
        output_bytes=0,
        options=(option,),
        forward_base_bytes=outside(ProgramPoint.FORWARD),
        backward_base_bytes=base,
    )


def regions_of(profile: Profile, flow: Dataflow) -> Regions | None:
    """Return the overhead of regions in seconds; None if the operators of a plain step differ from the profile's."""
    trace, overheads = profile.units.trace.operators, profile.overheads
    if [run.name for run in trace.runs] != [operator.name for operator in flow.operators]:
        return None
    saves = certain_saves(trace)
    passed_s = overheads.collected_s + overheads.replayed_s
    return Regions(
        saved_cost=tuple(count * overheads.saved_s for count in saves),
        begun_cost=tuple(min(overheads.region_s, passed_s + count * overheads.chosen_s) for count in saves),
    )


def certain_saves(trace: StepRecord) -> list[int]:
    """Return, for each operator, how many tensors a recompute that runs it saves for certain.

    A recompute ends with a save. So of the tensors saved between two operators, the first one's results count there,
    and the rest where the second reads them.
    """
    found = [0] * len(trace.runs)
    for save in trace.saves:
        before = save.position - 1
        if before >= 0 and save.value in trace.runs[before].makes:
            found[before] += 1
        elif save.position < len(trace.runs) and save.value in trace.runs[save.position].reads:
            found[save.position] += 1
    return found


# --------------------------------------------------------------------------------------------------------- certificates

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
_NO_PROOF = "the step runs other operators than a plain step as observed: the plan costs less than the bound on it"
_NO_BOUND = "the plain step as observed does not fit the budget, though the plan does"
_NO_MEASURE = (
    "the measured seconds contradict each other: by those of single operators no schedule recomputes for less than "
    "{:.2f} ms, and by those of calls the plan does, for {:.2f} ms"
)
_STORED = "tensors wait in stores, and the bounds are of schedules that recompute all that they do not hold"
_NO_CHAIN = "nested regions: the calls of this step make no chain"
_NO_TREE = "nested regions: none over whole calls fits the budget, by the bytes of the solver's chain"

# By so little a bound may be above the plan's cost: both are sums of the same numbers. One that is above it by more is
# no bound, and to cut it off there would say that the plan is the best possible.
_ROUNDING = 1e-6


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


# What a certificate is computed from, without the model.
Claim: TypeAlias = Callable[[], Certificate]


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
    """Return the function that computes the certificate of a tree, which takes about a second; it can be pickled.

    `limit_bytes` is the budget minus the bytes live before a step.
    """
    cost = prediction.seconds + prediction.moving_s if unit == "seconds" else float(prediction.flops)
    flops = profile.step_flops if isinstance(step, Unseen) else step.flops
    nested = None if profile.runs is not None else underestimate(profile, unit)
    if nested is not None and not any(keep.option for keep in kept(tree)):
        # For most models it needs no more than the profile; if this tree shows otherwise, the bound is dropped.
        outcome = interpret(nested.chain, tree)
        if outcome.peak_bytes > prediction.peak_bytes + nested.slack_bytes or outcome.cost > cost * (1 + 1e-6):
            nested = None
    return partial(
        _certificate,
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


def _certificate(
    *,
    unit: Cost,
    cost: float,
    step_cost: float,
    limit_bytes: int,
    step: PlainStep | Unseen,
    nested: Relaxation | None,
    regions: Regions | None,
    stores: bool,
    stepping: Stepping,
) -> Certificate:
    """Compute the bounds; `nested` is None if the calls make no chain, `regions` if their overhead does not count."""
    missing, assumptions = list[str](), list[str]()
    start_s = time.perf_counter()
    everything, persistent = None, None
    if not cost:
        everything = persistent = 0.0
    elif stores:
        missing.append(_STORED)
    else:
        if isinstance(step, Unseen):
            missing.append(step.reason)
        elif math.isinf(bound := lower_bound(step.flow, step.pulls, limit_bytes, regions=regions)):
            missing.append(_NO_BOUND)
        elif bound > cost * (1 + _ROUNDING):
            missing.append(_NO_MEASURE.format(1e3 * bound, 1e3 * cost) if unit == "seconds" else _NO_PROOF)
        else:
            everything = min(bound, cost)
        if nested is None:
            missing += [_NO_CHAIN] if TAKES_GRADIENTS not in missing else []
        elif math.isinf(bound := least_cost(nested.chain, limit_bytes + nested.slack_bytes)):
            missing.append(_NO_TREE)
        else:
            persistent = bound
    if everything is not None:
        assumptions += _ALL if regions is None else (*_ALL, _EXECUTED)
    if persistent is not None:
        assumptions.append(_PERSISTENT)
    if stepping != PLAIN_STEPPING:
        assumptions.append(_STEPPING.format(stepping))
    return Certificate(
        unit=unit,
        cost=cost,
        step_cost=step_cost,
        bound_all=everything,
        bound_persistent=None if persistent is None else min(persistent, cost),
        seconds=time.perf_counter() - start_s,
        assumptions=tuple(assumptions),
        missing=tuple(missing),
    )
