"""Recomputes in parts in plans: where units are cut, what that saves, and that plans have no more of it than needed."""

from contextlib import nullcontext
from copy import deepcopy

import pytest
import torch
from torch import nn

import models
from planning.steps import profile
from planning.test_partial_backward import ONE, SIDE
from probes.memory import record_allocations
from probes.planning import cut_options
from torchremat import BudgetWarning, Plan, PlanError, Planner, session


class Chain(nn.Module):
    """Saves its input, and what each of its eight functions returns."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = x * self.scale
        for _ in range(8):
            x = x.tanh()
        return x


def chain():
    torch.manual_seed(0)
    x = torch.randn(SIDE, SIDE)
    return nn.Sequential(Chain()), lambda model: model(x).sum()


def gpt():
    return models.gpt_step(blocks=6, width=32, context=32, batch=8, vocabulary=32)


def gradients(model, step):
    model.zero_grad()
    step(model).backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return found


def step_peak(model, step):
    """The bytes of a step at its peak, over those before it."""
    model.zero_grad()
    with record_allocations(torch.device("cpu")) as recorder:
        step(model).backward()
    return recorder.trace.peak_bytes


def test_cuts_come_where_the_peak_falls_most():
    own = profile(*chain()).blocks

    [(found,)] = cut_options([own])

    assert [(one.cuts, one.early_peak_bytes // ONE) for one in found] == [((4,), 6), ((4, 5), 5)]


def test_a_plan_recomputes_in_parts_below_what_fits_without():
    model, step = gpt()
    planner = Planner(model, step, cost="flops")
    search = planner.solver
    whole_bytes = min(one.floor.prediction.peak_bytes for one in search._all_solvers)

    plan = planner.plan("min")

    assert plan.peak_bytes < 0.9 * (planner.fixed_bytes + whole_bytes)
    parts = len(plan.held[0].cuts) + 1
    assert parts > 2
    assert f"in {parts} parts" in str(plan)
    plain = gradients(model, step)
    plan.apply(model)
    assert all(map(torch.equal, gradients(model, step), plain))
    assert planner.fixed_bytes + step_peak(model, step) == plan.peak_bytes
    plan.remove(model)


ROOTS = {
    "one twice": lambda model, x: model(model(x)),
    "two calls": lambda model, x: model(x) + model(x.flip(0)),
    "submodules": lambda model, x: model[1](model[0](x)),
    "a submodule twice": lambda model, x: model[1](model[0](model[0](x))),
}


@pytest.mark.parametrize("name", ROOTS)
def test_calls_of_several_roots_are_in_parts_alike(name):
    torch.manual_seed(0)
    model = nn.Sequential(Chain(), Chain())
    x, call = torch.randn(SIDE, SIDE), ROOTS[name]

    def step(model):
        return call(model, x).sum()

    planner = Planner(model, step, cost="flops")

    plan = planner.plan("min")

    in_parts = {(plan.units[unit].name, one.cuts) for one in plan.held for unit in one.units}
    assert len(in_parts) == 2 <= sum(len(one.units) for one in plan.held) == len(plan.units)
    plain = gradients(model, step)
    plan.apply(model)
    assert all(map(torch.equal, gradients(model, step), plain))
    assert planner.fixed_bytes + step_peak(model, step) == plan.peak_bytes
    plan.remove(model)


def test_a_plan_has_parts_only_where_regions_alone_do_not_fit():
    planner = Planner(*gpt(), cost="flops")

    for budget in ("85%", "60%", "40%"):
        assert not any(one.cuts for one in planner.plan(budget).held)


def test_a_plan_file_has_the_cuts(tmp_path):
    model, step = gpt()
    plan = Planner(model, step, cost="flops").plan("min")
    path = tmp_path / "plan.json"

    plan.save(path)

    assert Plan.load(path) == plan
    assert Plan.load(path).held[0].cuts == plan.held[0].cuts
    text = path.read_text()
    broken = text.replace('"cuts": [', '"cuts": [0, ', 1)
    assert broken != text
    path.write_text(broken)
    with pytest.raises(PlanError, match="`cuts` are no rising numbers above 0"):
        Plan.load(path)


def test_operators_false_plans_whole_units():
    plan = Planner(*gpt(), cost="flops", operators=False).plan("min")

    assert plan.held == ()


def trained(model, step, optimizer, *, within=nullcontext, retain_graph=False):
    """What three steps leave of the losses and of the parameters."""
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        with within():
            loss = step(model)
            loss.backward(retain_graph=retain_graph)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *model.parameters()]


def adamw(model):
    return torch.optim.AdamW(model.parameters(), foreach=False)


@pytest.mark.parametrize("case", ["float32", "autocast", "copied", "released"])
def test_a_plan_in_parts_trains_as_no_plan_does(case):
    model, plainly = models.gpt_step(blocks=3, width=32, context=32, batch=8, vocabulary=32, dropout=0.1)
    twin = deepcopy(model)

    def step(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
            return plainly(model)

    plain = trained(twin, step, adamw(twin))
    optimizer = adamw(model)
    plan = Planner(model, step, optimizer=optimizer, cost="flops", release_gradients=case == "released").plan("min")
    plan.apply(model)
    planned = deepcopy(model) if case == "copied" else model
    optimizer = adamw(planned) if case == "copied" else optimizer

    found = trained(planned, step, optimizer)

    assert any(one.cuts for one in plan.held)
    assert all(map(torch.equal, found, plain))


def test_a_session_has_the_gradients_and_the_peak_of_no_session():
    model, step = gpt()
    planner = Planner(model, step, cost="flops")
    plan = planner.plan("min")
    plain = gradients(model, step)
    plan.apply(model)

    with session():
        found = gradients(model, step)

    assert all(map(torch.equal, found, plain))
    for passes in (None, 1):
        with session(passes):
            assert planner.fixed_bytes + step_peak(model, step) == plan.peak_bytes


def test_what_a_session_takes_above_the_budget_is_told():
    model, step = gpt()
    twin = deepcopy(model)
    plain, optimizer = trained(twin, step, adamw(twin), retain_graph=True), adamw(model)
    Planner(model, step, optimizer=optimizer, cost="flops").plan("min").apply(model)

    with pytest.warns(BudgetWarning, match="above the budget"):
        found = trained(model, step, optimizer, within=session, retain_graph=True)

    assert all(map(torch.equal, found, plain))
