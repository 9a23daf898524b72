"""What a balance is to those who use it."""

import operator
from fractions import Fraction

import numpy as np
import pytest
import torch

from torchremat.errors import ScheduleError
from torchremat.pipeline.balance import Balance, balance


def test_a_balance_is_a_sequence_of_counts():
    found = balance([1, 2, 3, 4, 5, 6], 2)

    assert found == [4, 2]
    assert operator.eq([4, 2], found)
    assert found == (4, 2)
    assert found == balance([10, 20, 30, 40, 50, 60], 2)
    assert found != [2, 4]
    assert found != "42"
    assert list(found) == [4, 2]
    assert (len(found), sum(found), found[0], found[-1], found[1:]) == (2, 6, 4, 2, (2,))
    assert len({found, balance([1, 2, 3, 4, 5, 6], 2)}) == 1
    assert repr(found) == "Balance(counts=(4, 2), unit='')"


def test_costs_are_numbers_of_any_kind():
    costs = [np.float32(1.5), torch.tensor(2.0), np.int64(3), Fraction(1, 2)]

    found = balance(costs, 2)

    assert found == [2, 2]
    assert found.costs == (1.5, 2.0, 3.0, 0.5)
    assert [type(cost) for cost in found.costs] == [float, float, float, float]


def test_costs_of_stages():
    found = balance([1, 2, 3, 4, 5, 5], 2)

    assert found.stages == (range(4), range(4, 6))
    assert found.stage_costs == (10, 10)
    assert found.shares == (0.5, 0.5)
    assert found.bottleneck == 0
    assert balance([0, 0], 2).shares == (0.0, 0.0)


def test_tables():
    seconds = Balance(counts=(2, 1), costs=(0.001, 0.002, 1.5), unit="s", names=("embed", "block", "head"))
    sizes = Balance(counts=(1, 1), costs=(3 << 20, 1 << 20), unit="B", names=("0", "1"))
    free = balance([0, 0, 0], 2)

    assert str(seconds) == (
        "stage  layers          count     cost  share\n"
        "    0  embed .. block      2  3.00 ms   0.2%\n"
        "    1  head                1   1.50 s  99.8%\n"
        "stage 1 costs most: 2.00 x an even share of 50.0%"
    )
    assert str(sizes) == (
        "stage  layers  count      cost  share\n"
        "    0  0           1  3.00 MiB  75.0%\n"
        "    1  1           1  1.00 MiB  25.0%\n"
        "stage 0 costs most: 1.50 x an even share of 50.0%"
    )
    assert str(free) == (
        "stage  layers  count  cost  share\n    0  0 .. 1      2     0   0.0%\n    1  2           1     0   0.0%"
    )


@pytest.mark.parametrize(
    ("costs", "partitions", "message"),
    [
        ([1], 0, "balance: partitions=0: expected a positive integer."),
        ([1], True, "balance: partitions=True: expected a positive integer."),
        ([1], 1.0, "balance: partitions=1.0: expected a positive integer."),
        (
            [1, 2],
            3,
            "balance: partitions=3, but there are 2 layers, and each needs one; give at most that.",
        ),
        ([1, -2], 1, "balance: costs: -2 at 1; a cost is a finite number, at least 0."),
        (
            [float("nan"), "2", None, float("inf")],
            5,
            "balance: 2 problems:\n"
            "  partitions=5, but there are 4 layers, and each needs one; give at most that.\n"
            "  costs: nan at 0, '2' at 1, None at 2, and 1 more; a cost is a finite number, at least 0.",
        ),
    ],
)
def test_what_cannot_be_balanced(costs, partitions, message):
    with pytest.raises(ScheduleError) as raised:
        balance(costs, partitions)

    assert str(raised.value) == message
