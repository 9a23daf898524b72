"""Loops of unknown length: the carries that are kept, and what they cost for every length."""

from fractions import Fraction

import pytest

from torchremat.schedules.binomial import OnlineBorders, advances


def runs(lengths, slots):
    """All runs of steps: the first forward, those that record, and the advances of the backward."""
    again = sum(advances(length, slots - place) for place, length in enumerate(lengths)) - (lengths[-1] - 1)
    return 2 * sum(lengths) - 1 + again


@pytest.mark.parametrize(
    ("slots", "most"), [(1, 1.0), (2, 41 / 35), (3, 1.12), (4, 1.09), (8, 1.06), (30, 1.02), (64, 1.01)]
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


def test_two_slots_allow_no_better_rule():
    """All rules: the second carry stays, or the newest replaces it. None is below 41/35 for all lengths up to 15."""

    def places_within(most, longest):
        places = {1}
        for steps in range(2, longest + 1):
            fewest = advances(steps, 2) + steps
            places = {one for one in places | {steps - 1} if runs([one, steps - one], 2) <= most * fewest}
        return places

    assert not places_within(Fraction(41, 35) - Fraction(1, 10**9), 15)
    assert places_within(Fraction(41, 35), 300)


def test_two_slots_for_very_many_steps():
    borders = OnlineBorders(2)
    for steps in range(2, 20_000):
        borders.next()
        assert 35 * runs(borders.lengths, 2) <= 41 * (advances(steps, 2) + steps)
