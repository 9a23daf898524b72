"""Steps that differentiate a gradient: what regions need there, against torch's checkpoint at the same places."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path += map(str, Path(__file__).resolve().parents[:2])

import _paths  # noqa: F401
import torch
from _steps import computed, differing, ratio, seconds_in_turn, take
from _tables import bar, markdown, mib, publish, yes
from differentiating import SUBJECTS, Subject
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchremat

MOST_TIME = 2.5
OTHERS = ("torch", "ours", "plan")
ROUNDS = 7


@contextmanager
def _plain(subject: Subject) -> Generator[None]:
    yield


@contextmanager
def _torchs(subject: Subject) -> Generator[None]:
    places = [one for one in subject.model.modules() if isinstance(one, subject.region)]
    for module in places:
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in places:
            del module.forward


@contextmanager
def _ours(subject: Subject) -> Generator[None]:
    # The root is a module like any other within another.
    around = nn.ModuleList([subject.model])
    torchremat.wrap(around, subject.region)
    try:
        yield
    finally:
        torchremat.unwrap(around)


def _planned(made: torchremat.Plan) -> Callable[[Subject], AbstractContextManager[None]]:
    @contextmanager
    def applied(subject: Subject) -> Generator[None]:
        made.apply(subject.model)
        try:
            yield
        finally:
            made.remove(subject.model)

    return applied


WAYS = {"plain": _plain, "torch": _torchs, "ours": _ours}


def of_subject(name: str, smoke: bool) -> dict[str, object]:
    """Return bytes, times and equality of each way."""
    torch.manual_seed(0)
    subject = SUBJECTS[name](smoke)
    model, step = subject.model, subject.step
    found: dict[str, object] = {"most": subject.most}
    plain = computed(model, step)
    made = torchremat.plan(model, step, budget="min", cost="flops")
    found["planning"] = {"peak_bytes": made.peak_bytes, "runs": made.planning_steps, "seconds": made.planning_seconds}
    ways = {**WAYS, "plan": _planned(made)}
    for way, context in ways.items():
        with context(subject):
            found[way] = {**asdict(take(model, step)), "differs": differing(computed(model, step), plain)}

    def run(context) -> None:
        with context(subject):
            step(model).backward()
        model.zero_grad()

    steps = {way: functools.partial(run, context) for way, context in ways.items()}
    seconds = seconds_in_turn(steps, 1 if smoke else ROUNDS)
    found["seconds"] = statistics.median(seconds["plain"])
    found["times"] = {way: asdict(ratio(seconds[way], seconds["plain"])) for way in OTHERS}
    return found


def _share(one: dict[str, object], way: str) -> float:
    def size(taken) -> int:
        return taken["peak_bytes"] - taken["before_bytes"]

    return size(one[way]) / size(one["plain"])


def run(smoke: bool) -> dict[str, object]:
    found = {name: of_subject(name, smoke) for name in SUBJECTS}
    differ = [one[way]["differs"] for one in found.values() for way in ("ours", "plan")]
    off = [abs(one["planning"]["peak_bytes"] / one["plan"]["peak_bytes"] - 1) for one in found.values()]
    bars = [
        bar("equal bit for bit", "all", not any(differ)),
        bar("predicted peaks of plans are the measured ones to 0.1%", f"{max(off):.2%}", max(off) <= 0.001),
    ]
    for name, one in found.items():
        share, took = _share(one, "ours"), one["times"]["ours"]["median"]
        claim = f"{name}: at most {one['most']:.0%} of plain's bytes, and {MOST_TIME} of its time"
        bars.append(bar(claim, f"{share:.0%}, {took:.2f}", share <= one["most"] and took <= MOST_TIME))
    return {"steps": found, "bars": bars}


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, one in results["steps"].items():
        plain = one["plain"]["peak_bytes"] - one["plain"]["before_bytes"]
        times = [f"{one['times'][way]['median']:.2f}" for way in OTHERS]
        shares = [f"{_share(one, way):.0%}" for way in OTHERS]
        equal = yes(not (one["ours"]["differs"] or one["plan"]["differs"]))
        planned = f"{one['planning']['runs']} in {one['planning']['seconds']:.0f} s"
        rows.append([name, mib(plain), *shares, f"{1e3 * one['seconds']:.0f}", *times, equal, planned])
    head = ["", "plain MiB", *OTHERS, "plain ms", *OTHERS, "gradients equal", "planned by runs"]
    return {"steps": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
