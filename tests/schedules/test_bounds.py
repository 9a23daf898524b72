"""The bound over all schedules, against the best of all schedules found by search."""

import heapq
import math
import random
from functools import cache
from itertools import pairwise

import pytest

from torchremat.errors import ScheduleError
from torchremat.schedules.bounds import Pull, Regions, lower_bound
from torchremat.schedules.dataflow import Dataflow, Operator, Value

NO_REGIONS = Regions(saved_cost=(), begun_cost=())


def make_flow(operators, sizes, needed=()):
    """Operators as (inputs, outputs, cost)."""
    return Dataflow(
        operators=tuple(
            Operator(name=f"o{i}", inputs=inputs, outputs=outputs, cost=float(cost))
            for i, (inputs, outputs, cost) in enumerate(operators)
        ),
        values=tuple(Value(size_bytes=size, needed=number in needed) for number, size in enumerate(sizes)),
    )


def chain_flow(sizes, costs):
    """A chain in which value 0 comes from outside, and operator i makes value i + 1 of value i."""
    return make_flow([((i,), (i + 1,), cost) for i, cost in enumerate(costs)], [0, *sizes], range(1, len(sizes) + 1))


def random_problem(seed):
    draw = random.Random(seed)
    count = draw.randint(2, 6)
    operators, sizes = [], [draw.choice([0, 2])]
    for _ in range(count):
        inputs = tuple(sorted(draw.sample(range(len(sizes)), min(len(sizes), draw.randint(1, 2)))))
        outputs = tuple(range(len(sizes), len(sizes) + draw.choice([1, 1, 1, 2])))
        sizes += [draw.randint(0, 4) for _ in outputs]
        operators.append((inputs, outputs, draw.choice([0, 1, 2, 3, 5])))
    flow = make_flow(operators, sizes)
    pulls = [
        Pull(
            reads=tuple(sorted(draw.sample(range(len(sizes)), draw.randint(0, 2)))),
            other_bytes=draw.choice([0, 0, 1, 3]),
        )
        for _ in range(draw.randint(1, 6))
    ]
    return flow, pulls, draw.randint(2, max(3, sum(sizes)))


def cheapest(flow, pulls, limit, regions=NO_REGIONS):
    """Return the least cost of what runs again, by Dijkstra over what is live; infinite if nothing fits.

    All of the first forward is free here, and everything that it makes is there when backward begins: more freedom
    than any schedule has, and none that the bound excludes. What is saved in regions costs once for each operator that
    runs again, and something begins wherever one runs that is not the next after the last, or after a pull.
    """
    size = [value.size_bytes for value in flow.values]
    made = [value for operator in flow.operators for value in operator.outputs]
    # Sets of values are the bits of a number.
    reads = [bits(pull.reads) for pull in pulls]
    operators = [
        (number, bits(operator.inputs), bits(operator.outputs), operator.cost)
        for number, operator in enumerate(flow.operators)
        if math.isfinite(operator.cost)
    ]

    @cache
    def bytes_of(live):
        return sum(size[value] for value in made if live >> value & 1)

    # A state: how many pulls are done, and what is live. Before the first pull anything may be thrown away.
    start = (0, bits(range(len(size))), None, 0)
    costs, queue, count = {start: 0.0}, [(0.0, 0, start)], 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if cost > costs[state]:
            continue
        done, live, last, ran = state
        if done == len(pulls):
            return cost
        found = [(cost, (done, live ^ 1 << value, last, ran)) for value in made if live >> value & 1]
        if not reads[done] & ~live and bytes_of(live) + pulls[done].other_bytes <= limit:
            found.append((cost, (done + 1, live, None, ran)))
        for number, inputs, outputs, price in operators:
            # A recompute takes no bytes here: the bound does not count them either.
            if not inputs & ~live:
                price += cost
                if regions.begun_cost and (last is None or number != last + 1):
                    price += regions.begun_cost[number]
                if regions.saved_cost and not ran >> number & 1:
                    price += regions.saved_cost[number]
                runs = (number, ran | 1 << number) if regions.begun_cost else (None, ran)
                found.append((price, (done, live | outputs, *runs)))
        for price, after in found:
            if price < costs.get(after, math.inf):
                costs[after] = price
                count += 1
                heapq.heappush(queue, (price, count, after))
    return math.inf


def bits(values):
    return sum(1 << value for value in set(values))


def test_the_bound_is_never_above_the_best_of_all_schedules():
    tight = 0
    for seed in range(120):
        flow, pulls, limit = random_problem(seed)

        best, bound = cheapest(flow, pulls, limit), lower_bound(flow, pulls, limit)

        assert bound <= best + 1e-9, f"seed {seed}"
        tight += bound >= best - 1e-3 if math.isfinite(best) else math.isinf(bound)
    # It says something, too: in most of them it is the best itself.
    assert tight >= 100


def test_the_bound_with_regions_is_never_above_the_best_of_all_schedules():
    higher = 0
    for seed in range(160):
        flow, pulls, limit = random_problem(seed)
        draw = random.Random(seed)
        saved = tuple(float(draw.choice([0, 1, 2])) for _ in flow.operators)
        begun = tuple(float(draw.choice([1, 2])) for _ in flow.operators)
        regions = Regions(saved_cost=saved, begun_cost=begun)

        best = cheapest(flow, pulls, limit, regions)
        bound, without = (lower_bound(flow, pulls, limit, regions=one) for one in (regions, None))

        assert bound <= best + 1e-9, f"seed {seed}"
        assert bound >= without - 1e-3
        higher += math.isfinite(bound) and bound > without + 0.5
    # In most of them nothing has to run again.
    assert higher >= 8


def test_regions_by_hand():
    # With 5 bytes the second and the first value are made again, in one go: one begins, and what both save is put away.
    flow = chain_flow([2, 2, 4], [5, 1, 2])
    pulls = [Pull(reads=(3,)), Pull(reads=(2,)), Pull(reads=(1,))]
    regions = Regions(saved_cost=(0.5, 0.25, 9.0), begun_cost=(10.0, 20.0, 30.0))

    assert lower_bound(flow, pulls, 5, regions=regions) == pytest.approx(6.0 + 0.75 + 10.0, abs=1e-2)


def test_the_bound_falls_with_the_limit():
    for seed in range(12):
        flow, pulls, _ = random_problem(seed)
        total = sum(value.size_bytes for value in flow.values) + 3

        bounds = [lower_bound(flow, pulls, limit) for limit in range(total + 1)]

        assert all(low >= high - 1e-3 for low, high in pairwise(bounds)), f"seed {seed}"
        assert bounds[-1] == 0.0


def test_a_chain_by_hand():
    # Three values of 2, 2 and 4 bytes, at costs 5, 1 and 2: with 6 bytes one has to go, and the second is the cheapest.
    flow = chain_flow([2, 2, 4], [5, 1, 2])
    pulls = [Pull(reads=(3,)), Pull(reads=(2,)), Pull(reads=(1,))]

    assert lower_bound(flow, pulls, 8) == 0.0
    assert lower_bound(flow, pulls, 6) == pytest.approx(1.0, abs=1e-3)
    # With 5 bytes the first pull leaves 1, so all that comes after it is made again, of which each is made once.
    assert lower_bound(flow, pulls, 5) == pytest.approx(6.0, abs=1e-3)
    # The last value alone has 4.
    assert math.isinf(lower_bound(flow, pulls, 3))


def test_gradients_take_their_bytes():
    flow = chain_flow([2, 2], [3, 1])
    free, taken = ([Pull(reads=(2,), other_bytes=beside), Pull(reads=(1,))] for beside in (0, 1))

    assert lower_bound(flow, free, 4) == 0.0
    assert lower_bound(flow, taken, 4) == pytest.approx(3.0, abs=1e-3)


def test_values_are_whole():
    # Two values of 3 bytes in 5: one of them is made again, not a third of it.
    flow = make_flow([((0,), (1,), 3), ((0,), (2,), 3)], [0, 3, 3], (1, 2))
    pulls = [Pull(reads=()), Pull(reads=(1,)), Pull(reads=(2,))]

    assert lower_bound(flow, pulls, 5) == pytest.approx(3.0, abs=1e-3)


def test_what_must_not_run_again_is_held():
    flow = chain_flow([2, 2], [math.inf, 1])
    pulls = [Pull(reads=(2,)), Pull(reads=(1,))]

    assert lower_bound(flow, pulls, 2) == math.inf
    assert lower_bound(flow, pulls, 4) == 0.0


def test_backward_that_reads_what_there_is_not():
    with pytest.raises(ScheduleError, match=r"reads the values \[7\], but the dataflow has 3"):
        lower_bound(chain_flow([1, 1], [1, 1]), [Pull(reads=(7,))], 4)
