"""Makes a plan of the tree that a search has found, or the message that no plan fits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import cast

from torch import nn

from torchremat.measuring.callers import shown_line
from torchremat.planning.bounds.certificates import claim_of
from torchremat.planning.budgets import optimizer_alone, shares_that_work
from torchremat.planning.exactness.not_replayable import told
from torchremat.planning.layout import HeldOperators, calls_of
from torchremat.planning.profiled_step import ProfiledStep, Solution
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import named
from torchremat.planning.results.plan_data import Choice, Forecast, PlannedUnit, Point, Provenance
from torchremat.planning.results.plans import Plan
from torchremat.planning.searches.flows import runs_of
from torchremat.planning.simulator.offload_choices import NO_OFFLOADS, Offloads
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import Candidate, chosen_options, live_bytes, over_bytes, walk_of
from torchremat.planning.training.conditions import Conditions, InputSizes
from torchremat.regions.forwards import forward_of_class
from torchremat.schedules.chain import RegionNode, Tree, kept
from torchremat.tensors.sizes import format_bytes


def planned_unit(own: Profile, unit: int, lines: Mapping[str, str], again: frozenset[int]) -> PlannedUnit:
    """Return the entry of a unit in a plan.

    `lines` has the source line of each module by name, and the units in `again` exchange in their recompute.
    """
    found, size, trace = own.units.units[unit], own.sizes[unit], own.units.trace
    saved = (*(size.saved - set(found.inputs)), *size.left)
    return PlannedUnit(
        name=found.name,
        kind=" + ".join(trace.calls[call].kind for call in found.calls),
        saved_bytes=size.inside_bytes + sum(trace.storage_bytes[storage] for storage in saved),
        input_bytes=sum(trace.storage_bytes[storage] for storage in found.inputs),
        seconds=own.costs[unit].seconds,
        flops=own.costs[unit].flops,
        exchanges="again" if unit in again else "once" if unit in own.units.exchanging else "",
        line=lines.get(trace.calls[found.calls[0]].name, ""),
    )


def exchanging_again(own: Profile, tree: Tree) -> frozenset[int]:
    """Return the units whose recompute under a tree exchanges with other processes."""
    recomputed = {keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,))}
    options = dict(chosen_options(tree))
    return frozenset(
        unit
        for unit in own.units.exchanging
        if (own.options[unit][options[unit] - 1].exchanges if unit in options else unit in recomputed)
    )


def lines_of(model: nn.Module) -> dict[str, str]:
    """Return file and line of the code of each module's forward, by the name of the module."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(cast("Callable[..., object]", forward_of_class(module))), "__code__", None)
        if isinstance(code, CodeType):
            found[name] = shown_line(code.co_filename, code.co_firstlineno)
    return found


def held_of(own: Profile, tree: Tree) -> tuple[HeldOperators, ...]:
    """Return the held operators of the units that a tree keeps in part."""
    units: dict[tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for unit, number in chosen_options(tree):
        option = own.options[unit][number - 1]
        units.setdefault((option.operators, option.ordinals, option.cuts, option.saves), []).append(unit)
    return tuple(
        HeldOperators(units=tuple(members), operators=operators, held=ordinals, cuts=cuts, saves=saves)
        for (operators, ordinals, cuts, saves), members in units.items()
    )


def input_sizes(own: Profile) -> InputSizes:
    """Return the sizes of the inputs of the roots."""
    elements: dict[str, int] = {}
    for root in own.units.roots:
        call = own.units.trace.calls[root]
        elements[call.name] = max(elements.get(call.name, 0), call.input_elements)
    return InputSizes(elements=elements)


def conditions_by_root(own: Profile) -> dict[str, Conditions]:
    """Return the conditions that the first call of each root found."""
    calls = (own.units.trace.calls[root] for root in reversed(own.units.roots))
    return {call.name: call.conditions for call in calls if call.conditions is not None}


def curve_of(
    own: Profile, tree: Tree, fixed_bytes: int, offloads: Offloads = NO_OFFLOADS, *, lasts_s: float
) -> tuple[Point, ...]:
    """Return the predicted step under a tree: a point at the beginning of each piece, and one at its peak.

    Units are timed in watched runs, and steps in others: the seconds of each piece are a share of `lasts_s`, the
    seconds of the step in the plan.
    """
    if own.runs is not None:
        curve = own.runs.under(tree).curve
        scale = lasts_s / curve[-1][0] if curve and curve[-1][0] else 1.0
        return tuple(Point(seconds=one * scale, live_bytes=fixed_bytes + live, what=what) for one, live, what in curve)
    points: list[Point] = []
    now_s, running = 0.0, 0.0
    for state in walk_of(own, tree, offloads):
        if not isinstance(state, Live):
            continue
        live = fixed_bytes + live_bytes(own, state)
        point, unit = state.key
        over = over_bytes(own, state)
        if state.moves:
            running = 0.0
        elif state.unit >= 0:
            running = own.costs[state.unit].seconds
        elif point is ProgramPoint.BACKWARD:
            running = own.costs[unit].seconds_backward
        else:
            running = 0.0
        points.append(Point(seconds=now_s, live_bytes=live + min(0, over), what=state.what))
        points.append(Point(seconds=now_s + running / 2, live_bytes=live + over, what=state.what))
        now_s += running
    scale = lasts_s / now_s if now_s else 1.0
    return tuple(replace(point, seconds=point.seconds * scale) for point in points)


def plan_of(
    profiled: ProfiledStep,
    found: Candidate,
    size: int,
    budget: str,
    *,
    margin_bytes: int = 0,
    beside: Sequence[ProfiledStep] = (),
) -> Plan:
    """Return a candidate as a plan.

    `size` is the budget in bytes, `budget` as it was given. `beside` is the step in other ways of stepping, which
    may have a lower peak.
    """
    claim, search = None, profiled.solver
    if profiled.options.certify:
        search.search_budget.tell("certificate", None)
        claim = claim_of(
            found.profile,
            found.tree,
            found.prediction,
            unit=search.cost_unit,
            step=profiled.plain_step,
            limit_bytes=size - margin_bytes - profiled.fixed_bytes,
            stores=bool(found.offloads),
            stepping=profiled.stepping,
        )
    forecast = _forecast(profiled, found, (profiled, *beside))
    parts = _choice(profiled, found), forecast, _provenance(profiled, found, size, budget)
    return Plan(**{name: value for part in parts for name, value in vars(part).items()}, claim=claim)


def _choice(profiled: ProfiledStep, found: Candidate) -> Choice:
    own, lines = found.profile, lines_of(profiled.model)
    again = exchanging_again(own, found.tree)
    return Choice(
        tree=found.tree,
        units=tuple(planned_unit(own, unit, lines, again) for unit in range(len(own.units.units))),
        calls=calls_of(own.units),
        held=held_of(own, found.tree),
        stored=tuple(choice.planned for choice in found.offloads.values()),
        unlike=dict(own.units.unlike),
        stepping=profiled.stepping,
    )


def _forecast(profiled: ProfiledStep, found: Candidate, known: Sequence[ProfiledStep]) -> Forecast:
    own, prediction, before = found.profile, found.prediction, profiled.before
    peak_bytes, fixed_bytes = profiled.peak_of(found), profiled.fixed_bytes
    plain_peak_bytes, plain_source = profiled.known_plain()
    state_bytes = own.optimizer.state_bytes if own.optimizer is not None else 0
    plain, plain_s = profiled.plain_profile, Solution(profiled=profiled, candidate=found).plain_seconds
    lasts_s = plain_s + prediction.seconds + prediction.moving_s + profiled.added_s
    return Forecast(
        peak_bytes=peak_bytes,
        step_peak_bytes=fixed_bytes + prediction.peak_bytes,
        optimizer_peak_bytes=profiled.optimizer_peak_bytes,
        optimizer_state_bytes=state_bytes,
        before_bytes=replace(before, optimizer_bytes=before.optimizer_bytes + state_bytes).parts,
        kept_bytes=prediction.kept_bytes,
        where=prediction.where,
        plain_peak_bytes=plain_peak_bytes,
        plain_source=plain_source,
        plain_seconds=plain_s,
        recompute_seconds=prediction.seconds,
        recomputed_flops=prediction.flops,
        recomputed_calls=prediction.calls,
        flops=own.units.trace.flops,
        # A search that ran out of time may know no lower peak than that of the plan.
        floor_bytes=min(*(one.lowest_bytes for one in known), profiled.budget_for(peak_bytes)),
        curve=curve_of(own, found.tree, fixed_bytes, found.offloads, lasts_s=lasts_s),
        plain_curve=curve_of(plain.profile, plain.solver.plain.tree, plain.fixed_bytes, lasts_s=plain_s),
        moving_seconds=prediction.moving_s,
        released_bytes=profiled.released_bytes,
        waiting_bytes=profiled.waiting_bytes,
        stepping_seconds=profiled.added_s,
        away_bytes=profiled.parameters.away_bytes,
        room_bytes=profiled.parameters.room_bytes,
    )


def _provenance(profiled: ProfiledStep, found: Candidate, size: int, budget: str) -> Provenance:
    search, stores = profiled.solver, tuple(profiled.options.stores)
    steps = profiled.options.step_stores
    return Provenance(
        budget_bytes=size,
        budget=budget,
        device=profiled.device,
        cost=search.cost_unit,
        parameters=profiled.placed.parameters,
        inputs=input_sizes(found.profile),
        stores=tuple(map(repr, stores)),
        speeds=tuple(store_profile.speed for store_profile in search.store_profiles),
        optimizer_store="" if steps.state is None else repr(steps.state),
        parameter_store="" if steps.parameters is None else repr(steps.parameters),
        ran_out=search.search_budget.ran_out,
        conditions=conditions_by_root(found.profile),
        planning_seconds=profiled.placed.spent_seconds,
        planning_steps=profiled.subject.runs,
        processes=max(1, len(profiled.placed.peers.ranks)),
        ranks=profiled.placed.peers.ranks,
    )


def nothing_fits(profiled: ProfiledStep, size: int, budget: str, reserved_bytes: int) -> str:
    """Return the message for a budget that no plan fits.

    `size` is the budget in bytes, `budget` as it was given; `reserved_bytes` of it have to stay free.
    """
    floor, floor_bytes = profiled.solver.floor, profiled.lowest_bytes + reserved_bytes
    shares = shares_that_work(
        floor_bytes, plain_bytes=profiled.known_plain()[0], before_bytes=profiled.plain_fixed_bytes
    )
    reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
    optimizer_peak = profiled.optimizer_peak_bytes or 0
    if optimizer_peak > profiled.fixed_bytes + floor.prediction.peak_bytes:
        return optimizer_alone(
            size, budget, profiled.subject.optimizer, peak_bytes=optimizer_peak, reserved_bytes=reserved_bytes
        )
    lowers = "a smaller batch lowers the rest."
    if (whole := compiled_whole(floor.profile)) is not None:
        lowers = (
            f"the rest is mostly in {named(whole)}, compiled as one piece, which can only be kept or recomputed as a "
            "whole. Compile its blocks instead (`block.compile()` for each of them), and a plan can choose among "
            "these; or give the budget to the compiler, with `torchremat.compiled`."
        )
    return (
        f"no plan fits the budget of {format_bytes(size)} ({budget}){reserved}. Smallest budget that works: "
        f"{floor_bytes} bytes ({format_bytes(floor_bytes)}), at {floor.slowdown:.2f} x the plain time. "
        f"{format_bytes(profiled.fixed_bytes)} of it are live before a step; {lowers} {_what_holds(floor)}"
        + (f" {shares}" if shares else "")
        + (f" And {told(unlike)}" if (unlike := floor.profile.units.unlike) else "")
    )


def _what_holds(floor: Candidate) -> str:
    """Return what the peak of a candidate consists of, in addition to what is live before a step, as a sentence."""
    own, walk = floor.profile, walk_of(floor.profile, floor.tree, floor.offloads)
    parts, peak_bytes = dict[str, int](), own.start_bytes
    for state in walk if own.runs is None else ():
        if not isinstance(state, Live):
            continue
        live, over = live_bytes(own, state), over_bytes(own, state)
        if live + over <= peak_bytes:
            continue
        peak_bytes = live + over
        outputs = {*walk.live.held, *walk.live.alive}.intersection(own.lifetimes.end)
        outputs_bytes = sum(map(own.units.trace.storage_bytes.__getitem__, outputs))
        is_early = state.key[0] in (ProgramPoint.FORWARD, ProgramPoint.LEFT, ProgramPoint.END)
        parts = {
            "of outputs that the step's own code holds": outputs_bytes,
            "that modules keep for backward": state.held_bytes - outputs_bytes,
            f"of {'' if is_early else 'gradients and '}what the step's own code holds, which no plan lowers": (
                live - state.held_bytes
            ),
            "needed on top meanwhile": over,
        }
    told = [f"{format_bytes(size)} {words}" for words, size in parts.items() if 20 * size >= peak_bytes]
    return f"Its peak is in {floor.prediction.where}{': ' if told else ''}{'; '.join(told)}."


def compiled_whole(profile: Profile) -> str | None:
    """Return the name of the compiled unit that saves more than all others together; None if none does."""
    inside_bytes = [size.inside_bytes for size in profile.sizes]
    largest = inside_bytes.index(max(inside_bytes))
    is_most = 2 * inside_bytes[largest] > sum(inside_bytes)
    is_compiled = any(run.is_compiled for run in runs_of(profile, largest))
    return profile.units.units[largest].name if is_most and is_compiled else None
