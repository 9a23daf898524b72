"""Units that are kept in part: bytes to the byte, flops exactly, and every run equal to the plain one."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models
from planning.kinds import square
from planning.steps import Measured, blocks, differences, outcome, recomputed_flops, traced_peak, under
from probes.memory import PACKAGES, FlopCounter
from probes.planning import KeepNode, Overheads, flow_of, options_of, pooled_seconds, predict, unit_seconds
from probes.regions import Collecting, Replaying
from torchremat import BudgetError, OrderWarning, Plan, Planner


class InPlace(nn.Module):
    """Convolution, batch normalisation, ReLU in place and dropout, twice."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.dropout(F.relu(norm(convolution(x)), inplace=True), 0.1, self.training)
        return x


def in_place():
    torch.manual_seed(0)
    model = nn.Sequential(*(InPlace() for _ in range(3)))
    x = torch.randn(4, 8, 12, 12)
    return model, lambda m: square(m(x))


STEPS = {
    "gpt": lambda: models.gpt_step(blocks=3, width=32, context=32, batch=2, vocabulary=64),
    "gpt dropout": lambda: models.gpt_step(blocks=3, width=32, context=32, batch=2, vocabulary=64, dropout=0.1),
    "unet": lambda: models.unet_step(batch=1, size=32, width=8),
    "in place": in_place,
}


@cache
def known(name):
    """A model with its step, its profile with options, and what a plain step computes."""
    model, step = STEPS[name]()
    own = blocks(model, step)
    return model, step, replace(own, options=options_of(own, "flops")), outcome(model, step)


def tree_of(own, pick):
    """The tree in which each unit with options has the one that `pick` picks of their number; 0 is to keep it all."""
    return tuple(KeepNode(unit, pick(len(options)) if options else 0) for unit, options in enumerate(own.options))


PICKS = {
    "most held": lambda _: 1,
    "half held": lambda count: (count + 1) // 2,
    "least held": lambda count: count,
}


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize("name", STEPS)
def test_predicted_is_measured(name, pick):
    model, step, own, plain = known(name)
    tree = tree_of(own, PICKS[pick])
    predicted = predict(own, tree)

    with under(model, own, tree):
        runs = Measured(model, step)
        measured, found, flops = runs.peak(), outcome(model, step), runs.recomputed_flops()

    assert differences(found, plain) == []
    assert flops == predicted.flops
    assert measured == predicted.peak_bytes


def test_options_lie_between_keep_and_recompute():
    _, _, own, _ = known("gpt")
    plain = predict(own, tree_of(own, lambda _: 0)).kept_bytes

    kept = [predict(own, tree_of(own, lambda _, number=number: number)).kept_bytes for number in range(1, 9)]
    flops = [options.flops for options in own.options[3]]

    *flops, lowest = flops  # the last one is for the lowest peak, at any cost
    assert [len(options) for options in own.options] == [0, 0, 9, 9, 9, 0, 0]
    assert kept == sorted(set(kept), reverse=True)
    assert kept[0] < plain
    assert flops == sorted(flops)
    assert flops[0] == 0
    assert 0 < max(flops[-1], lowest) < own.costs[3].flops_truncated


def test_the_operators_of_a_step_cost_what_a_forward_costs():
    model, step, own, _ = known("gpt")
    with FlopCounter() as counter, torch.no_grad():
        step(model)

    flops, block = flow_of(own), flow_of(own, 3)
    seconds = unit_seconds(own, 3, pooled_seconds(own.units.trace.operators.runs))

    assert sum(one.cost for one in flops.operators) == counter.total
    assert sum(seconds) == pytest.approx(own.costs[3].seconds)
    assert sum(one.cost for one in block.operators) == own.costs[3].flops
    needed = sum(value.size_bytes for value in block.values if value.needed and value.size_bytes and not value.holdable)
    assert needed == 0


def test_each_operator_that_is_not_held_runs_again_once():
    model, step, own, _ = known("gpt")
    option = own.options[3][2]
    tree = tree_of(own, lambda _: 0)
    tree = (*tree[:3], KeepNode(3, 3), *tree[4:])
    products = [n for n, name in enumerate(option.operators) if name in {"aten.addmm.default", "aten.mm.default"}]

    with FlopCounter() as plain:
        step(model).backward()
    with under(model, own, tree), FlopCounter() as counter:
        step(model).backward()
    model.zero_grad()

    assert products
    assert counter.total - plain.total == option.flops
    assert set(products) & set(option.ordinals)


@pytest.mark.parametrize("name", ["gpt", "unet", "in place"])
def test_a_policy_sees_as_many_operators_as_were_counted(name, monkeypatch):
    # Those after the last one that is held cost nothing, so a plan that holds the first products of blocks is cheaper.
    model, step, own, _ = known(name)
    each = Overheads(region_s=0.0, collected_s=1.0, replayed_s=1e6)
    own = replace(own, overheads=each)
    own = replace(own, options=options_of(own, "flops"))
    seen = {Collecting: 0, Replaying: 0}

    def counted(kind):
        operator = kind.operator

        def run(self, *args):
            seen[kind] += 1
            return operator(self, *args)

        return run

    for kind in seen:
        monkeypatch.setattr(kind, "operator", counted(kind))
    chosen = [options[0] for options in own.options if options]
    with under(model, own, tree_of(own, lambda _: 1)):
        step(model).backward()
    model.zero_grad()

    # An alias that a hook makes of what is saved is no operator to a log.
    replayed, collected = divmod(sum(option.overhead_s for option in chosen), 1e6)
    assert 0 < seen[Replaying] == pytest.approx(replayed, rel=0.1)
    assert seen[Collecting] == pytest.approx(collected, rel=0.1)
    operators = sum(len(flow_of(own, unit).operators) for unit, one in enumerate(own.options) if one)
    assert seen[Collecting] < operators or name == "in place"  # there a write comes last


@cache
def planned():
    planner = Planner(*STEPS["gpt"](), cost="flops")
    floor, plain = planner.floor_bytes, planner.plain_peak()[0]
    return planner, planner.plan(floor + (plain - floor) // 2)


def test_a_plan_with_operators_recomputes_less_than_one_without():
    planner, made = planned()
    without = Planner(*STEPS["gpt"](), cost="flops", operators=False)

    assert made.held
    assert not without.plan(made.budget_bytes).held
    assert made.recomputed_flops < without.plan(made.budget_bytes).recomputed_flops
    assert made.peak_bytes <= made.budget_bytes
    with pytest.raises(BudgetError):
        planner.plan(planner.floor_bytes - 8192)


def test_operators_never_make_a_plan_dearer():
    # Near the lowest peak the plan with operators recomputed 3% more than the one without.
    with_operators, without = (
        Planner(*models.gpt_step(blocks=48, width=64, context=64, vocabulary=64), cost="flops", operators=operators)
        for operators in (True, False)
    )
    lowest, plain = without.solver.floor.prediction.peak_bytes, without.solver.plain.prediction.peak_bytes

    for share in (40, 20):
        limit = lowest + (plain - lowest) // share
        assert with_operators.solver.solve(limit).cost <= without.solver.solve(limit).cost


def test_a_plan_with_operators_is_written_and_read(tmp_path):
    _, made = planned()

    made.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    model, step = STEPS["gpt"]()
    plain = outcome(model, step)
    read.apply(model)

    assert read == made
    assert differences(outcome(model, step), plain) == []
    assert traced_peak(model, step) == made.step_peak_bytes - sum(made.before_bytes.values())
    assert f"keep {len(made.held[0].held)} of {len(made.held[0].operators)} operators" in str(made)


def test_a_copy_of_a_planned_model_holds_the_same():
    _, made = planned()
    model, step = STEPS["gpt"]()
    plain = outcome(model, step)
    made.apply(model)

    twin = copy.deepcopy(model)

    assert differences(outcome(twin, step), plain) == []
    assert recomputed_flops(twin, step) == made.recomputed_flops


def test_operators_that_the_plan_does_not_know_are_recomputed_and_told_once():
    model, step, own, _ = known("gpt dropout")
    tree = tree_of(own, lambda _: 1)
    model.eval()
    plain = torch.autograd.grad(step(model), list(model.parameters()))

    with under(model, own, tree):
        with pytest.warns(OrderWarning, match=r"runs aten\..* planned with aten\..* there; .* plan again") as told:
            ours = torch.autograd.grad(step(model), list(model.parameters()))
        again = torch.autograd.grad(step(model), list(model.parameters()))  # any warning is an error here
    model.train()

    assert all(map(torch.equal, ours, plain)) and all(map(torch.equal, again, plain))
    assert len(told) == len({str(one.message) for one in told})
    assert not any(one.filename.startswith(PACKAGES) for one in told)  # the line of the model that runs the operator


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_code_has_no_options():
    model, step = models.gpt_step(blocks=2, width=16, context=8, batch=1, vocabulary=16)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")

    own = blocks(model, step)

    assert options_of(own, "flops") == ()
