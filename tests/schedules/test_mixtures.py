"""Bytes for carries or recorded steps: tables against brute force, and replayed on integers."""

from functools import cache

import pytest

from torchremat.schedules.loop_schedules import within_bytes
from torchremat.schedules.mixtures import MixtureTable

NEVER = 10**6


@cache
def fewest(steps, free, sizes, is_held):
    """The fewest runs of steps, all choices tried, given that the carry of the first is held or passes by."""
    carry, step, own = sizes
    if steps == 0:
        return 0
    needed = own if is_held else step
    found = [1 + fewest(steps - 1, free - needed, sizes, False)] if free >= needed else []
    if is_held:
        found += [
            first + fewest(first, free, sizes, True) + fewest(steps - first, free, sizes, False)
            for first in range(1, steps)
        ]
    elif free >= carry:
        found.append(fewest(steps, free - carry, sizes, True))
    return min(found, default=NEVER)


SIZES = [(1, 1, 0), (1, 2, 1), (2, 3, 1), (1, 3, 3), (2, 2, 2), (3, 1, 0), (2, 5, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_runs_are_the_fewest(sizes):
    for units in range(1, 14):
        table = MixtureTable(16, units, *sizes)
        for steps in range(1, 17):
            expected = fewest(steps, units, sizes, False)
            assert table.runs(steps) == (expected if expected < NEVER else None)


def replayed(table, steps):
    """Run a loop on integers; return the runs of steps, and the most carries and units that are in memory."""
    held, recorded, runs, most = set(), {}, steps, [0, 0]

    def leave(marks, start, is_held):
        held.update(start + one for one in marks.held)
        for one in marks.recorded:
            own = start + one in held or (one == 0 and is_held)
            recorded[start + one] = table.own if own else table.step
        most[0] = max(most[0], len(held))
        most[1] = max(most[1], len(held) * table.carry + sum(recorded.values()))

    leave(table.first_marks(steps), 0, False)
    for step in reversed(range(steps)):
        if step not in recorded:
            start = max(one for one in held if one <= step)
            used = len(held) * table.carry + sum(recorded.values())
            leave(table.marks(table.units - used, step - start + 1), start, True)
            runs += step - start + 1
        del recorded[step]
        held.discard(step)
    assert not held
    assert not recorded
    return runs, *most


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("steps", [1, 5, 17, 60])
def test_a_replay_takes_what_the_table_says(sizes, steps):
    for units in range(max(sizes[1], sizes[0] + sizes[2]), 40, 3):
        table = MixtureTable(steps, units, *sizes)
        if table.runs(steps) is None:
            continue
        runs, carries, most = replayed(table, steps)

        assert runs == table.runs(steps)
        assert (carries, most) == (table.most(steps).carries, table.most(steps).units)
        assert most <= units


def test_known_numbers():
    """Of 31 units each holds a carry or a recorded step: 2.52 forwards in all for each step of 1,000."""
    table = MixtureTable(1000, 31, 1, 1, 0)

    assert table.runs(1000) == 2522
    assert table.first_marks(7).recorded == (0, 1, 2, 3, 4, 5, 6)
    assert MixtureTable(7, 4, 1, 1, 0).first_marks(7).held == (0,)
    assert MixtureTable(7, 4, 1, 1, 0).first_marks(7).recorded == (4, 5, 6)


@pytest.mark.parametrize("steps", [3, 30, 100, 1000])
@pytest.mark.parametrize(("carry", "step", "shared"), [(1, 1, 1), (1, 2, 1), (4, 6, 4), (3, 4, 0), (100, 250, 100)])
def test_a_budget_with_a_mixture_is_never_worse(steps, carry, step, shared):
    for parts in (1, 2, 5, 20):
        budget = carry + parts * step
        mixed = within_bytes(steps, carry, step, budget, shared_bytes=shared)
        blocks = within_bytes(steps, carry, step, budget, shared_bytes=shared, mixes=False)

        assert mixed.recomputed_steps <= blocks.recomputed_steps
        assert mixed.saved_bytes <= budget


def test_a_mixture_that_is_the_best_there_is():
    schedule = within_bytes(1000, 8, 8, 31 * 8, shared_bytes=8)

    assert (schedule.units, schedule.unit_bytes, schedule.block) == (31, 8, 1)
    assert schedule.recomputed_steps == schedule.least_recomputed() == 1522
    assert str(schedule) == (
        "1000 steps, up to 30 carries of 8 B, and recorded steps in their place, 248 B at most, 1522 steps run again, "
        "no schedule with these bytes runs fewer than 1522"
    )


def test_a_long_loop_mixes_blocks():
    schedule = within_bytes(10_000, 1, 1, 65, shared_bytes=1)
    blocks = within_bytes(10_000, 1, 1, 65, shared_bytes=1, mixes=False)

    assert schedule.block > 1
    assert schedule.recomputed_steps < blocks.recomputed_steps
