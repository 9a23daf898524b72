"""A plan as text, as a page, and as steps over time: its bytes and time, the predicted step, each unit's choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from torchremat.errors import first_of
from torchremat.planning.exactness.not_replayable import shortened
from torchremat.planning.results.plan_data import PlanData, Point
from torchremat.planning.searches.search_budget import TIME_IS_OVER
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree
from torchremat.tensors.sizes import format_bytes, format_flops
from torchremat.views.page import Fact, Page, Table, TableCell, TableRow, milliseconds_cell, size_cell
from torchremat.views.step_chart import step_chart
from torchremat.views.steps import CurvePoint, Phase, Slice, Step, phases_of, runs

_PAUSE_S = 1e-9

_FIRST_WORDS: dict[str, Phase] = {name: name for name in get_args(Phase)}
_HEADINGS = ("module", "kind", "saves", "inputs", "forward", "GFLOP", "plan", "written at")


def text_of(plan: PlanData) -> str:
    """Return a plan as text."""
    summary = [f"{name:<10} {value} {note}".rstrip() for name, value, note in summary_rows(plan)]
    return "\n".join([*summary, "", *_rows(plan)])


def summary_rows(plan: PlanData) -> list[tuple[str, str, str]]:
    """Return the summary of a plan: for each line the topic, the number, and a remark."""
    share = f"{100 * plan.peak_bytes / max(1, plan.plain_peak_bytes):.0f}% of plain"
    plain = f"({format_bytes(plan.plain_peak_bytes)}, {plan.plain_source})"
    # Saved tensors are freed by then, so no plan lowers this peak.
    where = "the optimizer's step" if plan.is_by_optimizer else plan.where
    bound = ", at most" if plan.room_bytes else ""
    again = f"{100 * plan.recomputed_flops / max(1, plan.flops):.0f}% of a forward"
    rows = [
        ("budget", format_bytes(plan.budget_bytes), f"({plan.budget}) on {plan.device}"),
        ("peak", format_bytes(plan.peak_bytes), f"predicted{bound}, {share} {plain}; highest during {where}"),
        (
            "time",
            f"{plan.slowdown:.2f} x plain",
            f"predicted; {format_flops(plan.recomputed_flops)} recomputed in {plan.recomputed_calls} calls, {again}",
        ),
        ("floor", format_bytes(plan.floor_bytes), "is the smallest budget found to work"),
    ]
    if plan.ran_out:
        rows.append(("search", TIME_IS_OVER, ""))
    if plan.unlike:
        rows.append(("not whole", f"{shortened(list(plan.unlike))}:", "see `unlike`"))
    if plan.certificate is not None:
        rows.append(("optimal", plan.certificate.claim, ""))
    if plan.stored:
        places = sorted({one.store for one in plan.stored})
        names = ", ".join(plan.stores[place] for place in places)
        note = f"of {len(plan.stored)} units in {names}, {1e3 * plan.moving_seconds:.1f} ms added"
        rows.append(("stored", format_bytes(plan.stored_bytes), note))
        rows += [("speed", f"{plan.stores[place]}:", str(plan.speeds[place])) for place in places if plan.speeds]
    rows += stepping_rows(plan)
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in plan.before_bytes.items() if size)
    there = f"live before a step: {parts}"
    rows.append(("before", format_bytes(sum(plan.before_bytes.values())), there))
    if plan.optimizer_peak_bytes is None:
        rows.append(("optimizer", "not counted", ""))
    else:
        peak = format_bytes(plan.optimizer_peak_bytes)
        rows.append(
            ("optimizer", format_bytes(plan.optimizer_state_bytes), f"of state to come; its step peaks at {peak}")
        )
    if plan.planning_steps:
        rows.append(("planning", f"{plan.planning_seconds:.1f} s", f"and {plan.planning_steps} runs of the step"))
    return rows


def stepping_rows(plan: PlanData) -> list[tuple[str, str, str]]:
    """Return what is released, and what waits where; nothing for a plan whose optimizer steps plainly."""
    rows: list[tuple[str, str, str]] = []
    added = f", {1e3 * plan.stepping_seconds:.1f} ms added" if plan.stepping_seconds else ""
    if plan.stepping.releases:
        last = "last " if plan.stepping.accumulates else ""
        note = f"of gradients: each parameter steps in the {last}backward"
        rows.append(("released", format_bytes(plan.released_bytes), note))
    if plan.stepping.stores:
        rows.append(("waiting", format_bytes(plan.waiting_bytes), f"of optimizer state in {plan.optimizer_store}"))
    if plan.away_bytes:
        where = "already" if plan.is_of_stored else f"in {plan.parameter_store}"
        note = f"of parameters {where}, at most {format_bytes(plan.room_bytes)} of them in memory"
        rows.append(("waiting", format_bytes(plan.away_bytes), note))
    return [*rows[:-1], *((name, size, f"{note}{added}") for name, size, note in rows[-1:])]


def _rows(plan: PlanData) -> list[str]:
    width = max(6, *(len(unit.name) for unit in plan.units))
    rows = [f"{'module':<{width}}  {'saves':>10}  {'inputs':>10}  {'forward':>9}  plan"]
    for unit, words in zip(plan.units, unit_words(plan), strict=True):
        rows.append(
            f"{unit.name:<{width}}  {format_bytes(unit.saved_bytes):>10}  {format_bytes(unit.input_bytes):>10}  "
            f"{unit.seconds * 1e3:>6.2f} ms  {words}"
        )
    return rows


def unit_words(plan: PlanData) -> list[str]:
    """Return the choice for each unit, in words: kept or recomputed, the operators that it holds, the store."""
    words = described(plan.tree)
    for one in plan.stored:
        words[one.unit] = f"store {one.store}"
    for unit, one in plan.held_by_unit.items():
        if one.cuts:
            words[unit] = f"{'─ recompute' if words[unit] == 'keep' else words[unit]} in {len(one.cuts) + 1} parts"
        else:
            words[unit] += f" {len(one.held)} of {len(one.operators)} operators"
    return [
        f"{one}, exchanges {unit.exchanges}" if unit.exchanges else one
        for one, unit in zip(words, plan.units, strict=True)
    ]


def described(tree: Tree) -> list[str]:
    """Return the choice of the tree for each unit, in words, with nested regions drawn as brackets."""
    words: list[str] = []

    def describe(node: Node, brackets: str) -> None:
        if isinstance(node, KeepNode):
            words.append(f"{brackets} recompute" if brackets else "keep")
            return
        for place, child in enumerate(node.children):
            last = len(node.children) - 1
            edge = "─" if not last else "┌" if place == 0 else "└" if place == last else "│"
            describe(child, brackets + edge)

    for node in tree:
        describe(node, "")
    return words


# ------------------------------------------------------------------------------------------------- the page and steps


def _phase_of(what: str) -> Phase:
    """Return the phase of a predicted step in which something runs."""
    return _FIRST_WORDS.get(what.partition(" ")[0], "forward")


def steps_of(plan: PlanData) -> tuple[Step, Step]:
    """Return the visible parts of the predicted step: plain, and under the plan."""
    said = _said(plan)
    before_bytes = sum(plan.before_bytes.values())
    plain, planned = (_moments(curve, said) for curve in (plan.plain_curve, plan.curve))
    return (
        Step(
            name=f"plain, peak {format_bytes(plan.plain_peak_bytes)} {plan.plain_source}",
            points=plain,
            slices=(*phases_of(plain), *_units(plan.plain_curve)),
            before_bytes=before_bytes,
        ),
        Step(
            name=f"planned, {plan.slowdown:.2f} x plain",
            points=planned,
            slices=(*phases_of(planned), *_units(plan.curve), *_regions(plan), *_stores(plan)),
            before_bytes=before_bytes,
            budget_bytes=plan.budget_bytes,
        ),
    )


def page_of(plan: PlanData) -> Page:
    """Return the page of a plan."""
    plain, planned = steps_of(plan)
    return Page(
        title=f"A plan for {format_bytes(plan.budget_bytes)} on {plan.device}",
        facts=tuple(Fact(name=name, value=value, note=note) for name, value, note in summary_rows(plan)),
        charts=(
            step_chart(
                planned,
                others=[plain],
                title="Memory over the step, predicted",
                note="Under the plan, and without it as a dotted line; each is the time of its own step.",
            ),
        ),
        tables=(_table(plan),),
    )


def _said(plan: PlanData) -> dict[str, tuple[str, ...]]:
    """Return the remarks about each unit, by its name."""
    held = plan.held_by_unit
    said: dict[str, tuple[str, ...]] = {}
    for place, unit in enumerate(plan.units):
        lines = [unit.kind]
        if place in held and held[place].held:
            names = [held[place].operators[number] for number in held[place].held]
            lines.append(f"keeps {', '.join(dict.fromkeys(names))}")
        said.setdefault(unit.name, (*lines, *([unit.line] if unit.line else [])))
    return said


def _unit_of(what: str) -> str:
    """Return the unit in "forward of it", "forward after it" and the like; empty if none is named."""
    words = what.split(" ", 2)
    return words[2] if len(words) == 3 and words[0] in _FIRST_WORDS else ""


def _moments(curve: Sequence[Point], said: dict[str, tuple[str, ...]]) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            seconds=point.seconds,
            live_bytes=point.live_bytes,
            phase=_phase_of(point.what),
            says=(point.what, *said.get(_unit_of(point.what), ())),
            key=_unit_of(point.what),
        )
        for point in curve
    )


def _units(curve: Sequence[Point]) -> tuple[Slice, ...]:
    names = (_unit_of(point.what) for point in curve)
    return runs(((point.seconds, name, "module", name) for point, name in zip(curve, names, strict=True)), row="module")


def _times(plan: PlanData) -> Iterator[tuple[Phase, str, float, float]]:
    """Yield each stretch of the planned step in which one unit runs: its phase, its name, from when to when."""
    for one in runs((point.seconds, point.what, "other", _unit_of(point.what)) for point in plan.curve):
        if one.key:
            yield _phase_of(one.name), one.key, one.starts_s, one.ends_s


def _regions(plan: PlanData) -> Iterator[Slice]:
    """Yield the outermost regions, and units that are kept in part: when their forward runs, and each recompute."""
    times = [*_times(plan)]
    for names, says in _recomputed(plan):
        name = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        inside = [one for one in times if one[1] in names]
        forward = [(starts, ended) for phase, _, starts, ended in inside if phase == "forward"]
        if forward:
            yield _region(name, forward[0][0], forward[-1][1], "region", says, names[0])
        for group in _together(
            [(starts, ended, unit) for phase, unit, starts, ended in inside if phase == "recompute"]
        ):
            units = [unit for _, _, unit in group]
            words = f"recompute of {first_of(units)}"
            yield _region(name, group[0][0], group[-1][1], "recompute", (words, f"in the region {name}"), units[0])


def _recomputed(plan: PlanData) -> Iterator[tuple[list[str], tuple[str, ...]]]:
    """Yield the names of the units of each region, in order, with the remarks about it."""
    held = plan.held_by_unit
    for node in plan.tree:
        names = [*dict.fromkeys(unit.name for unit in plan.units[node.first : node.last + 1])]
        if isinstance(node, RegionNode):
            count = node.last - node.first + 1
            yield (
                names,
                (f"a region of {count} {'unit' if count == 1 else 'units'}", "its forward saves only its inputs"),
            )
        elif node.stage in held:
            one = held[node.stage]
            parts = f"is recomputed in {len(one.cuts) + 1} parts"
            yield (
                names,
                (f"a region that {parts if one.cuts else f'keeps {len(one.held)} of {len(one.operators)} operators'}",),
            )


def _together(times: Sequence[tuple[float, float, str]]) -> Iterator[list[tuple[float, float, str]]]:
    """Yield groups of stretches that follow each other without a pause."""
    group: list[tuple[float, float, str]] = []
    for one in times:
        if group and one[0] - group[-1][1] > _PAUSE_S:
            yield group
            group = []
        group.append(one)
    if group:
        yield group


def _region(
    name: str, starts_s: float, ends_s: float, kind: Literal["region", "recompute"], says: tuple[str, ...], key: str
) -> Slice:
    return Slice(row="region", name=name, starts_s=starts_s, ends_s=ends_s, kind=kind, says=says, key=key)


def _stores(plan: PlanData) -> Iterator[Slice]:
    """Yield when saved tensors of units are stored: from the end of a forward to its backward, a row for each store."""
    times = [*_times(plan)]
    for one in plan.stored:
        name = plan.units[one.unit].name
        left = [ended for phase, unit, _, ended in times if phase == "forward" and unit == name]
        needed = [starts for phase, unit, starts, _ in times if phase == "backward" and unit == name]
        if left and needed:
            yield Slice(
                row=f"store {one.store}",
                name=name,
                starts_s=left[-1],
                ends_s=needed[0],
                kind="store",
                says=(f"{format_bytes(one.stored_bytes)} in {plan.stores[one.store]}",),
                key=name,
            )


def _table(plan: PlanData) -> Table:
    most = max((unit.saved_bytes for unit in plan.units), default=0)
    rows = tuple(
        TableRow(
            cells=(
                TableCell(unit.name or "(the model)"),
                TableCell(unit.kind),
                size_cell(unit.saved_bytes),
                size_cell(unit.input_bytes),
                milliseconds_cell(unit.seconds),
                TableCell(f"{unit.flops / 1e9:.2f}", unit.flops),
                TableCell(words),
                TableCell(unit.line),
            ),
            key=unit.name,
            share=unit.saved_bytes / most if most else None,
        )
        for unit, words in zip(plan.units, unit_words(plan), strict=True)
    )
    return Table(
        title="Units",
        columns=_HEADINGS,
        rows=rows,
        note="In the order in which they run. Brackets are regions; what a kept unit saves stays until its backward.",
    )
