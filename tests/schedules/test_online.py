"""Loops of unknown length: the carries that are kept, and what they cost for every length."""

import pytest

from torchremat.schedules.binomial import advances
from torchremat.schedules.online import OnlineBorders


def runs(lengths, slots):
    """All runs of steps: the first forward, those that record, and the advances of the backward."""
    again = sum(advances(length, slots - place) for place, length in enumerate(lengths)) - (lengths[-1] - 1)
    return 2 * sum(lengths) - 1 + again


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1.0), (2, 1.22), (3, 1.12), (4, 1.09), (8, 1.06), (30, 1.02), (64, 1.01)]
)
def test_no_length_costs_much_more_than_if_it_were_known(slots, most):
    borders = OnlineBorders(slots)
    worst = 1.0
    for steps in range(2, 3000):
        borders.next()
        worst = max(worst, runs(borders.lengths, slots) / (advances(steps, slots) + steps))

    assert worst <= most


def test_what_is_dropped_is_what_the_lengths_say():
    borders, kept = OnlineBorders(5), [0]
    for step in range(1, 500):
        dropped = borders.next()
        kept.append(step)
        if dropped is not None:
            assert dropped > 0
            del kept[dropped]
        assert borders.lengths == [end - begin for begin, end in zip(kept, [*kept[1:], step + 1], strict=True)]
        assert len(kept) <= 5


def test_two_slots_allow_no_better_rule_than_1_17():
    """All rules: the second carry stays, or the newest replaces it. None is below for all lengths up to 15."""

    def ratio(border, steps):
        return runs([border, steps - border], 2) / (advances(steps, 2) + steps)

    def ends_below(most):
        places = {1}
        for steps in range(2, 16):
            places = {place for place in places | {steps - 1} if ratio(place, steps) <= most}
        return bool(places)

    assert not ends_below(1.17)
    assert ends_below(1.18)
