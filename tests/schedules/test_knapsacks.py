"""Knapsacks, against all choices there are."""

from itertools import chain, combinations

import numpy as np

from torchremat.schedules import knapsacks
from torchremat.schedules.knapsacks import Knapsack
from turns import in_turn


def drawn(seed, things=10):
    """Random things, best for their weight first; those without weight are best of all. With the room for them."""
    random = np.random.default_rng(seed)
    worths = random.integers(1, 30, things).astype(float)
    weights = random.integers(0 if seed % 3 else 1, 12, things).astype(float)
    if seed % 4 == 0:
        worths = weights + 5.0  # the hardest ones: what weighs more is worth more
    order = sorted(range(things), key=lambda i: -(worths[i] / weights[i] if weights[i] else np.inf))
    return worths[order], weights[order], float(random.integers(0, int(weights.sum()) + 2))


def best_worth(worths, weights, room):
    places = range(len(worths))
    every = chain.from_iterable(combinations(places, count) for count in range(len(worths) + 1))
    return max(worths[list(one)].sum() for one in every if weights[list(one)].sum() <= room)


@in_turn("seed", range(80))
def test_a_packing_is_the_best_of_all(seed):
    worths, weights, room = drawn(seed)
    best = best_worth(worths, weights, room)

    knapsack = Knapsack(worths, weights, room)
    found = knapsack.pack()

    assert found.worth == worths[list(found.taken)].sum() == best
    assert weights[list(found.taken)].sum() <= room
    assert knapsack.bound >= best - 1e-9
    assert found.missed is None


def test_a_packing_by_hand():
    # At 10 the best for its weight is the first, of 6; with it only 4 are left, and the other two are worth more.
    found = Knapsack(np.array([9.0, 7.0, 7.0]), np.array([6.0, 5.0, 5.0]), 10.0).pack()

    assert (found.taken, found.worth) == ((1, 2), 14.0)


def test_nothing_fits_or_there_is_nothing():
    assert Knapsack(np.array([3.0]), np.array([2.0]), 1.0).pack().taken == ()
    assert Knapsack(np.zeros(0), np.zeros(0), 1.0).pack().worth == 0.0


@in_turn("seed", range(0, 80, 4))
def test_what_is_not_looked_at_is_worth_no_more_than_is_said(seed, monkeypatch):
    worths, weights, room = drawn(seed)
    best = best_worth(worths, weights, room)
    monkeypatch.setattr(knapsacks, "_MOST_STATES", 2)

    found = Knapsack(worths, weights, room).pack()

    assert weights[list(found.taken)].sum() <= room
    assert found.worth == best if found.missed is None else found.worth <= best <= max(found.worth, found.missed) + 1e-9


def test_with_no_time_left_there_is_a_packing():
    worths, weights, room = np.array([9.0, 7.0, 7.0]), np.array([6.0, 5.0, 5.0]), 10.0

    found = Knapsack(worths, weights, room).pack(ends_s=0.0)

    assert (found.taken, found.worth) == ((0,), 9.0)
    assert found.missed >= 14.0


def test_what_is_worth_no_more_is_not_looked_for():
    knapsack = Knapsack(np.array([9.0, 7.0, 7.0]), np.array([6.0, 5.0, 5.0]), 10.0)

    assert knapsack.pack(above=13.0).worth == 14.0
    assert knapsack.pack(above=14.0).worth == 9.0
    assert knapsack.pack(above=14.0).missed is None


def test_a_thousand_things_are_packed_to_the_end():
    random = np.random.default_rng(0)
    rates = np.sort(random.random(1000))[::-1]
    weights = random.integers(1, 1 << 20, 1000).astype(float)
    worths = rates * weights

    found = Knapsack(worths, weights, weights.sum() / 2).pack()

    assert found.missed is None
    assert found.worth <= Knapsack(worths, weights, weights.sum() / 2).bound
