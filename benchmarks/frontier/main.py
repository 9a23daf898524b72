"""At the peak of each of torch's ways: does our plan recompute less than it does?"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
import torch._functorch.config
from _steps import Make, Step, Taken, computed, differing, ratio, seconds_in_turn, take, training_step
from _tables import bar, markdown, mflop, mib, publish, yes
from _torch_ways import OFFSETS, SELECTIVE, WAYS, Way, blocks_of, evenly
from torch.nn import functional as F

import decoders
import mixtures
import models
import torchremat
from torchremat.planning.bounds.plain_step import PlainStep

SIZES = {"blocks": 8, "width": 256, "heads": 4, "key_heads": 2, "vocabulary": 1000}
BATCH, CONTEXT = 4, 256


def llama_step() -> tuple[torch.nn.Module, Step]:
    torch.manual_seed(0)
    model = decoders.Decoder(decoders.Config(**SIZES, hidden=704))
    tokens_bt = torch.randint(SIZES["vocabulary"], (BATCH, CONTEXT + 1))
    return model, lambda model: F.cross_entropy(model(tokens_bt[:, :-1]).flatten(0, 1), tokens_bt[:, 1:].flatten())


def moe_step(seed: int = 0) -> tuple[torch.nn.Module, Step]:
    """The model is always the same; what the tokens are, and so which experts they go to, is up to the seed."""
    torch.manual_seed(0)
    model = mixtures.Mixture(mixtures.MixtureConfig(**SIZES, hidden=384))
    torch.manual_seed(seed)
    tokens_bt = torch.randint(SIZES["vocabulary"], (BATCH, CONTEXT + 1))
    return model, partial(mixtures.mixture_loss, tokens_bt=tokens_bt)


MODELS: dict[str, Make] = {
    "GPT": lambda: models.gpt_step(vocabulary=1000),
    "U-Net": models.unet_step,
    "ResNet": models.resnet_step,
    "Llama-style": llama_step,
    "MoE": moe_step,
}
TINY: dict[str, Make] = {
    "ResNet": lambda: models.resnet_step(batch=2, size=16, width=8),
}
SLACK = 1.0  # of what the step needs beside the bytes that lie there before it
COMPILE_SLACK = 1.01
SHARE = 0.4  # of what a plain step needs, at which blocks checkpointed evenly are compared
FEWER = 2 / 3
ROUNDS = 5
BATCH_SHARES = (0.6, 0.4, 0.25)
BATCHES = 4
COMPILE_BUDGETS = (1.0, 0.5, 0.25, 0.1, 0.0)
COMPILE_ROUNDS = 7


def with_way(make: Make, way: Way) -> tuple[torch.nn.Module, Step]:
    model, step = make()
    way(model)
    return model, step


def with_plan(make: Make, plan: torchremat.Plan) -> tuple[torch.nn.Module, Step]:
    model, step = make()
    plan.apply(model)
    return model, step


def compare(make: Make, ways: dict[str, Way], planner: torchremat.Planner, rounds: int) -> list[dict[str, object]]:
    """Measure each way, plan at its peak, measure the plan; then time all of them in turn.

    What is timed beside is the plan for the fewest seconds at the same peak, which is what a user gets by default.
    """
    plain = computed(*make())
    runs = {"plain": training_step(*make())}
    default = torchremat.Planner(*make()) if rounds else None
    rows = []
    for name, way in ways.items():
        torchs = take(*with_way(make, way))
        plan = planner.plan(torchs.before_bytes + int(SLACK * torchs.step_bytes))
        ours = take(*with_plan(make, plan))
        rows.append(
            {
                "way": name,
                "torch": asdict(torchs) | {"differs": differing(computed(*with_way(make, way)), plain)},
                "ours": asdict(ours) | {"differs": differing(computed(*with_plan(make, plan)), plain)},
                "budget_bytes": plan.budget_bytes,
                "predicted_bytes": plan.peak_bytes,
            }
        )
        if default is not None:
            quickest = default.plan(plan.budget_bytes)
            differs = differing(computed(*with_plan(make, quickest)), plain)
            rows[-1]["quickest"] = asdict(take(*with_plan(make, quickest))) | {"differs": differs}
            runs[f"torch, {name}"] = training_step(*with_way(make, way))
            runs[f"ours, {name}"] = training_step(*with_plan(make, plan))
            runs[f"quickest, {name}"] = training_step(*with_plan(make, quickest))
    if default is not None:
        seconds = seconds_in_turn(runs, rounds)
        for row in rows:
            for side in ("torch", "ours", "quickest"):
                row[side]["time"] = asdict(ratio(seconds[f"{side}, {row['way']}"], seconds["plain"]))
    return rows


def compiled(make: Make, planner: torchremat.Planner) -> list[dict[str, object]]:
    """`torch.compile` of the whole model under each of its budgets, and our eager plan at the same peak plus 1%."""
    rows = []
    for budget in COMPILE_BUDGETS:
        torch._dynamo.reset()
        model, step = make()
        model = torch.compile(model)
        with torch._functorch.config.patch(activation_memory_budget=budget):
            torch._inductor.config.force_disable_caches = True
            start_s = time.perf_counter()
            training_step(model, step)()
            compile_s = time.perf_counter() - start_s
            model.zero_grad()
            theirs = take(model, step)
            row = {"way": budget, "compile_s": compile_s, "torch": asdict(theirs)}
            plan = planner.plan(theirs.before_bytes + int(COMPILE_SLACK * theirs.step_bytes))
            row["ours"] = asdict(take(*with_plan(make, plan)))
            runs = {
                "plain": training_step(*make()),
                "torch": training_step(model, step),
                "ours": training_step(*with_plan(make, plan)),
            }
            seconds = seconds_in_turn(runs, COMPILE_ROUNDS)
        for side in ("torch", "ours"):
            row[side]["time"] = asdict(ratio(seconds[side], seconds["plain"]))
        rows.append(row)
        print(f"compiled at {budget}: {compile_s:.0f} s", file=sys.stderr)
    return rows


def run(smoke: bool, rounds: int = ROUNDS) -> dict[str, object]:
    found: dict[str, object] = {"models": {}, "compile": {} if smoke else earlier().get("compile", {}), "bars": []}
    for name, make in (TINY if smoke else MODELS).items():
        start_s = time.process_time()
        planner = torchremat.Planner(*make(), cost="flops", certify=True)
        plain = take(*make())
        ways = dict(list(WAYS.items())[::3]) if smoke else WAYS
        result = {
            "plain": asdict(plain),
            "floor_bytes": planner.floor_bytes,
            "ways": compare(make, ways, planner, 1 if smoke else rounds),
            "offsets": [] if smoke else compare(make, OFFSETS, planner, 0),
            "selective": compare(make, SELECTIVE, planner, 0 if smoke else rounds),
            "evenly": compare(make, {} if smoke else evenly_placed(make, plain.step_bytes), planner, 0),
            "at_share": at_share(make, plain, planner),
        }
        result["processor_s"] = round(time.process_time() - start_s)
        found["models"][name] = result
        found["bars"] += [frontier_bar(name, result), *([] if smoke else [evenly_bar(name, result)])]
        print(f"{name}: {result['processor_s']} s of the processor", file=sys.stderr)
    if not smoke:
        found["batches"] = other_batches()
        found["bars"].append(batches_bar(found["batches"]))
    return found


def evenly_placed(make: Make, plain_bytes: int) -> dict[str, Way]:
    """The fewest blocks, evenly placed, whose checkpoints bring a step down to `SHARE`, or all if none do."""
    count, blocks = 1, len(blocks_of(make()[0]))
    while count < blocks and take(*with_way(make, evenly(count))).step_bytes > SHARE * plain_bytes:
        count += 1
    return {f"checkpoint {count} of {blocks} blocks, evenly placed": evenly(count)}


def at_share(make: Make, plain: Taken, planner: torchremat.Planner) -> dict[str, object] | None:
    """Our plan at `SHARE` of what the plain step needs; None if there is no plan for that."""
    budget = plain.before_bytes + int(SHARE * plain.step_bytes)
    if budget < planner.floor_bytes:
        return None
    assert isinstance(planner.profiled.plain_step, PlainStep)  # which no plan for bytes runs
    plan = planner.plan(budget)
    differs = differing(computed(*with_plan(make, plan)), computed(*make()))
    certificate = None if plan.certificate is None else plan.certificate.claim
    return asdict(take(*with_plan(make, plan))) | {"differs": differs, "certificate": certificate}


def other_batches() -> list[dict[str, object]]:
    """Plans for one batch of the MoE, and steps on others: the tokens go to other experts."""
    planner = torchremat.Planner(*moe_step(), cost="flops")
    plain = take(*moe_step())
    rows = []
    for share in BATCH_SHARES:
        plan = planner.plan(plain.before_bytes + int(share * plain.step_bytes))
        for seed in range(BATCHES):
            make = partial(moe_step, seed)
            ours = take(*with_plan(make, plan))
            differs = differing(computed(*with_plan(make, plan)), computed(*make()))
            row = {"share": share, "batch": seed, "predicted_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes}
            rows.append(row | {"ours": asdict(ours) | {"differs": differs}})
    return rows


def earlier() -> dict[str, object]:
    """What is on disk: one run does either the eager ways or the compiled one, and leaves the other as it was."""
    path = Path(__file__).with_name("results.json")
    return json.loads(path.read_text()) if path.exists() else {}


def with_compiled(names: list[str]) -> dict[str, object]:
    found = earlier()
    for name in names:
        planner = torchremat.Planner(*MODELS[name](), cost="flops")
        found["compile"][name] = compiled(MODELS[name], planner)
    return found


def evenly_bar(name: str, result: dict[str, object]) -> dict[str, object]:
    """Blocks placed evenly, at `SHARE` or, where they do not get there, at the least they get to; ours gets as much."""
    (row,) = result["evenly"]
    share = step_bytes(row["torch"]) / step_bytes(result["plain"])
    is_there = share <= SHARE
    ours = result["at_share"] if is_there else row["ours"]
    recomputed, torchs = ours["recomputed_flops"], row["torch"]["recomputed_flops"]
    at = f"{SHARE:.0%}" if is_there else f"{share:.0%} (blocks get no lower)"
    claim = f"{name}: at {at} of the plain peak a third fewer recomputed flops than blocks checkpointed evenly"
    figure = f"{mflop(recomputed)} of {mflop(torchs)} MFLOP, {fewer(recomputed, torchs)} fewer"
    return bar(claim, figure, recomputed <= FEWER * torchs and not ours["differs"])


def batches_bar(rows: list[dict[str, object]]) -> dict[str, object]:
    planned = [row for row in rows if row["batch"] == 0]
    exact = sum(not row["ours"]["differs"] for row in rows)
    held = sum(row["ours"]["peak_bytes"] <= row["budget_bytes"] for row in planned)
    claim = "MoE: gradients equal on any batch, and the budget held on the one planned for"
    met = exact == len(rows) and held == len(planned)
    return bar(claim, f"{exact} of {len(rows)} steps equal, {held} of {len(planned)} within the budget", met)


def fewer(ours: float, theirs: float) -> str:
    return f"{1 - ours / theirs:.0%}"


def frontier_bar(name: str, result: dict[str, object]) -> dict[str, object]:
    rows = [*result["ways"], *result["offsets"], *result["selective"]]
    met = [
        row["ours"]["recomputed_flops"] <= row["torch"]["recomputed_flops"]
        and all(
            one["peak_bytes"] <= row["budget_bytes"] and not one["differs"]
            for one in (row["ours"], row.get("quickest"))
            if one is not None
        )
        for row in rows
    ]
    claim = f"{name}: no more recomputed flops than torch at its peak, gradients and buffers equal"
    return bar(claim, f"{sum(met)} of {len(met)} configurations", all(met))


def step_bytes(taken: dict[str, int]) -> int:
    return taken["peak_bytes"] - taken["before_bytes"]


def spread(time: dict[str, float]) -> str:
    return f"{time['median']:.2f} ({time['low']:.2f}-{time['high']:.2f})"


COMPILE_HEAD = (
    "`activation_memory_budget`",
    "peak, Inductor",
    "peak, ours",
    "recomputed, ours",
    "time, Inductor",
    "time, ours",
    "compiling",
)
EVENLY_HEAD = (
    "at 40%",
    "peak asked for",
    "torch's blocks",
    "their peak",
    "recomputed, torch",
    "ours, at their peak",
    "ours, at 40%",
    "certificate at 40%",
)
BATCHES_HEAD = ("budget", "batch", "predicted", "measured", "off", "ours equal")
HEAD = (
    "peak, torch",
    "peak, ours",
    "recomputed, torch",
    "recomputed, ours",
    "ours equal",
    "time, torch",
    "time, ours",
    'time, ours by `cost="seconds"`',
)
TIMES = (6, 7, 8)  # the columns of the tables that need an idle machine


def tables(results: dict[str, object]) -> dict[str, str]:
    made = {}
    for name, result in results["models"].items():
        shown = (*result["ways"], *result["selective"], *result["offsets"], *result["evenly"])
        rows = [
            [name, *HEAD],
            ["plain", mib(step_bytes(result["plain"])), "", "0", "", "", "1", "", ""],
            *map(_row, shown),
        ]
        is_timed = any("time" in row["torch"] for row in shown)
        head, *rest = [[cell for i, cell in enumerate(row) if is_timed or i not in TIMES] for row in rows]
        made[name] = markdown(head, rest)
    full = {name: result for name, result in results["models"].items() if result["evenly"]}
    if full:
        made["evenly"] = markdown(EVENLY_HEAD, [_evenly_row(name, result) for name, result in full.items()])
    if "batches" in results:
        made["batches"] = markdown(BATCHES_HEAD, map(_batch_row, results["batches"]))
    rows = [
        [
            f"{name}, {row['way']}",
            mib(step_bytes(row["torch"])),
            mib(step_bytes(row["ours"])),
            mflop(row["ours"]["recomputed_flops"]),
            spread(row["torch"]["time"]),
            spread(row["ours"]["time"]),
            f"{row['compile_s']:.0f} s",
        ]
        for name, compiled_rows in results["compile"].items()
        for row in compiled_rows
    ]
    if rows:
        made["compile"] = markdown(COMPILE_HEAD, rows)
    return made


def _evenly_row(name: str, result: dict[str, object]) -> list[object]:
    (row,) = result["evenly"]
    torchs, ours, at = row["torch"], row["ours"], result["at_share"]
    plain = step_bytes(result["plain"])
    there = ["no plan", ""] if at is None else [mflop(at["recomputed_flops"]), at["certificate"] or "unknown"]
    return [
        name,
        mib(SHARE * plain),
        row["way"],
        f"{mib(step_bytes(torchs))}, {step_bytes(torchs) / plain:.0%}",
        mflop(torchs["recomputed_flops"]),
        f"{mflop(ours['recomputed_flops'])}, {fewer(ours['recomputed_flops'], torchs['recomputed_flops'])} fewer",
        *there,
    ]


def _batch_row(row: dict[str, object]) -> list[object]:
    ours = row["ours"]
    off = (ours["peak_bytes"] - row["predicted_bytes"]) / (row["predicted_bytes"] - ours["before_bytes"])
    return [
        f"{row['share']:.0%}",
        "planned for" if row["batch"] == 0 else f"another, {row['batch']}",
        mib(row["predicted_bytes"] - ours["before_bytes"]),
        mib(step_bytes(ours)),
        f"{off:+.2%}",
        yes(not ours["differs"]),
    ]


def _row(row: dict[str, object]) -> list[object]:
    torchs, ours, quickest = row["torch"], row["ours"], row.get("quickest")
    worse = ours["recomputed_flops"] > torchs["recomputed_flops"]
    return [
        row["way"],
        mib(step_bytes(torchs)),
        mib(step_bytes(ours)),
        mflop(torchs["recomputed_flops"]),
        f"**{mflop(ours['recomputed_flops'])}**" if worse else mflop(ours["recomputed_flops"]),
        yes(not any(one["differs"] for one in (ours, quickest) if one is not None)),
        *("" if one is None or "time" not in one else spread(one["time"]) for one in (torchs, ours, quickest)),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--compile", nargs="*", choices=MODELS)
    parser.add_argument("--untimed", action="store_true")
    own, rest = parser.parse_known_args()
    eager = partial(run, rounds=0) if own.untimed else run
    doing = eager if own.compile is None else lambda smoke: with_compiled(own.compile or ["GPT"])
    sys.exit(publish(Path(__file__).parent, doing, tables, rest))
