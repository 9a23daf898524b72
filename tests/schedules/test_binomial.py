"""The closed forms, against the recurrence that they solve and the solver of chains."""

from functools import cache
from itertools import pairwise

import pytest

from schedules.binomial_trees import binomial_tree
from schedules.brute_force import make_option, make_stage
from schedules.within import Within
from torchremat import ScheduleError
from torchremat.schedules.binomial import advances, first_borders, most_steps, next_border, repeats_for
from torchremat.schedules.chain import Chain
from torchremat.schedules.interpreter import interpret


@cache
def fewest(steps, slots):
    """The recurrence: the next carry goes into a slot after `first` steps, or none does."""
    if steps == 1:
        return 0
    if slots == 1:
        return steps * (steps - 1) // 2
    return min(first + fewest(first, slots) + fewest(steps - first, slots - 1) for first in range(1, steps))


@pytest.mark.parametrize("slots", range(1, 11))
def test_advances_are_the_fewest(slots):
    lengths = range(1, 120)

    assert [advances(steps, slots) for steps in lengths] == [fewest(steps, slots) for steps in lengths]


@pytest.mark.parametrize("slots", range(2, 11))
def test_the_next_border_is_one_of_the_best(slots):
    for steps in range(2, 120):
        first = next_border(steps, slots)
        assert first + fewest(first, slots) + fewest(steps - first, slots - 1) == fewest(steps, slots)


def walked(steps, slots):
    """The advances of a loop that follows the borders, counted by walking."""
    stack, total, borders = [(0, steps, slots, True)], 0, 0
    while stack:
        first, length, free, is_first = stack.pop()
        if not is_first or length > 1:
            total += length - 1
        if length == 1:
            continue
        inside = [*first_borders(length, free), length]
        borders = max(borders, len(inside) - 1 + slots - free)
        # The last stretch has no advance of its own: this walk has ended at its last step.
        for number, (begin, end) in enumerate(pairwise(inside)):
            if end == length:
                if end - begin > 1:
                    stack.append((first + begin, end - begin - 1, free - number, False))
            else:
                stack.append((first + begin, end - begin, free - number, False))
    assert borders <= slots
    return total


@pytest.mark.parametrize("slots", [*range(1, 65, 7), 2, 3])
def test_ten_thousand_steps_walked_as_they_run(slots):
    steps = 300 if slots == 1 else 10_000

    assert walked(steps, slots) == advances(steps, slots)


def test_known_numbers():
    assert advances(1000, 30) == 3 * 1000 - most_steps(31, 2) == 2472
    assert repeats_for(1000, 30) == 3
    assert [most_steps(slots, 2) for slots in (1, 2, 3, 30)] == [3, 6, 10, 496]
    assert first_borders(10, 3) == [0, 4, 7]
    assert first_borders(5, 30) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("steps", "slots"), [(2, 1), (3, 2), (6, 2), (10, 3), (14, 3), (20, 4), (24, 6)])
def test_it_is_the_cheapest_tree_of_the_chain(steps, slots):
    # A carry has one byte; a step that is recorded saves it, and nothing else.
    option = make_option(0, input=True, peak=1, stopped=0, back=1)
    chain = Chain(stages=(make_stage(option, linked=1, output=1, drop=1),) * steps)
    outcome = interpret(chain, binomial_tree(steps, slots))

    # Recorded are all steps but the last; the first forward is not counted.
    assert outcome.cost == advances(steps, slots) - (steps - 1) + (steps - 1)
    assert Within(chain, outcome.peak_bytes, 1).cost(outcome.peak_bytes) <= outcome.cost


@pytest.mark.parametrize("bad", [(0, 1), (1, 0), (-1, 3)])
def test_no_steps_or_slots(bad):
    for function in (advances, next_border, first_borders, repeats_for):
        with pytest.raises(ScheduleError, match=f"steps={bad[0]} and slots={bad[1]} must be at least 1"):
            function(*bad)
