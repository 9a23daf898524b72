"""Partitions against all partitions there are."""

import itertools
import random
from fractions import Fraction

import pytest

from torchremat.pipeline.balance.partition import partition


def every_partition(length, blocks):
    for cuts in itertools.combinations(range(1, length), blocks - 1):
        ends = [0, *cuts, length]
        yield tuple(after - before for before, after in itertools.pairwise(ends))


def sums(costs, counts):
    ends = [0, *itertools.accumulate(counts)]
    return [sum(map(Fraction, costs[start:end])) for start, end in itertools.pairwise(ends)]


def best(costs, blocks):
    """The least maximum, then the least sum of squared counts, then the longest first blocks; no code is shared."""
    return min(
        every_partition(len(costs), blocks),
        key=lambda counts: (max(sums(costs, counts)), sum(c * c for c in counts), [-c for c in counts]),
    )


def drawn(seed, kind):
    draw = random.Random(f"{seed} {kind}")
    length = draw.randint(1, 9)
    cost = {
        "small": lambda: draw.randint(0, 3),
        "large": lambda: draw.randint(0, 10**15),
        "floats": lambda: draw.choice([0.1, 0.2, 0.3, 1e-9, 0.0]),
        "skewed": lambda: draw.random() ** 9 * 1e6,
        "zeros": lambda: draw.choice([0, 0, 0, 0, 5]),
    }[kind]
    return [cost() for _ in range(length)], draw.randint(1, length)


@pytest.mark.parametrize("kind", ["small", "large", "floats", "skewed", "zeros"])
def test_partitions_are_the_best_of_all(kind):
    for seed in range(150):
        costs, blocks = drawn(seed, kind)

        assert partition(costs, blocks) == best(costs, blocks), (costs, blocks)


@pytest.mark.parametrize(
    ("costs", "blocks", "counts"),
    [
        ([1, 2, 3, 4, 5, 6], 2, (4, 2)),
        ([10, 20, 30, 40, 50, 60], 2, (4, 2)),
        ([0, 0, 0, 0, 0], 3, (2, 2, 1)),
        ([1, 1, 1, 1, 1, 1, 1], 3, (3, 2, 2)),
        ([5], 1, (1,)),
        ([3, 1, 4], 1, (3,)),
        ([3, 1, 4], 3, (1, 1, 1)),
        ([10, 1, 1, 1, 1, 1, 1], 3, (1, 3, 3)),
        ([0, 0, 0, 7, 0, 0, 0], 2, (4, 3)),
        # In floats 0.1 + 0.1 + 0.1 is more than 0.3, and a block of that much would not do.
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 3, (3, 3, 3)),
        ([1e-300, 1e300, 1e-300], 2, (2, 1)),
    ],
)
def test_partitions(costs, blocks, counts):
    assert partition(costs, blocks) == counts


def test_a_heuristic_that_stops_early_is_not_followed():
    # The heuristic of Barany and others, which torchgpipe uses, moves one layer at a time from block to block, and
    # stops when the largest block is above the smallest by no more than the range of the costs. It begins with
    # (1, 1, 3) here, and ends there: twice what is needed.
    costs = [1, 1, 2, 1, 1]

    counts = partition(costs, 3)

    assert counts == (2, 1, 2)
    assert [max(sums(costs, one)) for one in (counts, (1, 1, 3))] == [2, 4]


def test_long_rows_are_cut():
    # 64 blocks of 2000 equal layers: 2000 = 64 * 31 + 16. A layer that outweighs all others leaves the others
    # free: 1999 = 63 * 31 + 46.
    even = partition([1.5] * 2000, 64)
    skewed = partition([0.25] * 1999 + [1e6], 64)

    assert even == (32,) * 16 + (31,) * 48
    assert skewed == (32,) * 46 + (31,) * 17 + (1,)
