"""A plan for bytes is made within them: a unit is split in a watched step where the plan may split it."""

import pytest
import torch

import models
import torchremat
from probes.memory import StorageTracker
from probes.planning import divisible
from torchremat import Planner
from torchremat.extend import only_watches

GPT = {"blocks": 6, "width": 64, "context": 64, "batch": 4, "vocabulary": 64}


@only_watches
class Peak(StorageTracker):
    """The most bytes that were live at an operator's end, over those from before."""

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.most_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.most_bytes = max(self.most_bytes, self.live_bytes)
        return result


@pytest.fixture(scope="module")
def planner():
    return Planner(*models.gpt_step(**GPT), cost="flops")


def planned(budget):
    """The plan for a budget in bytes, and the peak of making it, as the plan counts it."""
    model, step = models.gpt_step(**GPT)
    with Peak() as peak:
        plan = torchremat.plan(model, step, budget=budget, cost="flops")
    return plan, peak.most_bytes + sum(plan.before_bytes.values())


def named_split(planner):
    """The modules that plans of a planner may split."""
    pair = planner.solver.pair
    return {pair.blocks.units.trace.calls[call].name for call in divisible(pair)}


def at(planner, share):
    floor, plain = planner.floor_bytes, planner.plain_peak()[0]
    return int(floor + share * (plain - floor))


@pytest.mark.parametrize("share", [0.15, 0.5])
def test_planning_stays_within_its_budget(planner, share):
    budget = at(planner, share)

    plan, peak_bytes = planned(budget)

    assert peak_bytes <= budget
    # It is as good as with all units split, which takes what the plain step takes.
    best = planner.plan(budget)
    assert plan.peak_bytes <= budget
    assert plan.recomputed_flops <= 1.02 * best.recomputed_flops


def test_without_a_limit_everything_is_seen(planner):
    with Peak() as peak:
        everything = Planner(*models.gpt_step(**GPT), cost="flops")

    assert named_split(everything) == {f"blocks.{number}" for number in range(6)}
    assert peak.most_bytes + everything.fixed_bytes > at(planner, 0.8)


def test_the_last_units_are_split_first(planner):
    few, more = (
        named_split(Planner(*models.gpt_step(**GPT), cost="flops", within=at(planner, share))) for share in (0.2, 0.5)
    )

    assert few < more
    assert few == {f"blocks.{number}" for number in range(6 - len(few), 6)}


def test_a_budget_of_the_smallest_plan_works(planner):
    plan, _ = planned(planner.floor_bytes)

    assert plan.peak_bytes <= planner.floor_bytes
