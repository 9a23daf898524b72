"""The choice for a device against brute force."""

from itertools import product
from random import Random

from schedules.orders import parse
from torchremat.planning.searches.microbatches import Share, SumsPrediction
from torchremat.planning.simulator.split_backward import SplitPrediction
from torchremat.stages.choosing import Choices
from torchremat.stages.loads import DeviceLoad, loads_of
from turns import in_turn

ORDER = parse(["F0.0 F0.1 F1.0 F1.1 B1.0 I0.0 F0.2 W0.0 F1.2 B1.1 B0.1 B1.2 B0.2"])[0]


def share(kept_bytes, forward_bytes, backward_bytes, cost, split=(0, 0, 0)):
    return Share(
        candidate=None,
        kept_bytes=kept_bytes,
        forward_bytes=forward_bytes,
        backward_bytes=backward_bytes,
        cost=cost,
        sums=SumsPrediction(),
        split=SplitPrediction(input_bytes=split[0], between_bytes=split[1], weight_bytes=split[2]),
    )


def some(random):
    """A share that keeps everything, and others that keep less."""
    others = [
        share(
            random.randint(1, 90),
            random.randint(20, 120),
            random.randint(60, 150),
            random.randint(1, 20),
            [random.randint(80, 160) for _ in range(3)],
        )
        for _ in range(5)
    ]
    return [share(100, 120, 140, 0, (150, 110, 130)), *others]


def brute_force(shares, loads, limit):
    """The least cost within a limit."""
    found = [
        sum(one.cost for one in picked)
        for picked in product(*shares.values())
        if max(peak(load, dict(zip(shares, picked, strict=True))) for load in loads) <= limit
    ]
    return min(found, default=None)


def peak(load, picked):
    return load.other_bytes + sum(load.bytes_of(stage, one) for stage, one in picked.items())


@in_turn("seed", range(5))
def test_cheapest(seed):
    random = Random(seed)
    shares = {0: some(random), 1: some(random)}
    loads = loads_of(ORDER, {1: 7})
    choices = Choices(shares, loads)

    for limit in range(choices.floor.peak_bytes - 1, choices.plain.peak_bytes + 20, 29):
        found = choices.cheapest(limit)
        expected = brute_force(shares, loads, limit)
        assert (found is None) == (expected is None), limit
        if found is not None:
            assert found.peak_bytes <= limit
            assert sum(one.cost for one in found.shares.values()) == expected


def test_the_floor_is_the_lowest_peak():
    shares = {0: [share(100, 120, 140, 0), share(10, 50, 160, 5), share(40, 50, 90, 1)]}

    # Two held beside the one that runs: 340, 180 and 170.
    floor = Choices(shares, [DeviceLoad(0, "backward", ((0, 2),))]).floor

    assert (floor.peak_bytes, floor.shares[0].cost) == (170, 1)
