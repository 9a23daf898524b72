"""Real classes of six packages at three budgets: a plan, or an error that names the smallest budget."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

import _paths  # noqa: F401
import torch
from _steps import computed, differing
from _tables import bar, markdown, mib, publish, yes
from classes import CLASSES, Make
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.runs import subject_of

# Of what the plain step needs beside the bytes that lie there before it; the smallest budget comes after them.
SHARES = (0.7, 0.5)
TINY = ("one linear layer", "the same in three wrappers")


def run(smoke: bool) -> dict[str, object]:
    warnings.simplefilter("ignore")
    rows, versions = [], {}
    for package, classes in CLASSES.items():
        name = "torchremat" if package == "own" else package
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
        chosen = {name: make for name, make in classes.items() if not smoke or name in TINY}
        rows += [{"package": package, "name": name, **tried(make)} for name, make in chosen.items()]
    plans = [one for row in rows for one in row.get("plans", ())]
    by_hand = [row for row in rows if row.get("by_hand_bytes") is not None and row.get("plans")]
    worst = max((abs(one["measured_bytes"] / one["peak_bytes"] - 1) for one in plans), default=0.0)
    above = [one for one in plans if one["measured_bytes"] > one["budget_bytes"]]
    beaten = [row["name"] for row in by_hand if row["plans"][-1]["peak_bytes"] > row["by_hand_bytes"]]
    crashed = [row["name"] for row in rows if "crash" in row]
    bars = [
        bar("a plan, or an error of ours", f"{len(rows) - len(crashed)} of {len(rows)} models", not crashed),
        bar(
            "loss, gradients and buffers are those of the plain step, bit for bit",
            f"{sum(not one['differs'] for one in plans)} of {len(plans)} plans",
            not any(one["differs"] for one in plans),
        ),
        bar(
            "the measured peak is within 1% of the predicted one, and never above the budget",
            f"{100 * worst:.2f}% at most, {len(above)} above",
            worst <= 0.01 and not above,
        ),
        bar(
            "the smallest peak is not above that of every repeated block in a checkpoint",
            f"{len(by_hand) - len(beaten)} of {len(by_hand)} models that have such blocks",
            not beaten,
        ),
    ]
    return {"versions": versions, "rows": rows, "bars": bars}


def tried(make: Make) -> dict[str, object]:
    """Return what a model's plans took; or the error, if it is not ours."""
    try:
        plain = computed(*make())
        planner = torchremat.Planner(*make(), cost="flops")
        before, (plain_bytes, _) = planner.fixed_bytes, planner.plain_peak()
        budgets = [before + int(share * (plain_bytes - before)) for share in SHARES]
        plans = []
        for share, budget in zip((*SHARES, None), (*budgets, planner.floor_bytes), strict=True):
            if budget < planner.floor_bytes:
                continue
            plan = planner.plan(budget)
            model, step = make()
            plan.apply(model)
            differs = differing(computed(model, step), plain)
            measured = before + peak_of(model, step)
            plans.append(
                {
                    "share": share,
                    "budget_bytes": plan.budget_bytes,
                    "peak_bytes": plan.peak_bytes,
                    "measured_bytes": measured,
                    "recomputed": plan.recomputed_flops / max(1, plan.flops),
                    "differs": differs,
                }
            )
        by_hand = by_hand_bytes(*make())
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        kind = "refused" if isinstance(error, torchremat.TorchrematError) else "crash"
        return {kind: f"{type(error).__name__}: {error}"}
    return {
        "before_bytes": before,
        "plain_bytes": plain_bytes,
        "by_hand_bytes": None if by_hand is None else before + by_hand,
        "plans": plans,
    }


def peak_of(model: nn.Module, step: object) -> int:
    """Return the peak of a step over what lies there before it."""
    subject = subject_of(step, model, None)
    return subject.train(observe_allocations(subject, torch.device("cpu"))).peak_bytes


def by_hand_bytes(model: nn.Module, step: object) -> int | None:
    """Return the lower of the peaks with the outermost or the innermost repeated blocks in a checkpoint each."""
    found = []
    for blocks in (repeated(model, inner=False), repeated(model, inner=True)):
        for block in blocks:
            block.forward = lambda *args, own=block.forward, **kwargs: checkpoint(
                own, *args, use_reentrant=False, **kwargs
            )
        try:
            found += [peak_of(model, step)] if blocks else []
        except (RuntimeError, torchremat.TorchrematError):
            pass  # blocks that cannot be recomputed one by one
        finally:
            for block in blocks:
                del block.forward
    return min(found, default=None)


def repeated(model: nn.Module, *, inner: bool) -> list[nn.Module]:
    """Return the modules with parts that stand at least twice in a list or a sequence."""
    blocks: dict[int, nn.Module] = {}
    for child in model.children():
        alike: dict[type, list[nn.Module]] = {}
        for one in child if isinstance(child, nn.ModuleList | nn.Sequential) else ():
            if next(one.children(), None) is not None:
                alike.setdefault(type(one), []).append(one)
        own = [one for those in alike.values() if len(those) > 1 for one in those]
        inside = [deeper for one in own for deeper in repeated(one, inner=True)] if inner else []
        chosen = inside or own or repeated(child, inner=inner)
        blocks.update((id(one), one) for one in chosen)
    return list(blocks.values())


HEAD = ("before", "plain", "by hand", "70%", "50%", "smallest", "of plain", "recomputed", "equal")


def tables(results: dict[str, object]) -> dict[str, str]:
    made = {"versions": ", ".join(f"{name} {number}" for name, number in results["versions"].items())}
    for package in CLASSES:
        own = [row for row in results["rows"] if row["package"] == package]
        made[package] = markdown([package, *HEAD], [[row["name"], *cells(row)] for row in own])
    return made


def cells(row: dict[str, object]) -> list[str]:
    if "plans" not in row:
        return [*[""] * (len(HEAD) - 1), next(row[kind] for kind in ("refused", "crash") if kind in row)]
    before, plain, hand = row["before_bytes"], row["plain_bytes"], row["by_hand_bytes"]
    lowest = row["plans"][-1]
    by_share = {one["share"]: f"{one['recomputed']:.2f}" for one in row["plans"]}
    return [
        *(mib(before), mib(plain - before), "" if hand is None else mib(hand - before)),
        *(by_share.get(share, "below") for share in SHARES),
        *(mib(lowest["peak_bytes"] - before), f"{(lowest['peak_bytes'] - before) / (plain - before):.2f}"),
        *(f"{lowest['recomputed']:.2f}", yes(not any(one["differs"] for one in row["plans"]))),
    ]


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
