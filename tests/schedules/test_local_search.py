"""Splits changed one value at a time, by hand."""

from schedules.joint_chains import best, chain, order
from torchremat.schedules.joint import split
from torchremat.schedules.saved_values import Saver, lowered, raised


def test_the_value_that_lowers_the_peak_most_for_its_cost_is_no_longer_saved():
    # f1 makes 8 bytes at a cost of 2, f2 makes 4 at a cost of 4.
    joint = chain([4, 8, 4, 4], [9, 2, 4, 9])
    plain = split(joint, {1, 2, 3, 4})

    low = lowered(joint, plain, plain.peak_bytes - 1, below_cost=100)

    assert order(joint, sorted(set(low.forward) & set(low.backward))) == "f1"
    assert lowered(joint, plain, plain.peak_bytes - 1, below_cost=2) is None


def test_what_does_not_come_down_to_the_limit_is_none():
    joint = chain([4, 8, 4, 4], [1, 1, 1, 1])

    assert lowered(joint, split(joint, {1, 2, 3, 4}), 8, below_cost=100) is None
    assert lowered(joint, split(joint, {2, 4}), 100, below_cost=100) == split(joint, {2, 4})


def test_what_must_not_run_again_stays_saved():
    joint = chain([4, 8, 4, 4], [9, float("inf"), 4, 9])

    low = lowered(joint, split(joint, {1, 2, 3, 4}), 20, below_cost=100)

    assert 2 in low.saved


def test_room_is_filled_with_what_costs_most_for_its_bytes():
    joint = chain([4, 4, 4, 4], [1, 5, 3, 1])
    tight = split(joint, {4})

    # Room for one more: f1 is dearest.
    best = raised(joint, tight, tight.peak_bytes)

    assert 2 in best.saved
    assert best.cost < tight.cost
    assert best.peak_bytes <= tight.peak_bytes


def test_a_choice_that_no_price_for_all_bytes_makes():
    # For its bytes f2 is cheaper than f1, so each price for which f1 runs again has f2 run again as well. But b2 reads
    # both of what they make: only f1 alone, for which f2 need not wait, lowers the peak.
    joint = chain([4, 4, 4, 1], [3, 2, 1, 4])

    assert Saver(joint).solve(12).cost == best(joint, 12) == 2
