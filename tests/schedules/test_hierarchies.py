"""Carries in slots and stores: tables against brute force."""

from functools import cache

import pytest

from torchremat.schedules.binomial import advances
from torchremat.schedules.hierarchies import Hierarchy, StoreCost
from torchremat.schedules.loop_schedules import LoopSchedule


@cache
def passing(steps, slots, stores):
    """The least cost, all choices tried, of steps whose first carry passes by; `stores` are triples, fastest first."""
    if not stores:
        return steps + advances(steps, slots)
    *faster, (room, write, read) = stores
    found = [passing(steps, slots, tuple(faster))]
    if room:
        less = (*faster, (room - 1, write, read))
        found += [
            write + first + passing(steps - first, slots, less) + stored(first, slots, less)
            for first in range(1, steps)
        ]
    return min(found)


@cache
def stored(steps, slots, stores):
    """The same for steps whose first carry is in the last store."""
    *faster, (_, _, read) = stores
    found = [passing(steps, slots, tuple(faster))]
    found += [first + passing(steps - first, slots, stores) + stored(first, slots, stores) for first in range(1, steps)]
    return read + min(found)


def costs(stores):
    return tuple(StoreCost(room=room, write_steps=write, read_steps=read) for room, write, read in stores)


def cost_of(traffic, stores):
    (_, write, read) = stores[0]
    return traffic.runs + write * traffic.writes + read * traffic.reads


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("room", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("times", [(0, 0), (1, 1), (3, 2), (50, 50)])
def test_with_one_store_the_cost_is_the_least(slots, room, times):
    stores = ((room, *times),)
    for steps in (1, 2, 5, 17, 40):
        found = Hierarchy(steps, slots, costs(stores))
        least = passing(steps, slots, stores)

        assert cost_of(found.traffic(), stores) == found.cost() == least
        if room == 40:  # as good as no limit
            assert Hierarchy(steps, slots, costs([(None, *times)])).cost() == least


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("rooms", [(1, 1), (2, 3), (0, 2), (3, 0)])
def test_with_two_stores_the_cost_is_the_least(slots, rooms):
    stores = ((rooms[0], 0.5, 0.5), (rooms[1], 4, 3))
    for steps in (1, 3, 9, 24):
        assert Hierarchy(steps, slots, costs(stores)).cost() == passing(steps, slots, stores)


def test_what_the_schedule_says():
    stores = costs([(None, 5, 5)])
    schedule = LoopSchedule(steps=1000, slots=4, stores=stores)

    assert schedule.recomputed_steps == 2589
    assert schedule.least_recomputed() is None
    assert str(schedule) == "1000 steps, 4 slots, 65 carries to the store and 65 back, 2589 steps run again"
    assert schedule.recomputed_steps < advances(1000, 4)


def test_a_long_loop_has_places_at_every_few_steps():
    found = Hierarchy(10_000, 4, costs([(20, 1, 1), (50, 10, 10)]))
    unlimited = Hierarchy(10_000, 4, costs([(None, 5, 5)]))

    assert found.stride > 1
    assert found.traffic().runs < 10_000 + advances(10_000, 4)
    assert unlimited.traffic().writes == unlimited.traffic().reads
    assert set(found.first_places().values()) == {0, 1, 2}
