"""Steps that take different times, against brute force."""

from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchremat import LoopSchedule, ScheduleError
from torchremat.schedules.binomial import CarrySlots, advances
from torchremat.schedules.loop_schedules import within_bytes
from torchremat.schedules.uneven import UnevenSlots


def least(costs, slots):
    """The recurrence, all borders tried."""
    until = [0, *accumulate(costs)]

    @cache
    def time(begin, end, free):
        if end - begin == 1:
            return 0
        if free == 1:
            return sum(until[step] - until[begin] for step in range(begin, end))
        return min(
            until[border] - until[begin] + time(begin, border, free) + time(border, end, free - 1)
            for border in range(begin + 1, end)
        )

    return time(0, len(costs), slots)


def walked(found, costs):
    """The time and the number of the steps that run again when a loop follows the marks."""
    time, runs, pending = 0, 0, [(0, len(costs), found.units)]
    while pending:
        begin, steps, slots = pending.pop()
        borders = [*found.marks(slots - 1, steps, begin).held, steps]
        passed = range(begin, begin + borders[-2]) if len(borders) > 1 else ()
        time, runs = time + sum(costs[one] for one in passed), runs + len(passed)
        if len(borders) == 1:
            for last in range(begin, begin + steps):
                time, runs = time + sum(costs[begin:last]), runs + last - begin
            continue
        for number, (first, end) in enumerate(zip([0, *borders], borders, strict=False)):
            pending.append((begin + first, end - first, slots - number))
    return time, runs


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=13), st.integers(1, 6))
def test_the_time_is_the_least(costs, slots):
    found = UnevenSlots(slots, tuple(map(float, costs)))

    assert found.is_best
    assert found.time == least(costs, slots)
    assert walked(found, costs) == (found.time, found.runs)


@pytest.mark.parametrize(("steps", "slots"), [(1, 1), (20, 3), (90, 7), (100, 30)])
def test_equal_steps_are_the_closed_form(steps, slots):
    found = UnevenSlots(slots, (1.0,) * steps)

    assert found.time == found.runs == advances(steps, slots)


@pytest.mark.parametrize("slots", [3, 30])
def test_a_long_loop_is_never_worse_than_with_equal_steps(slots):
    costs = tuple(20.0 if 700 < step < 740 else 1.0 for step in range(1000))
    found = UnevenSlots(slots, costs)

    class Equal:
        units = slots
        marks = CarrySlots(slots).marks

    assert not found.is_best
    assert walked(found, costs) == (found.time, found.runs)
    assert found.time <= walked(Equal, costs)[0]
    if slots == 3:
        assert found.time < walked(Equal, costs)[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=2, max_size=12), st.integers(3, 30), st.integers(1, 4))
def test_within_bytes_no_slots_for_single_steps_take_less(costs, carries, step):
    times = tuple(map(float, costs))
    if carries < 1 + step:
        return

    found = within_bytes(len(costs), 1, step, carries, step_costs=times)

    assert found.saved_bytes <= carries
    assert found.division.time <= least(times, min(carries - step, len(costs)))
    equal = within_bytes(len(costs), 1, step, carries, mixes=False)
    assert found.division.time <= replace(equal, step_costs=times).division.time


def test_a_schedule_says_what_it_takes():
    schedule = LoopSchedule(steps=7, slots=2, step_costs=(1, 1, 1, 1, 8, 1, 1))

    assert dict(schedule.borders().places) == {0: 0, 5: 0}
    assert schedule.least_recomputed() is None
    assert str(schedule) == (
        "7 steps, 2 slots, 12 steps run again, which takes 1.36 of all steps, no schedule with as many slots takes less"
    )


def test_what_no_costs_are():
    for bad in ((), (1, -1), (float("inf"),)):
        with pytest.raises(ScheduleError, match="at least 1 of each, and costs from 0 on"):
            UnevenSlots(2, bad)
