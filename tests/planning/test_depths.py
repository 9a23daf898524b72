"""Plans of long chains: how deep their regions nest, and that what nests so deep runs."""

import inspect
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from planning.steps import CPU, outcome
from probes.planning import DEEPEST, Calls, KeepNode, PlannedCall, RegionNode, depth, installed, kept
from probes.regions import Settings
from torchremat import PlanError, Planner


class Calling(nn.Module):
    """One small module, called many times."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.cell = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        for _ in range(self.calls):
            x = self.cell(x)
        return x


def calling(calls):
    torch.manual_seed(0)
    model, x = Calling(calls), torch.randn(4, 4)
    return model, lambda m: m(x).sum()


def early(count):
    """The lowest tree of stages alike, `(((0) 1) 2)`: all is recomputed anew for each stage."""
    node = RegionNode((KeepNode(0),))
    for stage in range(1, count):
        node = RegionNode((node, KeepNode(stage)))
    return node


def late(count):
    """`(0 (1 (2)))`: the first backward asks for recomputes of all regions, each inside of the one before."""
    node = RegionNode((KeepNode(count - 1),))
    for stage in reversed(range(count - 1)):
        node = RegionNode((KeepNode(stage), node))
    return node


@contextmanager
def half_a_stack():
    """Room for half of the calls that Python's default limit has room for."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 500 + 60)  # and those of the model, the step and this test
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


@cache
def long():
    return Planner(*calling(300), device=CPU, cost="flops", operators=False)


def test_a_long_chain_has_a_plan():
    # Trees were looked up by hashes that were made by as many calls in one another as the chain has units.
    with half_a_stack():
        found = long().plan("100%")

    assert len(found.units) == 300
    assert depth(found.tree) == 0
    assert found.floor_bytes < found.peak_bytes


def test_trees_of_long_chains_are_judged_as_deep_as_they_run():
    with half_a_stack():
        found = long().solver.whole.judged((late(299), KeepNode(299)))

    assert depth(found.tree) == DEEPEST
    assert [node.stage for node in kept(found.tree)] == list(range(300))


@pytest.mark.parametrize("shape", [early, late])
def test_the_deepest_regions_run_in_half_of_a_stack(shape):
    model, step = calling(DEEPEST + 1)
    units = tuple((PlannedCall(name="cell", number=unit, inside=frozenset({"cell"})),) for unit in range(DEEPEST + 1))
    calls = Calls(units=units, others=(), roots=("",))
    tree = (shape(DEEPEST), KeepNode(DEEPEST))
    plain = outcome(model, step)

    with installed(model, calls, tree, Settings()), half_a_stack():
        found = outcome(model, step)

    assert depth(tree) == DEEPEST
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_a_plan_that_nests_deeper_is_refused():
    model, step = calling(4)
    found = Planner(model, step, device=CPU, cost="flops", operators=False).plan("100%")
    node = KeepNode(3)
    for _ in range(DEEPEST + 1):
        node = RegionNode((node,))
    deep = replace(found, tree=(KeepNode(0), KeepNode(1), KeepNode(2), node))

    with pytest.raises(PlanError, match="regions that nest 65 deep, more than the 64 that Python's stack has room for"):
        deep.apply(model)
    assert step(model).grad_fn is not None
