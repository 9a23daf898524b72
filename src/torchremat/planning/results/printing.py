"""A plan as text: its bytes and time, and the choice for each unit."""

from __future__ import annotations

from torchremat.planning.exactness.not_replayable import shortened
from torchremat.planning.results.plan_data import PlanData
from torchremat.planning.searches.search_budget import TIME_IS_OVER
from torchremat.schedules.chain import KeepNode, Node, Tree
from torchremat.tensors.sizes import format_bytes, format_flops


def text_of(plan: PlanData) -> str:
    """Return a plan as text."""
    return "\n".join([*_summary(plan), "", *_rows(plan)])


def _summary(plan: PlanData) -> list[str]:
    return [f"{name:<10} {value} {note}".rstrip() for name, value, note in summary_rows(plan)]


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
