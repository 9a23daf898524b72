"""What is saved between a forward and its backward: splits by hand, and the choice against all choices."""

import math
import random

import pytest

from schedules.joint_chains import best, chain, order
from torchremat.errors import ScheduleError
from torchremat.schedules.joint import split
from torchremat.schedules.prices import Prices
from torchremat.schedules.saved_values import Saver
from turns import in_turn


def test_a_split_makes_again_as_late_as_it_can():
    joint = chain([1, 1, 1, 1], [1, 1, 1, 1])

    found = split(joint, {2, 4})

    assert order(joint, found.forward) == "f0 f1 f2 f3"
    assert order(joint, found.backward) == "b3 f2 b2 b1 f0 b0"
    assert found.cost == 2  # f2 and f0


def test_the_peak_of_a_split_by_hand():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1])

    # b2: all four values, since the last is the output and stays; the incoming gradient, that of b3, that of b2.
    assert split(joint, {1, 2, 3, 4}).peak_bytes == 16 + 3
    # b2 again: values 2 and 4, value 3 that f2 has just made, and the same three gradients.
    assert split(joint, {2, 4}).peak_bytes == 12 + 3
    # What nobody needs is not saved: 2 is made again for 3, and 1 for 2.
    assert split(joint, {4}).saved == {4}


def test_workspace_is_live_while_its_operator_runs():
    joint = chain([4, 4, 4, 4], [1, 1, 1, 1], workspaces=[0, 0, 10, 0])

    # f2 in the forward: values 1 to 3 and its own. Made again for b2: values 2, 3 and 4, two gradients, and its own.
    assert split(joint, {1, 2, 3, 4}).peak_bytes == 12 + 10
    assert (split(joint, {2, 4}).peak_bytes, split(joint, {2, 4}).where) == (12 + 2 + 10, "f2")


def test_what_needs_a_gradient_cannot_be_saved():
    joint = chain([1, 1], [1, 1])

    with pytest.raises(ScheduleError, match=r"values \[4\] need an incoming gradient"):
        split(joint, {4})


@in_turn("seed", range(12))
def test_the_choice_against_all_choices(seed):
    random.seed(seed)
    steps = 8
    skips = [(random.randrange(1, 4), random.randrange(5, 8))] if seed % 2 else []
    sizes, costs = ([random.randrange(1, 9) for _ in range(steps)] for _ in range(2))
    workspaces = [random.randrange(9) for _ in range(steps)] if seed % 3 == 0 else None
    joint = chain(sizes, costs, skips=skips, workspaces=workspaces)
    saver = Saver(joint)
    plain, floor = saver.plain.peak_bytes, saver.floor.peak_bytes
    total = sum(operator.cost for operator in joint.operators[:steps])

    for limit in sorted({floor, (2 * floor + plain) // 3, (floor + 2 * plain) // 3, plain}):
        found = saver.solve(limit)
        least = best(joint, limit)

        assert found.peak_bytes <= limit
        assert least <= found.cost <= least + 0.06 * total
        assert Prices(joint).bound(limit) <= least + 1e-6
    assert saver.solve(floor - 1) is None


def test_a_lower_limit_costs_more():
    joint = chain([4] * 24, [1] * 24)
    saver = Saver(joint)
    splits = [saver.solve(limit) for limit in range(saver.floor.peak_bytes, saver.plain.peak_bytes + 1, 8)]

    assert [one.cost for one in splits] == sorted((one.cost for one in splits), reverse=True)
    assert splits[0].cost > splits[-1].cost
    # Segments of five: a boundary of each, and all of one. Saving nothing but the end would need all at once.
    assert splits[0].peak_bytes < saver.plain.peak_bytes / 2
    assert split(joint, {24}).peak_bytes >= saver.plain.peak_bytes - 4


def test_the_bound_of_a_chain_of_equals():
    # Nothing of the 24 values of 4 bytes is there but the last, unless it is saved; 40 bytes are room for 10 of them.
    joint = chain([4] * 24, [1] * 24)

    assert Prices(joint).bound(40) == pytest.approx(24 - 10)
    assert Prices(joint).bound(24 * 4) == 0


def test_what_must_not_run_again_is_saved():
    joint = chain([4] * 8, [1, 1, math.inf, 1, 1, math.inf, 1, 1])
    saver = Saver(joint)

    found = saver.floor

    assert {3, 6} <= found.saved
    assert found.peak_bytes < saver.plain.peak_bytes
