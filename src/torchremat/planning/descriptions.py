"""What planners tell: of a profile the units, what they hold, inputs and the predicted step; and that nothing fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchremat.planning.cargo import NO_LOADS, Loads
from torchremat.planning.layout import HeldOperators
from torchremat.planning.memory import Walk
from torchremat.planning.moments import Live, Moment
from torchremat.planning.plans import PlannedUnit, Point
from torchremat.planning.prediction import chosen_options, over_bytes
from torchremat.planning.reading import Profile
from torchremat.planning.shapes import InputSizes
from torchremat.schedules.chain import Tree
from torchremat.tensors.sizes import format_bytes

if TYPE_CHECKING:
    from torchremat.planning.planner import Planner


def planned_unit(own: Profile, unit: int) -> PlannedUnit:
    """Return what a plan tells about a unit."""
    found, size, trace = own.units.units[unit], own.sizes[unit], own.units.trace
    saved = (*(size.saved - set(found.inputs)), *size.left)
    return PlannedUnit(
        name=found.name,
        kind=" + ".join(trace.calls[call].kind for call in found.calls),
        saved_bytes=size.inside_bytes + sum(trace.storage_bytes[storage] for storage in saved),
        input_bytes=sum(trace.storage_bytes[storage] for storage in found.inputs),
        seconds=own.costs[unit].seconds,
        flops=own.costs[unit].flops,
    )


def held_of(own: Profile, tree: Tree) -> tuple[HeldOperators, ...]:
    """Return what the units hold that a tree keeps in part."""
    units: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for unit, number in chosen_options(tree):
        option = own.options[unit][number - 1]
        units.setdefault((option.operators, option.ordinals), []).append(unit)
    return tuple(
        HeldOperators(units=tuple(members), operators=operators, held=ordinals)
        for (operators, ordinals), members in units.items()
    )


def input_sizes(own: Profile) -> InputSizes:
    """Return how large the inputs of the roots were."""
    elements: dict[str, int] = {}
    for root in own.units.roots:
        call = own.units.trace.calls[root]
        elements[call.name] = max(elements.get(call.name, 0), call.input_elements)
    return InputSizes(elements=elements)


def curve_of(own: Profile, tree: Tree, fixed_bytes: int, loads: Loads = NO_LOADS) -> tuple[Point, ...]:
    """Return the predicted step under a tree: a point where each piece begins, and one at its peak."""
    points: list[Point] = []
    now_s, running = 0.0, 0.0
    for state in Walk(own.units, own.sizes, own.order, own.lifetimes, tree, own.options, loads):
        if not isinstance(state, Live):
            continue
        live = fixed_bytes + own.extra_bytes[state.key] + state.held_bytes
        moment, unit = state.key
        if state.moves:
            running = 0.0
        elif moment in (Moment.FORWARD, Moment.RECOMPUTE):
            running = own.costs[state.unit if state.unit >= 0 else unit].seconds
        elif moment is Moment.BACKWARD:
            running = own.costs[unit].seconds_backward
        else:
            running = 0.0
        points.append(Point(seconds=now_s, live_bytes=live, what=state.what))
        points.append(Point(seconds=now_s + running / 2, live_bytes=live + over_bytes(own, state), what=state.what))
        now_s += running
    return tuple(points)


def nothing_fits(planner: Planner, size: int, budget: str, reserved_bytes: int) -> str:
    """Return the message for a budget that no plan fits.

    Args:
        planner: What was asked.
        size: The budget in bytes.
        budget: The same as it was given.
        reserved_bytes: What of it has to stay free.
    """
    floor, floor_bytes = planner.solver.floor, planner.floor_bytes + reserved_bytes
    reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
    optimizer_peak = planner.optimizer_peak_bytes or 0
    if optimizer_peak > planner.fixed_bytes + floor.prediction.peak_bytes:
        return (
            f"the budget is {format_bytes(size)} ({budget}){reserved}, but optimizer.step() alone peaks at "
            f"{format_bytes(optimizer_peak)}, which no recomputation lowers. Smallest budget that works: "
            f"{optimizer_peak + reserved_bytes} bytes. An optimizer with foreach=False or fused=True needs less."
        )
    slowdown = 1 + (floor.prediction.seconds + floor.prediction.moving_s) / planner.profile.seconds
    return (
        f"no plan fits the budget of {format_bytes(size)} ({budget}){reserved}. Smallest budget that works: "
        f"{floor_bytes} bytes ({format_bytes(floor_bytes)}), at {slowdown:.2f} x the plain time. "
        f"{format_bytes(planner.fixed_bytes)} of it lie there before a step; a smaller batch lowers the rest."
    )
