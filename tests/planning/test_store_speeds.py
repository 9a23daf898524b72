"""What a store's speed is measured as, on a clock that only the store and what is computed beside it move on."""

from dataclasses import replace

import pytest
import torch

import models
import torchremat
from planning.test_stores_in_plans import Counting, budget_of
from torchremat._compat import accelerators
from torchremat.measuring import store_speeds
from torchremat.measuring.store_speeds import Payload, measured_speed
from torchremat.planning.searches.storing import Storing

CPU = torch.device("cpu")


class Clock:
    """Seconds that go by where somebody says so."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


# Of two, so that sums are exact; short, as a store is that can be measured several times.
UNIT_S = 2.0**-20


class Queue:
    """A store that takes 2 units of who puts, and writes 4 and 1 a KiB afterwards; a read takes 3 of who gets."""

    def __init__(self, clock):
        self.clock = clock
        self.free_s = 0.0

    def put(self, tensor):
        self.clock.now += 2 * UNIT_S
        self.free_s = max(self.free_s, self.clock.now) + (4 + tensor.nbytes / 1024) * UNIT_S
        return Queued(self, tensor)


class Queued:
    def __init__(self, store, tensor):
        self.store = store
        self.tensor = tensor.clone()
        self.stored_bytes = tensor.nbytes
        self.written_s = store.free_s

    def settle(self):
        self.store.clock.now = max(self.store.clock.now, self.written_s)

    def prefetch(self):
        pass

    def get(self):
        self.store.clock.now += 3 * UNIT_S
        return self.tensor


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(accelerators, "time", clock)

    def compute(_self, times):
        clock.now += times * UNIT_S

    monkeypatch.setattr(store_speeds._Timed, "_compute", compute)
    return clock


def test_what_is_waited_for_and_what_it_takes_from_the_model_are_told_apart(clock):
    payload = Payload(tensors=((4096, torch.float32), (2048, torch.bool)))
    speed = measured_speed(Queue(clock), CPU, payload, None)

    # 32 tensors of 1 KiB: the first is put in 2 units, then all are written one after the other, 5 each.
    assert speed.out.tensor_s == (2 + 32 * 5) / 32 * UNIT_S
    # Who has something else to do loses what it puts, and nothing that is written meanwhile.
    assert speed.out.busy_tensor_s == 2 * UNIT_S
    # Two tensors of 6 KiB: 2, and 2 * 4 + 6.
    assert speed.out.byte_s == ((2 + 2 * 4 + 6) * UNIT_S - 2 * speed.out.tensor_s) / 6144
    assert speed.out.busy_byte_s == 0
    # What is read by who needs it is never beside anything.
    assert speed.back.tensor_s == speed.back.busy_tensor_s == 3 * UNIT_S
    assert speed.back.byte_s == speed.back.busy_byte_s == 0
    assert speed.spread == 0


class Line:
    """A store for which everybody waits, and that counts: so many bytes a second each way, and so long a tensor."""

    def __init__(self, clock, byte_s, tensor_s):
        self.clock, self.byte_s, self.tensor_s = clock, byte_s, tensor_s
        self.moved_bytes = 0

    def move(self, tensor):
        self.clock.now += self.tensor_s + tensor.nbytes * self.byte_s
        self.moved_bytes += tensor.nbytes

    def put(self, tensor):
        self.move(tensor)
        return Lined(self, tensor)


class Lined:
    def __init__(self, store, tensor):
        self.store, self.tensor, self.stored_bytes = store, tensor.clone(), tensor.nbytes

    def prefetch(self):
        pass

    def get(self):
        self.store.move(self.tensor)
        return self.tensor


FOUR_OF_8_MIB = Payload(tensors=((8 * 2**20, torch.float32),) * 4)


def test_a_slow_store_is_measured_with_few_bytes(clock):
    # 32 MiB were moved some twenty times, which takes two minutes at 10 MB/s.
    store = Line(clock, byte_s=1e-7, tensor_s=0.0)
    speed = measured_speed(store, CPU, FOUR_OF_8_MIB, None)

    assert clock.now < 4
    assert store.moved_bytes < 2**25
    assert speed.measured_bytes == 2**18  # four times as much would take a little more than a tenth of a second
    for search_budget in (speed.out, speed.back):
        assert search_budget.byte_s + search_budget.tensor_s / 2**18 == pytest.approx(1e-7)
        assert search_budget.busy_byte_s == search_budget.byte_s


def test_a_store_that_takes_a_second_for_anything_is_moved_twice(clock):
    store = Line(clock, byte_s=0.0, tensor_s=1.0)
    speed = measured_speed(store, CPU, FOUR_OF_8_MIB, None)

    assert clock.now < 10
    assert speed.measured_bytes == 1024
    for search_budget in (speed.out, speed.back):
        assert search_budget.tensor_s == search_budget.busy_tensor_s == pytest.approx(1)
    assert speed.spread == 1


def test_a_fast_store_is_measured_with_all(clock):
    speed = measured_speed(Line(clock, byte_s=1e-9, tensor_s=1e-6), CPU, FOUR_OF_8_MIB, None)

    assert speed.measured_bytes == 2**25
    assert speed.out.byte_s == pytest.approx(1e-9)
    assert speed.out.tensor_s == pytest.approx(1e-6 + 1024e-9)


def test_a_tensor_that_is_saved_twice_is_moved_once():
    store = Counting()
    measured_speed(store, CPU, Payload(tensors=((4096, torch.float32),), times=3), None)

    # One more is put, to see whether the store has room at all.
    assert store.events.count("get") == store.events.count("prefetch") == store.events.count("put") - 1 > 0
    assert store.live == 0


def test_no_more_is_moved_than_the_store_holds():
    disk = torchremat.Disk(limit="10KiB")
    payload = Payload(tensors=((8192, torch.float32),) * 4)
    speed = measured_speed(disk, CPU, payload, 10 * 1024)

    assert speed.measured_bytes == 8192
    assert disk.statistics.peak_stored_bytes <= 10 * 1024
    assert disk.statistics.refused == disk.statistics.stored_bytes == 0


@pytest.fixture(scope="module")
def timed():
    model, step = models.gpt_step(blocks=3, width=32, context=64, batch=4)
    generator = torch.get_rng_state()
    planner = torchremat.Planner(model, step, cost="seconds", operators=False, stores=[Counting()])
    assert torch.equal(torch.get_rng_state(), generator)
    return model, step, planner


@pytest.mark.parametrize(
    ("gained_share", "spread", "is_stored"),
    [(0.03, 0.0, True), (0.01, 0.0, False), (0.03, 10.0, False)],
)
def test_when_in_doubt_nothing_is_stored(timed, monkeypatch, gained_share, spread, is_stored):
    _, _, planner = timed
    limit = budget_of(planner, 0.6) - planner.fixed_bytes
    plain_s = planner.profile.seconds
    stored = planner.solver.storing.judged(planner.solver.store_profiles[0], planner.solver.plain.tree, [3], 0)
    monkeypatch.setattr(Storing, "solve", lambda _self, _limit: None)
    without = planner.solver.solve(limit)
    assert without.cost > 0
    # As if what is stored cost all but this share of a step of what recomputing does.
    cost = without.cost - gained_share * plain_s
    doctored = replace(stored, cost=cost, prediction=replace(stored.prediction, moving_s=plain_s))
    monkeypatch.setattr(Storing, "solve", lambda _self, _limit: doctored)
    store_profile = replace(
        planner.solver.store_profiles[0], speed=replace(planner.solver.store_profiles[0].speed, spread=spread)
    )
    for search in (planner.solver, planner.solver.storing):
        monkeypatch.setattr(search, "store_profiles", (store_profile,))

    found = planner.solver.solve(limit)

    assert bool(found.offloads) is is_stored


def test_who_measures_a_step_with_stores_learns_whether_it_is_slower_than_predicted(timed):
    model, step, _ = timed
    planner = torchremat.Planner(model, step, cost="flops", operators=False, stores=[Counting()])
    plan = planner.plan(budget_of(planner, 0.6))
    plan.apply(model)
    report = torchremat.verify(model, step)
    plan.remove(model)

    assert plan.stored
    assert report.predicted_slowdown == plan.slowdown > 1
    assert "measured here with" in str(plan)
    slow = replace(report, seconds=1.12 * plan.slowdown, plain_seconds=1.0)
    assert slow.is_slow
    assert "slow       by more than 10% above the prediction" in str(slow)
    fast = replace(report, seconds=1.08 * plan.slowdown, plain_seconds=1.0)
    assert not fast.is_slow
    assert "slow  " not in str(fast)
    assert not replace(slow, predicted_slowdown=None).is_slow
