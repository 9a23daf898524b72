from itertools import chain, combinations

import numpy as np
import pytest

from torchremat.schedules.dataflow import Dataflow, Operator, Value
from torchremat.schedules.operator_selection import choices, evaluate, holdable, select
from turns import in_turn


def block(*, width=1):
    """A transformer's block in numbers: norm, product, attention, product, add, norm, product, gelu, product, add."""
    sizes = [1, 1, 3, 1, 1, 1, 1, 4, 4, 1, 1]
    reads = [(0,), (1,), (2,), (3,), (0, 4), (5,), (6,), (7,), (8,), (5, 9)]
    costs = [1, 30, 10, 10, 1, 1, 40, 4, 40, 1]
    saves = {0: 1, 1: 1, 2: 2, 3: 3, 5: 5, 6: 6, 7: 7, 8: 8}
    return Dataflow(
        operators=tuple(
            Operator(name=f"{i}", inputs=reads[i], outputs=(i + 1,), cost=float(cost)) for i, cost in enumerate(costs)
        ),
        values=tuple(
            Value(size_bytes=width * size, needed=i in saves, saved_after=saves.get(i, 0))
            for i, size in enumerate(sizes)
        ),
    )


def drawn(seed, operators=7):
    """A random dataflow with values from outside, operators of two outputs, writes in place and infinite costs."""
    random = np.random.default_rng(seed)
    values = [Value(size_bytes=0, needed=True, holdable=bool(random.integers(2)), saved_after=int(random.integers(3)))]
    made = []
    for index in range(operators):
        inputs = sorted({int(random.integers(len(values))) for _ in range(2)})
        outputs = tuple(range(len(values), len(values) + 1 + int(random.integers(2))))
        for _ in outputs:
            values.append(
                Value(
                    size_bytes=int(random.integers(1, 9)),
                    needed=bool(random.integers(2)),
                    holdable=random.random() < 0.9,
                    saved_after=int(random.integers(index + 1, operators + 1)),
                )
            )
        cost = float("inf") if random.random() < 0.05 else float(random.integers(1, 20))
        made.append(
            Operator(
                name=str(index),
                inputs=tuple(inputs),
                outputs=outputs,
                cost=cost,
                replaceable=random.random() < 0.8,
            )
        )
    return Dataflow(operators=tuple(made), values=tuple(values))


def by_brute_force(flow, limit_bytes, overhead):
    """The least cost, and the fewest bytes that have it."""
    can = holdable(flow)
    every = chain.from_iterable(combinations(can, count) for count in range(len(can) + 1))
    found = [evaluate(flow, held, overhead=overhead) for held in every]
    return min(
        ((one.cost, one.held_bytes) for one in found if one.held_bytes <= limit_bytes), default=(float("inf"), 0)
    )


@in_turn("seed", range(120))
def test_a_selection_is_the_best_of_all(seed):
    flow = drawn(seed)
    overhead = 0.5 * (seed % 2)

    for limit_bytes in (0, 5, 12, 20, 40):
        found = select(flow, limit_bytes, overhead=overhead)
        best, fewest_bytes = by_brute_force(flow, limit_bytes, overhead)

        if found is None:
            assert best == float("inf")
        else:
            assert (found.cost, found.held_bytes) == (best, fewest_bytes)
            assert found.bound == found.cost
            assert evaluate(flow, found.held, overhead=overhead).cost == found.cost


def test_what_is_cheap_to_compute_again_is_not_held():
    found = select(block(), 9)

    # The products and attention are held: of 3, 1, 1 (the product, not the sum that backward needs), 4.
    assert found.held == {1, 2, 3, 6}
    # The two norms, the sum, and gelu run again.
    assert (found.held_bytes, found.cost, found.ends) == (9, 1 + 1 + 1 + 4, 8)


def test_a_recompute_ends_at_the_last_value_that_is_missing():
    found = select(block(), 13)

    # With the output of gelu held, no recompute gets to it, nor to the second norm.
    assert found.ends == 6
    assert found.cost == pytest.approx(3)


def test_all_that_is_needed_can_be_held():
    found = select(block(), 1000)

    assert (found.cost, found.ends) == (0, 0)
    assert found.held_bytes == 1 + 3 + 1 + 1 + 1 + 4 + 4


def test_choices_are_a_pareto_set():
    found = choices(block(width=1 << 20))

    assert len(found) >= 5
    assert [one.held_bytes for one in found] == sorted({one.held_bytes for one in found}, reverse=True)
    assert [one.cost for one in found] == sorted({one.cost for one in found})
    assert found[-1].cost < evaluate(block(), ()).cost


def test_code_that_must_not_run_again_is_held_or_nothing_is():
    flow = Dataflow(
        operators=(Operator(name="once", inputs=(), outputs=(0,), cost=float("inf")),),
        values=(Value(size_bytes=8, needed=True, saved_after=1),),
    )

    assert select(flow, 7) is None
    assert select(flow, 8).held == {0}


def test_the_bound_of_an_unfinished_solution_is_no_higher_than_the_best():
    flow = drawn(3, operators=60)
    unfinished, best = select(flow, 60, cap_s=0.0), select(flow, 60)

    assert unfinished.bound < best.cost <= unfinished.cost
    assert unfinished.held_bytes <= 60


def test_of_equal_operators_the_last_are_held():
    # Their backward comes first: with them held the recompute can wait.
    values = [Value(size_bytes=0), *(Value(size_bytes=4, needed=True, saved_after=i) for i in range(1, 6))]
    flow = Dataflow(
        operators=tuple(Operator(name=str(i), inputs=(0,), outputs=(i + 1,), cost=1.0) for i in range(5)),
        values=tuple(values),
    )

    assert select(flow, 8).held == {3, 4}


def test_bytes_count_where_costs_are_equal():
    # Flops know nothing of elementwise operators: to hold what they make would take bytes for nothing.
    flow = Dataflow(
        operators=tuple(Operator(name=str(i), inputs=(i,), outputs=(i + 1,), cost=0.0) for i in range(3)),
        values=(Value(size_bytes=4), *(Value(size_bytes=4, needed=True, saved_after=i) for i in range(1, 4))),
    )

    assert select(flow, 100).held == frozenset()
