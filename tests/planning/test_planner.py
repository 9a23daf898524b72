"""From a budget to a plan: within it as predicted and as measured, the optimizer counted, and nothing touched."""

import copy
import math
import re
from functools import cache

import pytest
import torch
from torch import nn

import models
from logs import Log
from planning.kinds import KINDS, Loop, inputs, square
from planning.steps import CPU, differences, fingerprint, outcome, recomputed_flops, traced_peak
from probes.memory import record_allocations
from torchremat import BudgetError, Planner, StepError, UnsupportedError, plan


def gpt():
    return models.gpt_step(blocks=4, width=64, context=128, batch=4)


@cache
def planned_gpt():
    """A model with its step and a planner, for tests that leave the model as it was."""
    model, step = gpt()
    return model, step, Planner(model, step, cost="flops")


def absolute_peak(planner, model, step):
    return planner.fixed_bytes + traced_peak(model, step)


@pytest.mark.parametrize("share", ["100%", "80%", "60%", "floor"])
def test_measured_equals_predicted_and_is_within_the_budget(share):
    model, step, planner = planned_gpt()
    budget = planner.floor_bytes if share == "floor" else share
    plain = outcome(model, step)
    made = planner.plan(budget)

    made.apply(model)
    measured = absolute_peak(planner, model, step)
    flops = recomputed_flops(model, step)
    found = outcome(model, step)
    made.remove(model)

    assert measured == made.step_peak_bytes == made.peak_bytes
    assert measured <= made.budget_bytes
    assert flops == made.recomputed_flops
    assert (made.recomputed_calls > 0) == (share != "100%")
    assert differences(found, plain) == []


def test_the_bytes_before_a_step_are_counted_by_hand():
    model, step = gpt()
    parameters = 4 * sum(p.numel() for p in model.parameters())

    made = plan(model, step, budget="90%")

    # Tokens: four rows of 129 integers of 8 bytes.
    assert made.before_bytes == {
        "parameters": parameters,
        "gradients": 0,
        "buffers": 0,
        "optimizer": 0,
        "inputs": 4 * 129 * 8,
    }
    assert made.optimizer_peak_bytes is None


def test_a_percentage_is_of_the_measured_plain_peak():
    model, step, planner = planned_gpt()
    plain = absolute_peak(planner, model, step)

    made = planner.plan("50%")

    assert made.plain_peak_bytes == plain
    assert made.plain_source == "measured"
    assert made.budget_bytes == plain // 2
    assert made.budget == "50%"


def test_a_plan_for_bytes_predicts_the_plain_step():
    model, step = gpt()
    planner = Planner(model, step)

    made = planner.plan("1GiB")

    assert made.plain_source == "predicted"
    assert made.plain_peak_bytes == absolute_peak(planner, model, step) == made.peak_bytes
    assert made.recomputed_calls == 0
    assert made.budget_bytes == 2**30


def test_a_margin_is_left_free():
    planner = planned_gpt()[2]
    budget = (planner.floor_bytes + planner.plain_peak()[0]) // 2

    made = planner.plan(budget, margin="1MiB")

    assert made.budget_bytes == budget
    assert made.peak_bytes <= budget - 2**20
    assert made.recomputed_flops > planner.plan(budget).recomputed_flops


def test_the_error_names_the_smallest_budget_and_that_one_works():
    model, step, planner = planned_gpt()

    with pytest.raises(BudgetError) as error:
        planner.plan(planner.floor_bytes - 1)
    smallest = int(re.search(r"Smallest budget that works: (\d+) bytes", str(error.value))[1])
    made = planner.plan(smallest)

    assert smallest == planner.floor_bytes
    assert made.peak_bytes <= smallest
    assert re.search(r"at \d+\.\d\d x the plain time", str(error.value))
    made.apply(model)
    measured = absolute_peak(planner, model, step)
    made.remove(model)
    assert measured <= smallest


def test_the_error_counts_the_margin():
    planner = planned_gpt()[2]

    with pytest.raises(BudgetError) as error:
        planner.plan(planner.floor_bytes, margin=1000)
    smallest = int(re.search(r"Smallest budget that works: (\d+) bytes", str(error.value))[1])

    assert smallest == planner.floor_bytes + 1000
    assert planner.plan(smallest, margin=1000).peak_bytes <= smallest - 1000


# --------------------------------------------------------------------------------------------------------- optimizers


def measured_optimizer_peak(optimizer):
    with record_allocations(CPU) as recorder:
        optimizer.step()
    return recorder.trace.peak_bytes


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "adamw single": lambda p: torch.optim.AdamW(p, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("name", "ran"), [*((name, False) for name in OPTIMIZERS), ("adamw foreach", True), ("sgd momentum", True)]
)
def test_the_optimizer_is_counted_and_left_as_it_was(name, ran):
    model, step = models.gpt_step(blocks=2, width=32, context=32, batch=2)
    optimizer = OPTIMIZERS[name](model.parameters())
    if ran:
        step(model).backward()
        optimizer.step()
    step(model).backward()
    before = fingerprint(model, optimizer=optimizer)

    made = plan(model, step, budget="1GiB", optimizer=optimizer)

    assert before.changes(fingerprint(model, optimizer=optimizer)) == []
    parameters = 4 * sum(p.numel() for p in model.parameters())
    counters = 4 * len(list(model.parameters())) if name.startswith("adamw") else 0
    state = {"adamw": 2 * parameters + counters, "sgd": 0, "sgd momentum": parameters}[
        name if name.startswith("sgd") else "adamw"
    ]
    assert made.optimizer_state_bytes == (0 if ran else state)
    assert made.before_bytes["optimizer"] == state
    before_step = made.before_bytes["parameters"] * 2 + (state if ran else 0) + made.before_bytes["inputs"]
    assert made.optimizer_peak_bytes == before_step + measured_optimizer_peak(optimizer)


def test_the_state_counts_in_the_peak_of_forward_and_backward():
    model, step = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    without = plan(model, step, budget="1GiB")
    counted = plan(model, step, budget="1GiB", optimizer=optimizer)

    assert counted.step_peak_bytes == without.step_peak_bytes + counted.optimizer_state_bytes


def test_an_optimizer_that_alone_is_above_the_budget_is_named():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    x = inputs(4, 256)
    step = lambda m: square(m(x))  # noqa: E731
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    planner = Planner(model, step, optimizer=optimizer)

    with pytest.raises(
        BudgetError, match=r"optimizer.step\(\) alone peaks at .* which no recomputation lowers"
    ) as error:
        planner.plan(planner.optimizer_peak_bytes - 1)
    smallest = int(re.search(r"Smallest budget that works: (\d+) bytes", str(error.value))[1])

    assert planner.plan(smallest).peak_bytes <= smallest


def test_an_optimizer_of_other_parameters_is_counted_as_well():
    model, step = gpt()
    other = nn.Linear(64, 64)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1, momentum=0.9)

    made = plan(model, step, budget="1GiB", optimizer=optimizer)

    assert made.before_bytes["parameters"] == 4 * sum(p.numel() for p in [*model.parameters(), *other.parameters()])


def test_a_hook_of_the_optimizer_and_its_scheduler_are_not_run():
    model, step = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ran = Log()
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    optimizer.register_step_pre_hook(lambda *_: ran.append(1))
    state = copy.deepcopy(scheduler.state_dict())

    plan(model, step, budget="1GiB", optimizer=optimizer)

    assert ran == []
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.state_dict() == state


# ------------------------------------------------------------------------------------------------------------ budgets


BAD_BUDGETS = [
    "6GB/s",
    "6 apples",
    60,
    "0.6",
    0.6,
    "40% of weights",
    "",
    " ",
    "-6GiB",
    "nan",
    "0B",
    0,
    -1,
    True,
    math.nan,
    6.0,
    None,
    "0%",
    "-5%",
    "%",
    "6 GiBs",
]


@pytest.mark.parametrize("budget", BAD_BUDGETS, ids=repr)
def test_a_budget_that_is_no_size_is_named_before_anything_runs(budget):
    model, ran = Loop(), Log()

    def step(m):
        ran.append(1)
        return square(m(inputs()))

    with pytest.raises(BudgetError) as error:
        plan(model, step, budget=budget)

    assert repr(budget) in str(error.value)
    assert ran == []


def test_a_budget_above_the_device_is_an_error():
    model, step = gpt()

    with pytest.raises(BudgetError, match=r"budget='900TiB' is 900.00 TiB, but cpu has .* in all"):
        plan(model, step, budget="900TiB")


def test_more_than_a_hundred_percent_keeps_everything():
    model, step = gpt()

    made = plan(model, step, budget="150%")

    assert made.recomputed_calls == 0
    assert made.budget_bytes == made.plain_peak_bytes * 3 // 2


def test_bad_margins_are_errors():
    planner = planned_gpt()[2]

    for margin in ("6GB/s", -1, math.nan):
        with pytest.raises(BudgetError):
            planner.plan("90%", margin=margin)


@pytest.mark.parametrize("cost", ["time", None, 3])
def test_another_cost_is_an_error(cost):
    with pytest.raises(UnsupportedError, match="allowed are 'seconds' and 'flops'"):
        plan(*gpt(), budget="90%", cost=cost)


def test_a_model_that_is_none_is_an_error():
    with pytest.raises(StepError, match=r"expected a torch.nn.Module, got"):
        plan(None, lambda m: None, budget="90%")


# ------------------------------------------------------------------------------------------------- everything as before


def test_the_same_model_is_planned_alike_twice():
    model, step, planner = planned_gpt()

    first, second = (one.plan("60%") for one in (planner, Planner(model, step, cost="flops")))

    assert first.tree == second.tree
    assert first.peak_bytes == second.peak_bytes
    assert first.recomputed_flops == second.recomputed_flops


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_meets_a_tight_budget_and_is_given_back_as_it_was(name):
    model, step = KINDS[name]()
    plain = outcome(model, step)
    step(model).backward()
    before = fingerprint(model)
    planner = Planner(model, step, cost="flops")
    budget = planner.floor_bytes
    made = planner.plan(budget)
    assert before.changes(fingerprint(model)) == []

    made.apply(model)
    measured = absolute_peak(planner, model, step)
    found = outcome(model, step)
    made.remove(model)

    assert before.changes(fingerprint(model)) == []
    assert differences(found, plain) == []
    assert measured <= budget


def test_a_percentage_is_of_the_plain_peak_also_while_a_plan_is_applied():
    model, step = KINDS["loop"]()
    planner = Planner(model, step)
    planner.plan(planner.floor_bytes).apply(model)

    assert planner.plan("100%").budget_bytes == planner.profiled.peak_of(planner.solver.plain)
