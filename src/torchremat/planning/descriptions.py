"""The reports of planners: plans, with units, held operators, inputs and the predicted step; and that nothing fits."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from types import CodeType
from typing import TYPE_CHECKING

from torch import nn

from torchremat.measuring.callers import shown_line
from torchremat.planning.bounds.certificates import claim_of
from torchremat.planning.budgets import shares_that_work
from torchremat.planning.conditions import Conditions
from torchremat.planning.inputs import InputSizes
from torchremat.planning.layout import HeldOperators, calls_of
from torchremat.planning.plans import PlainSource, Plan, PlannedUnit, Point, claimed
from torchremat.planning.profiles.not_replayable import told
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import named
from torchremat.planning.searches.candidates import Candidate
from torchremat.planning.searches.flows import operators_of
from torchremat.planning.simulator.offload_choices import NO_OFFLOADS, Offloads
from torchremat.planning.simulator.points import Live, ProgramPoint
from torchremat.planning.simulator.prediction import chosen_options, live_bytes, over_bytes, walk_of
from torchremat.schedules.chain import Tree
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import format_bytes

if TYPE_CHECKING:
    from torchremat.planning.planner import Planner


def planned_unit(own: Profile, unit: int, lines: Mapping[str, str]) -> PlannedUnit:
    """Return the entry of a unit in a plan; `lines` has the source line of each module by name."""
    found, size, trace = own.units.units[unit], own.sizes[unit], own.units.trace
    saved = (*(size.saved - set(found.inputs)), *size.left)
    return PlannedUnit(
        name=found.name,
        kind=" + ".join(trace.calls[call].kind for call in found.calls),
        saved_bytes=size.inside_bytes + sum(trace.storage_bytes[storage] for storage in saved),
        input_bytes=sum(trace.storage_bytes[storage] for storage in found.inputs),
        seconds=own.costs[unit].seconds,
        flops=own.costs[unit].flops,
        line=lines.get(trace.calls[found.calls[0]].name, ""),
    )


def lines_of(model: nn.Module) -> dict[str, str]:
    """Return file and line of the code of each module's forward, by the name of the module."""
    found: dict[str, str] = {}
    for name, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if isinstance(code, CodeType):
            found[name] = shown_line(code.co_filename, code.co_firstlineno)
    return found


def held_of(own: Profile, tree: Tree) -> tuple[HeldOperators, ...]:
    """Return the held operators of the units that a tree keeps in part."""
    units: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for unit, number in chosen_options(tree):
        option = own.options[unit][number - 1]
        units.setdefault((option.operators, option.ordinals), []).append(unit)
    return tuple(
        HeldOperators(units=tuple(members), operators=operators, held=ordinals)
        for (operators, ordinals), members in units.items()
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


def made_plan(
    planner: Planner,
    found: Candidate,
    size: int,
    budget: str,
    *,
    plain: tuple[int, PlainSource],
    margin_bytes: int,
    parameters: dict[str, tuple[int, ...]],
    lines: Mapping[str, str],
    stores: tuple[Store, ...],
) -> Plan:
    """Return a candidate as a plan.

    Args:
        planner: The planner that found it.
        found: The candidate.
        size: The budget in bytes.
        budget: The budget as it was given.
        plain: The peak of a plain step, and its source.
        margin_bytes: Bytes of the budget that have to stay free.
        parameters: Shapes of the model's parameters, by name.
        lines: Source lines of the model's modules, by name.
        stores: The given stores.
    """
    own, before, step = found.profile, planner.profile.before, planner.plain_step
    state = own.optimizer.state_bytes if own.optimizer is not None else 0
    lasts_s = own.seconds + found.prediction.seconds + found.prediction.moving_s
    made = Plan(
        budget_bytes=size,
        budget=budget,
        device=planner.device,
        cost=planner.solver.cost_unit,
        tree=found.tree,
        held=held_of(own, found.tree),
        units=tuple(planned_unit(own, unit, lines) for unit in range(len(own.units.units))),
        calls=calls_of(own.units),
        peak_bytes=planner.peak_of(found),
        step_peak_bytes=planner.fixed_bytes + found.prediction.peak_bytes,
        optimizer_peak_bytes=planner.optimizer_peak_bytes,
        optimizer_state_bytes=state,
        before_bytes=replace(before, optimizer_bytes=before.optimizer_bytes + state).parts,
        kept_bytes=found.prediction.kept_bytes,
        where=found.prediction.where,
        plain_peak_bytes=plain[0],
        plain_source=plain[1],
        plain_seconds=own.seconds,
        recompute_seconds=found.prediction.seconds,
        recomputed_flops=found.prediction.flops,
        recomputed_calls=found.prediction.calls,
        flops=own.units.trace.flops,
        # A search that ran out of time may know no lower peak than that of the plan.
        floor_bytes=min(planner.floor_bytes, planner.budget_for(planner.peak_of(found))),
        parameters=parameters,
        inputs=input_sizes(own),
        conditions=conditions_by_root(own),
        curve=curve_of(own, found.tree, planner.fixed_bytes, found.offloads, lasts_s=lasts_s),
        plain_curve=curve_of(planner.profile, planner.solver.plain.tree, planner.fixed_bytes, lasts_s=own.seconds),
        moving_seconds=found.prediction.moving_s,
        stored=tuple(choice.planned for choice in found.offloads.values()),
        stores=tuple(map(repr, stores)),
        speeds=tuple(store_profile.speed for store_profile in planner.solver.store_profiles),
        given_stores=stores,
        ran_out=planner.solver.search_budget.ran_out,
        unlike=dict(own.units.unlike),
        planning_seconds=planner.spent_seconds,
        planning_steps=planner.subject.runs,
    )
    claim = claim_of(
        own,
        found.tree,
        found.prediction,
        unit=planner.solver.cost_unit,
        step=step,
        limit_bytes=size - margin_bytes - planner.fixed_bytes,
        stores=bool(found.offloads),
    )
    return claimed(made, claim)


def nothing_fits(planner: Planner, size: int, budget: str, reserved_bytes: int, *, plain_bytes: int) -> str:
    """Return the message for a budget that no plan fits.

    Args:
        planner: The planner that was asked.
        size: The budget in bytes.
        budget: The budget as it was given.
        plain_bytes: The peak of a plain step, the base of shares.
        reserved_bytes: Bytes of the budget that have to stay free.
    """
    floor, floor_bytes = planner.solver.floor, planner.floor_bytes + reserved_bytes
    shares = shares_that_work(floor_bytes, plain_bytes=plain_bytes, before_bytes=planner.fixed_bytes)
    reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
    optimizer_peak = planner.optimizer_peak_bytes or 0
    if optimizer_peak > planner.fixed_bytes + floor.prediction.peak_bytes:
        return (
            f"the budget is {format_bytes(size)} ({budget}){reserved}, but optimizer.step() alone peaks at "
            f"{format_bytes(optimizer_peak)}, which no recomputation lowers. Smallest budget that works: "
            f"{optimizer_peak + reserved_bytes} bytes. An optimizer with foreach=False or fused=True needs less."
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
        f"{format_bytes(planner.fixed_bytes)} of it are live before a step; {lowers}"
        + (f" {shares}" if shares else "")
        + (f" And {told(unlike)}" if (unlike := floor.profile.units.unlike) else "")
    )


def compiled_whole(profile: Profile) -> str | None:
    """Return the name of the compiled unit that saves more than all others together; None if none does."""
    inside_bytes = [size.inside_bytes for size in profile.sizes]
    largest = inside_bytes.index(max(inside_bytes))
    runs = (profile.units.trace.operators.runs[index] for index in operators_of(profile, largest))
    is_most = 2 * inside_bytes[largest] > sum(inside_bytes)
    return profile.units.units[largest].name if is_most and any(run.is_compiled for run in runs) else None
