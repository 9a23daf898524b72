import math
import random
from dataclasses import fields, replace
from functools import cache
from math import comb

import pytest

from schedules.brute_force import as_tree, evaluate, make_option, make_stage, random_chain, shape, trees
from schedules.within import Within
from torchremat.errors import BudgetError
from torchremat.schedules import tables
from torchremat.schedules.chain import Chain, KeepNode, RegionNode
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.persistent import least_cost

SHAPES = [(1, 3, 40), (2, 3, 60), (3, 2, 60), (3, 3, 30), (4, 1, 150), (4, 2, 12), (5, 1, 40)]


@cache
def brute_force(chain):
    """All (peak, cost) that no other tree beats, from the lowest peak on."""
    front = []
    for peak, cost in sorted({evaluate(chain, forest) for forest in trees(chain)}):
        if not front or cost < front[-1][1]:
            front.append((peak, cost))
    return front


def cheapest(front, limit):
    return min((cost for peak, cost in front if peak <= limit), default=math.inf)


def some_limits(front, seed):
    draw, low, high = random.Random(seed), front[0][0], front[-1][0]
    return {low - 1, low, high, high + 5, *(peak for peak, _ in front), *(draw.randint(low, high) for _ in range(3))}


@pytest.mark.parametrize(("stages", "options", "chains"), SHAPES)
def test_equals_brute_force_over_all_trees(stages, options, chains):
    for seed in range(chains):
        chain = random_chain(seed, stages, options)
        front = brute_force(chain)
        table = Within(chain, front[-1][0] + 5, slot_bytes=1)

        assert table.floor() == front[0][0]
        for limit in range(max(0, front[0][0] - 2), front[-1][0] + 6):
            tree = table.solve(limit)
            assert table.cost(limit) == cheapest(front, limit), (seed, limit)
            assert (tree is None) == (limit < front[0][0]), (seed, limit)
            if tree is not None:
                outcome = interpret(chain, tree)
                assert outcome.peak_bytes <= limit
                assert outcome.cost == table.cost(limit)


def magnified(chain, seed):
    """The chain with bytes some 40 times as high, none of them round, and fractional costs."""
    draw = random.Random(seed)

    def change(owner):
        changes = {}
        for field in fields(owner):
            value = getattr(owner, field.name)
            if field.name.endswith("bytes"):
                changes[field.name] = value * 40 + draw.randint(0, 20)
            elif field.name in ("forward", "cost"):
                changes[field.name] = value + draw.random()
            elif field.name in ("options", "stages"):
                changes[field.name] = tuple(map(change, value))
        return replace(owner, **changes)

    return change(chain)


@pytest.mark.parametrize(("stages", "options", "chains"), [(3, 2, 20), (4, 1, 20), (5, 1, 5)])
def test_equals_brute_force_on_larger_numbers(stages, options, chains, monkeypatch):
    monkeypatch.setattr(tables, "_TILE", 100)  # so that rows of some thousand slots are cut into many
    for seed in range(chains):
        chain = magnified(random_chain(seed, stages, options), seed)
        front = brute_force(chain)
        limits = some_limits(front, seed)

        table = Within(chain, max(limits), slot_bytes=1)

        assert table.floor() == front[0][0]
        for limit in limits:
            # Seven digits, as the tables are float32.
            assert table.cost(limit) == pytest.approx(cheapest(front, limit), rel=1e-6), (seed, limit)


@pytest.mark.parametrize("slot", [2, 3, 7])
def test_rounding_never_exceeds_the_limit(slot):
    for seed in range(40):
        chain = random_chain(seed, 4, 1)
        front = brute_force(chain)
        table = Within(chain, front[-1][0] + 20, slot_bytes=slot)
        for limit in range(front[-1][0] + 21):
            tree = table.solve(limit)

            assert tree is not None or limit < table.floor()
            assert table.cost(limit) >= cheapest(front, limit)
            assert tree is None or interpret(chain, tree).peak_bytes <= limit


def test_cost_falls_with_the_limit():
    chain = random_chain(1, 30, 3)
    full = interpret(chain, tuple(KeepNode(stage) for stage in range(30))).peak_bytes
    table = Within(chain, full, slot_bytes=1)

    costs = [table.cost(limit) for limit in range(table.floor(), full + 1)]

    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]
    assert math.isinf(table.cost(table.floor() - 1))


def revolve_forwards(steps, slots):
    """Griewank and Walther, ACM TOMS 26(1), 2000: forward steps to reverse `steps` steps with `slots` states."""
    sweeps = next(sweeps for sweeps in range(steps) if comb(slots + sweeps, slots) >= steps)
    return sweeps * steps - comb(slots + sweeps, slots + 1)


@pytest.mark.parametrize("slots", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [2, 3, 7, 12, 20])
def test_equal_stages_cost_what_revolve_costs(steps, slots):
    # A stage saves its input of one byte and nothing else, so a stopped forward costs nothing, as in revolve, where a
    # step is recorded as part of its reversal. One more byte is the state that is being advanced.
    stage = make_stage(make_option(0, peak=0, stopped=0, back=0), truncated=0, drop=0)
    table = Within(Chain(stages=(stage,) * steps), slots + 1, slot_bytes=1)

    # The first sweep, of steps - 1 forwards, is no extra cost.
    assert table.cost(slots + 1) == revolve_forwards(steps, slots) - (steps - 1)


def test_trees_of_four_equal_stages():
    # Kept, a stage holds its input of 1 and 3 of its own; a region holds 1. Backward adds 2.
    stage = make_stage(make_option(3, peak=4, stopped=3, back=2), forward=3, truncated=2)
    chain = Chain(stages=(stage,) * 4)
    table = Within(chain, 18, slot_bytes=1)

    solutions = {limit: shape(tree) for limit in (18, 15, 8, 7) if (tree := table.solve(limit))}

    assert solutions == {
        18: "0 1 2 3",  # 4 * 4 + 2
        15: "0 1 [2] 3",  # 3 * 4 + 1 + 2
        8: "[0] [[1] 2] 3",  # 1 + 1 + 4 + 2
        7: "[[[0] 1] 2] 3",  # 1 + 4 + 2
    }
    # At 8: one forward of 3 and three stopped ones of 2. At 7: 3 + 3 + 2, then 3 + 2, then 2.
    assert [table.cost(limit) for limit in (18, 15, 8, 7)] == [0, 2, 9, 15]
    assert table.floor() == 7


def test_a_second_option_is_taken_where_it_is_cheaper():
    # Both hold an input of 1; backward adds 3. Dropping 4 of the 6 saved bytes costs 1, a region of one stage 5 or 6.
    stage = make_stage(make_option(6, peak=6), make_option(2, cost=1, peak=6), forward=5, truncated=5)
    chain = Chain(stages=(stage,) * 2)
    table = Within(chain, 17, slot_bytes=1)

    assert table.solve(17) == (KeepNode(0, 0), KeepNode(1, 0))  # 7 + 7 + 3
    assert table.solve(16) == (KeepNode(0, 0), KeepNode(1, 1))  # 7 + 3 + 3, and 7 + 1 + 6 in the forward of stage 1
    assert table.solve(13) == (KeepNode(0, 1), KeepNode(1, 0))  # 3 + 7 + 3
    assert [table.cost(limit) for limit in (17, 16, 14, 13, 12)] == [0, 1, 1, 1, 2]


def test_a_nested_region_that_ends_its_parent_is_never_better():
    # Why the solver has no cut behind the last stage: no tree of all loses by moving such children up.
    for seed in range(30):
        chain = random_chain(seed, 4, 1)
        for forest in trees(chain):
            for place, node in enumerate(forest):
                if isinstance(node, list) and isinstance(node[-1], list):
                    raised = [*forest[:place], [*node[:-1], *node[-1]], *forest[place + 1 :]]
                    peak, cost = evaluate(chain, forest)
                    raised_peak, raised_cost = evaluate(chain, raised)
                    assert raised_peak <= peak
                    assert raised_cost <= cost


@pytest.mark.parametrize("scale", [1, 1000, 123_457])
def test_default_slots_lose_little(scale):
    option = make_option(14 * scale, peak=18 * scale, stopped=15 * scale, back=6 * scale)
    stage = make_stage(option, forward=3, truncated=2, linked=scale, output=scale, drop=5 * scale)
    chain = Chain(stages=(stage,) * 24)
    full = interpret(chain, tuple(KeepNode(index) for index in range(24))).peak_bytes
    table = Within(chain, full)

    # All is kept at 24 * 15 + 6. Half of it: 11 stages kept, 11 regions of one stage at 2, one of two at 3 + 2, which
    # is 11 * 15 + 12 + 6 = 183 and costs 27. With 12 regions of one stage it would be 12 * 15 + 12 + 6 = 198.
    assert full == 366 * scale
    assert table.cost(full) == 0
    assert table.cost(full // 2) == 27


def test_the_lowest_tree_may_nest_as_deep_as_the_chain_is_long():
    # Only a tree in which each region holds one input and its first part fits into two bytes.
    stage = make_stage(make_option(0, peak=0, stopped=0, back=0), truncated=0, drop=0)
    chain = Chain(stages=(stage,) * 300)
    table = Within(chain, 2, slot_bytes=1)

    outcome = interpret(chain, table.solve(2))

    assert (outcome.peak_bytes, outcome.cost) == (2, 299 * 298 / 2)


def test_a_limit_far_above_all_costs_no_precision():
    chain = random_chain(0, 12, 2)
    table = Within(chain, 10**12)

    assert table.slot_bytes == 1
    assert table.solve(10**12) == table.solve(10**6)
    assert table.floor() == Within(chain, 1000, slot_bytes=1).floor()


def test_limits_are_checked():
    chain = random_chain(0, 2, 1)

    with pytest.raises(BudgetError, match="limit_bytes=-1 must be at least 0"):
        Within(chain, -1)
    with pytest.raises(BudgetError, match="slot_bytes=0 at least 1"):
        Within(chain, 30, slot_bytes=0)


def test_trees_as_brute_force_writes_them():
    assert as_tree([(0, 1), [(1, 0), [(2, 0)]]]) == (
        KeepNode(0, 1),
        RegionNode((KeepNode(1), RegionNode((KeepNode(2),)))),
    )


@pytest.mark.parametrize("slot_bytes", [1, 40, 150])
def test_rounding_down_is_a_bound(slot_bytes):
    tight = 0
    for seed in range(20):
        chain = magnified(random_chain(seed, 4, 2), seed)
        high = interpret(chain, tuple(KeepNode(stage) for stage in range(4))).peak_bytes
        table = Within(chain, high, slot_bytes=1)
        for limit in range(0, high, max(1, high // 12)):
            bound, best = least_cost(chain, limit, slot_bytes), table.cost(limit)

            assert bound <= best, (seed, limit)
            tight += bound == pytest.approx(best, rel=1e-4)
    # It is near as well: with slots of one byte it is the best itself.
    assert tight >= {1: 250, 40: 150, 150: 80}[slot_bytes]
