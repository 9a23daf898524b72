"""Golden plans: what is chosen, and what it is predicted to need, stays what it was for models of every kind.

One file for each model lies in `golden`, with its plans for several budgets. They are planned for flops, which are
exact; where the search asks for seconds all the same, as it does of stores, it is told those of a device of no name.
So a plan that is another one was changed by us. If that is meant, `make golden` writes them anew, and the diff is part
of the review.
"""

import dataclasses
import difflib
import functools
import json
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import decoders
import models
import zoo
from planning.kinds import KINDS
from planning.steps import with_declared_speed
from probes.planning import KeepNode, ProfilePair, profiled_together
from probes.planning import profiled_step as planners
from stages.blocks import Block
from torchremat import Adaptive, BudgetError, Compressed, Disk, Pipe, Planner, codecs
from torchremat.pipeline import StagePlanner
from versions import RELEASE

FOLDER = Path(__file__).parent / "golden"
LOCKED = re.search(r"^torch==(\S+)", (Path(__file__).parents[2] / "requirements.lock").read_text(), re.MULTILINE)[1]

SHARES = ("85%", "70%", "min")
IN_STORES = ("60%", "40%", "min")


# ------------------------------------------------------------------------------------------------- plans as text


def chosen(plan):
    """What becomes of the units, a line for each node at the top.

    `(...)` is a region, `[...]` are operators held, and `/21` is a recompute in two parts, cut at the save 21.
    """
    held = {unit: one for one in plan.held for unit in one.units}

    def text(node):
        if not isinstance(node, KeepNode):
            return f"({', '.join(map(text, node.children))})"
        if not node.option:
            return plan.units[node.stage].name
        one = held[node.stage]
        operators = f" {list(one.held)}" if one.held else ""
        return plan.units[node.stage].name + "".join(f"/{cut}" for cut in one.cuts) + operators

    return [text(node) for node in plan.tree]


def summary(plan):
    """What must not move of a plan."""
    names = [unit.name for unit in plan.units]
    found = {
        "budget": plan.budget_bytes,
        "peak": plan.peak_bytes,
        "where": plan.where,
        "kept": plan.kept_bytes,
        "floor": plan.floor_bytes,
        "plain": plan.plain_peak_bytes,
        "recomputed flops": plan.recomputed_flops,
        "recomputed calls": plan.recomputed_calls,
        "plan": chosen(plan),
    }
    if plan.optimizer_peak_bytes is not None:
        found["optimizer"] = plan.optimizer_peak_bytes
    if plan.stored:
        found["stored"] = [
            f"{names[one.unit]}: {one.stored_bytes} bytes in store {one.store}, gone after {names[one.leaves_after]}, "
            f"on its way back before {names[one.comes_before]}"
            for one in plan.stored
        ]
    return found


def planned(make, budgets, *, optimizer=None, **options):
    """The plans of a model for some budgets."""
    torch.manual_seed(0)
    model, step = make()
    made = None if optimizer is None else optimizer(model.parameters())
    planner = Planner(model, step, optimizer=made, cost="flops", **options)
    found = {}
    for budget in budgets:
        try:
            found[budget] = summary(planner.plan(budget))
        except BudgetError:
            found[budget] = {"smallest that works": planner.floor_bytes}
    return found


# ----------------------------------------------------------------------------------------------- without a clock


def without_seconds(profile):
    """The profile with the seconds of a device of no name, which follow from shapes alone."""
    costs = tuple(
        dataclasses.replace(cost, seconds=whole, seconds_truncated=part, seconds_backward=2 * whole)
        for cost, (whole, part) in zip(profile.costs, profile.nominal_s, strict=True)
    )
    forward_s = profile.nominal_forward_s
    return dataclasses.replace(profile, costs=costs, seconds=3 * forward_s, forward_seconds=forward_s)


def timeless(*args, **options):
    """What planners profile, without seconds."""
    agreed = profiled_together(*args, **options)
    pair = agreed.pair
    leaves = pair.leaves and without_seconds(pair.leaves)
    return dataclasses.replace(agreed, pair=ProfilePair(blocks=without_seconds(pair.blocks), leaves=leaves))


def stored(make, store, **options):
    """The plans of a model with a store of a declared speed."""
    with mock.patch.object(planners, "profiled_together", timeless), with_declared_speed():
        return planned(make, IN_STORES, stores=[store()], **options)


# ------------------------------------------------------------------------------------------ pipelines and shapes


def staged():
    """The plans of the stages of a pipe."""
    torch.manual_seed(0)
    x = torch.randn(128, 16)
    pipe = Pipe(nn.Sequential(*(Block(16) for _ in range(8))), [4, 4], devices=["cpu"] * 2, chunks=4)
    planner = StagePlanner(pipe, lambda pipe: pipe(x).square().mean(), cost="flops")

    def found(plans):
        stages = [{"in flight": one.in_flight, "flops": one.recomputed_flops} for one in plans]
        for told, one in zip(stages, plans, strict=True):
            told |= {"kept": one.kept_bytes, "plan": None if one.plan is None else chosen(one.plan)}
        devices = [
            {"peak": one.peak_bytes, "plain": one.plain_peak_bytes, "floor": one.floor_bytes, "where": one.where}
            for one in plans.devices
        ]
        return {"stages": stages, "devices": devices}

    return {budget: found(planner.plan(budget)) for budget in ("80%", "60%", "min")}


def shaped():
    """The plans for batches of several lengths, of which three are learned."""
    torch.manual_seed(0)
    model = models.GPT(blocks=3, width=32, heads=2, context=256, vocabulary=64)

    def step(model, tokens):
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def batch(length):
        return torch.randint(64, (2, length + 1))

    adaptive = Adaptive(model, step, budget="2500KiB", cost="flops")
    adaptive.learn(*map(batch, (32, 64, 96)))
    for length in (48, 112, 160, 208):
        with adaptive.under(batch(length)):
            pass  # it is planned; that nothing runs is measured, and below what was predicted
    return {
        " x ".join(map(str, one.shape)): {
            "peak": one.peak_bytes,
            "recomputed flops": one.recomputed_flops,
            "recomputed calls": one.recomputed_calls,
        }
        for one in adaptive.plans
    }


# --------------------------------------------------------------------------------------------------------- models


def autocast_gpt():
    model, step = models.gpt_step(blocks=2, width=32, context=64, batch=4, vocabulary=64)

    def cast(model):
        with torch.autocast("cpu", torch.bfloat16):
            return step(model)

    return model, cast


gpt = functools.partial(models.gpt_step, blocks=3, width=32, context=64, batch=4, vocabulary=64)
unet = functools.partial(models.unet_step, batch=1, size=16, width=8)
resnet = functools.partial(models.resnet_step, batch=2, size=16, width=8)
adam = functools.partial(torch.optim.AdamW, lr=1e-3)

GOLDEN: dict[str, Callable[[], dict[str, object]]] = {
    **{name: functools.partial(planned, make, ("75%", "min")) for name, make in KINDS.items()},
    "gpt": functools.partial(planned, functools.partial(gpt, dropout=0.1), SHARES, optimizer=adam),
    "gpt in whole blocks": functools.partial(planned, gpt, SHARES, operators=False),
    "gpt under autocast": functools.partial(planned, autocast_gpt, SHARES),
    "unet": functools.partial(planned, unet, SHARES),
    "resnet": functools.partial(planned, resnet, SHARES, optimizer=functools.partial(torch.optim.SGD, momentum=0.9)),
    "llama": functools.partial(planned, functools.partial(zoo.llama, blocks=2, width=32), ("60%", "min")),
    "t5": functools.partial(planned, functools.partial(zoo.t5, blocks=1, width=32), ("60%", "min")),
    "decoder that is not run": functools.partial(planned, decoders.tiny_step, SHARES, on="meta", device="a100"),
    "blocks that are not run": functools.partial(
        planned, KINDS["frozen and low rank"], ("75%", "min"), on="meta", device="h100"
    ),
    "gpt with a disk": functools.partial(stored, gpt, Disk),
    "resnet with a disk": functools.partial(stored, resnet, Disk),
    "gpt compressed": functools.partial(
        stored, gpt, functools.partial(Compressed, lossy=codecs.BFloat16()), allow_lossy=True
    ),
    "stages of a pipe": staged,
    "gpt of changing lengths": shaped,
}


def path_of(name):
    return FOLDER / f"{name.replace(' ', '_')}.json"


def lines_of(name):
    """The plans as the lines of a file."""
    # What kernels of oneDNN allocate depends on the instructions that the processor has. The public way warns.
    was = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return json.dumps(GOLDEN[name](), indent=1, ensure_ascii=False).splitlines()
    finally:
        torch._C._set_mkldnn_enabled(was)


@pytest.mark.skipif(
    tuple(map(int, LOCKED.split(".")[:2])) != RELEASE or platform.machine() not in ("x86_64", "AMD64"),
    reason=f"kernels of another torch than {LOCKED}, or of another processor, need other bytes",
)
@pytest.mark.parametrize("name", GOLDEN)
def test_plans_are_what_they_were(name):
    expected = path_of(name).read_text().splitlines()

    found = lines_of(name)

    difference = "\n".join(difflib.unified_diff(expected, found, "golden", "now", lineterm="", n=5))
    assert not difference, f"the plans of {name!r} are others:\n{difference}"


def test_every_file_has_a_model():
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name).name for name in GOLDEN}


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or GOLDEN:
        path_of(name).write_text("\n".join(lines_of(name)) + "\n")
        print(f"wrote {path_of(name).name}")
