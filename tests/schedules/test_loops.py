"""Blocks, slots and stores: how a budget is divided, and how far from the best that is."""

from functools import cache
from math import isqrt

import pytest

from torchremat import BudgetError, LoopSchedule, ScheduleError
from torchremat.schedules.binomial import advances
from torchremat.schedules.hierarchies import StoreCost
from torchremat.schedules.loop_schedules import least_recomputed, within_bytes


@pytest.mark.parametrize("steps", [4, 30, 100, 999, 1000, 2000, 10_000])
@pytest.mark.parametrize(("carry", "step"), [(1, 1), (1, 4), (3, 2), (64, 256), (10, 1000)])
def test_never_more_than_the_checkpoint_by_hand(steps, carry, step):
    root = isqrt(steps)
    by_hand = -(-steps // root) * carry + root * step

    schedule = within_bytes(steps, carry, step, by_hand)
    half = within_bytes(steps, carry, step, by_hand // 2)

    assert schedule.saved_bytes <= by_hand
    assert schedule.recomputed_steps <= steps
    assert half.saved_bytes <= by_hand // 2
    assert half.recomputed_steps < (8 if steps > 4 else 9) * steps


@cache
def best(steps, free, carry, step, is_held):
    """The fewest further runs of steps whose first carry is live; `is_held` if its bytes are counted elsewhere."""
    if steps == 0:
        return 0
    if is_held:
        # The step that is recorded takes over the carry, whose bytes are then free.
        found = [1 + best(steps - 1, free - step + carry, carry, step, False)] if free + carry >= step else []
        found += [
            first + best(first, free, carry, step, True) + best(steps - first, free, carry, step, False)
            for first in range(1, steps)
        ]
        return min(found, default=10**6)
    found = [1 + best(steps - 1, free - step, carry, step, False)] if free >= step else []
    if free >= carry:
        found += [
            (first if first < steps else 0)
            + best(first, free - carry, carry, step, True)
            + best(steps - first, free - carry, carry, step, False)
            for first in range(1, steps + 1)
        ]
    return min(found, default=10**6)


@cache
def best_in_all(steps, free, carry, step):
    """The same for a loop, whose first forward runs all steps anyway."""
    if steps == 0:
        return 0
    found = [best_in_all(steps - 1, free - step, carry, step)] if free >= step else []
    if free >= carry:
        found += [
            best(first, free - carry, carry, step, True) + best_in_all(steps - first, free - carry, carry, step)
            for first in range(1, steps + 1)
        ]
    return min(found, default=10**6)


@pytest.mark.parametrize(("carry", "step"), [(1, 1), (1, 2), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("steps", [3, 6, 11])
def test_the_bound_is_one(carry, step, steps):
    for budget in range(carry + step, 3 * steps):
        fewest = best_in_all(steps, budget, carry, step)
        assert least_recomputed(steps, carry, step, budget) <= fewest
        assert within_bytes(steps, carry, step, budget).recomputed_steps >= fewest


def test_known_distances_from_the_bound():
    hand = within_bytes(10_000, 64, 256, 100 * 64 + 100 * 256)
    tight = within_bytes(10_000, 1, 4, 20)

    assert (hand.slots, hand.block, hand.recomputed_steps, hand.least_recomputed()) == (100, 100, 9900, 9871)
    assert (tight.slots, tight.block, tight.recomputed_steps, tight.least_recomputed()) == (16, 1, 44_015, 40_789)


def test_slots_alone_are_the_best_there_is():
    schedule = LoopSchedule(steps=1000, slots=30)

    assert schedule.recomputed_steps == advances(1000, 30) == 2472
    assert schedule.least_recomputed() == schedule.recomputed_steps
    assert str(schedule) == (
        "1000 steps, 30 slots, 2472 steps run again, no schedule with these bytes runs fewer than 2472"
    )


def test_budgets_below_one_step():
    with pytest.raises(BudgetError, match=r"a budget of 7 B .* a carry has 4 B, and autograd saves 4 B in a step"):
        within_bytes(10, 4, 4, 7)
    with pytest.raises(BudgetError, match=r"a budget of 9 B .* saves 6 B .* Smallest budget that works: 10 B"):
        within_bytes(10, 4, 6, 9, shared_bytes=2)
    with pytest.raises(BudgetError, match=r"a budget of 7 B .* saves 4 B .* Smallest budget that works: 8 B"):
        within_bytes(1, 4, 6, 7, shared_bytes=2)


def test_what_no_schedule_is():
    with pytest.raises(ScheduleError, match="slots=0 must be at least 1"):
        LoopSchedule(steps=3, slots=0)
    with pytest.raises(ScheduleError, match="room and costs must be at least 0"):
        StoreCost(room=3, write_steps=-1, read_steps=0)
    with pytest.raises(ScheduleError, match="length of the loop is not known"):
        LoopSchedule(steps=None, slots=2).borders()
