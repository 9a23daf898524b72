"""The bytes that a loop holds are those of its slots and of the steps that it records."""

import pytest
import torch

from logs import Count, Log
from probes.planning import Bandwidth, Speed
from torchremat import BudgetError, Disk, Host, loop, measure

ELEMENTS = 2**14
CARRY = 4 * ELEMENTS


class Wave:
    """Steps `sin(h * w)`: the carry has CARRY bytes, and autograd saves it and the product, as many bytes each."""

    def __init__(self):
        self.w = torch.full((ELEMENTS,), 0.9, requires_grad=True)
        self.h0 = torch.ones(ELEMENTS)

    def body(self, h, _):
        return (h * self.w).sin(), None

    def peak_bytes(self, **options):
        """The peak of a step of 40 steps."""
        schedules = []

        def step():
            return loop(self.body, self.h0, length=40, on_schedule=schedules.append, **options)[0].sum()

        step()
        return measure(step).peak_bytes, schedules[0]


@pytest.fixture(scope="module")
def one_slot():
    return Wave().peak_bytes(slots=1)[0]


def test_a_slot_costs_a_carry(one_slot):
    wave = Wave()

    peaks = {slots: wave.peak_bytes(slots=slots)[0] for slots in (2, 3, 5, 8, 12)}

    assert {slots: peak - one_slot for slots, peak in peaks.items()} == {slots: (slots - 1) * CARRY for slots in peaks}


def test_a_recorded_step_costs_what_it_saves(one_slot):
    peak, schedule = Wave().peak_bytes(budget=6 * CARRY)

    # A carry and a product for each step, of which the first carry of a stretch is in a slot.
    assert (schedule.carry_bytes, schedule.step_bytes, schedule.shared_bytes) == (CARRY, 2 * CARRY, CARRY)
    assert (schedule.slots, schedule.units, schedule.saved_bytes) == (4, 6, 6 * CARRY)
    assert peak - one_slot == schedule.saved_bytes - 3 * CARRY  # one slot and one step


@pytest.fixture(scope="module")
def smallest():
    return Wave().peak_bytes(budget=3 * CARRY)


@pytest.mark.parametrize("carries", [4, 7, 10, 16, 25, 40, 60])
def test_a_budget_is_kept_to_the_byte(carries, smallest):
    least, smallest = smallest

    peak, schedule = Wave().peak_bytes(budget=carries * CARRY)

    assert smallest.saved_bytes == 3 * CARRY
    assert schedule.saved_bytes == carries * CARRY
    assert peak - least == schedule.saved_bytes - smallest.saved_bytes


@pytest.mark.parametrize(("carries", "block"), [(3, 1), (4, 1), (7, 2), (16, 4)])
def test_a_budget_is_kept_to_the_byte_with_times_of_steps(carries, block, smallest):
    costs = [1.0] * 20 + [8.0] * 3 + [1.0] * 17
    least, smallest = smallest

    peak, schedule = Wave().peak_bytes(budget=carries * CARRY, step_costs=costs)

    assert schedule.block == block
    assert schedule.saved_bytes <= carries * CARRY
    assert peak - least == schedule.saved_bytes - smallest.saved_bytes
    assert schedule.slots > 1 or carries < 4
    assert schedule.step_costs == tuple(costs) and smallest.step_costs is None


def test_a_store_holds_the_carries_that_the_schedule_says():
    wave, store = Wave(), Disk()

    _, schedule = wave.peak_bytes(slots=4, stores=(store,), transfer_steps=1)

    # The peak in memory is not the same each time: a carry is there until the disk has it.
    places = list(schedule.hierarchy.first_places().values())
    assert str(schedule) == "40 steps, 4 slots, 25 carries to the store and 25 back, 49 steps run again"
    assert store.statistics.peak_stored_bytes == places.count(1) * CARRY
    assert store.statistics.stored_bytes == 0


class AtOnce(Disk):
    """A disk that has what it is given when `put` returns: what is still on its way there is not read from there."""

    def put(self, tensor):
        handle = super().put(tensor)
        handle.settle()
        return handle


@pytest.mark.parametrize("budget", [None, 8 * CARRY])
@pytest.mark.parametrize(("host", "disk"), [(2, 3), (1, 1), (3, None)])
def test_stores_with_limits_are_used_in_order_and_never_refuse(host, disk, budget):
    wave, runs = Wave(), Count()
    stores = Host(host * CARRY), AtOnce(limit=None if disk is None else disk * CARRY)
    schedules = []

    def body(h, _):
        runs.up()
        return wave.body(h, _)

    options = {"slots": 2} if budget is None else {"budget": budget}
    # Not `h0` itself: what is in memory anyway is not read from a store.
    last, _ = loop(
        body, wave.h0.clone(), length=40, stores=stores, transfer_steps=(1, 6), on_schedule=schedules.append, **options
    )
    last.sum().backward()
    found, wave.w.grad = wave.w.grad, None
    h = wave.h0
    for _ in range(40):
        h, _ = wave.body(h, None)
    h.sum().backward()

    traffic = schedules[0].hierarchy.traffic()
    statistics = [one.statistics for one in stores]
    assert torch.equal(found, wave.w.grad)
    assert runs.value == 40 + schedules[0].recomputed_steps
    assert sum(one.copied_out_bytes for one in statistics) == traffic.writes * CARRY
    assert sum(one.copied_in_bytes for one in statistics) == traffic.reads * CARRY
    assert [one.refused for one in statistics] == [0, 0]
    assert [one.stored_bytes for one in statistics] == [0, 0]
    assert statistics[0].peak_stored_bytes == host * CARRY


class Store:
    """A store in memory whose tensors are said to take some seconds each."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.puts = 0

    def put(self, tensor):
        self.puts += 1
        return Host(pin=False).put(tensor)


@pytest.mark.parametrize("options", [{"slots": 2}, {"budget": 4 * CARRY}])
@pytest.mark.parametrize(("seconds", "steps"), [(1e4, None), (1e-12, 0.0)])
def test_the_times_of_stores_are_measured_in_steps(monkeypatch, options, seconds, steps):
    wave, runs, schedules, measured, store = Wave(), Count(), [], [], Store(seconds)

    def speed_of(store, device, payload, limit_bytes):
        measured.append((device.type, payload.tensors, limit_bytes))
        each = Bandwidth(tensor_s=store.seconds, byte_s=0.0, busy_tensor_s=0.0, busy_byte_s=0.0)
        return Speed(out=each, back=each, spread=0.0, measured_bytes=CARRY)

    def body(h, _):
        runs.up()
        return wave.body(h, _)

    def trained(**more):
        wave.w.grad, before, more = None, runs.value, {"on_schedule": schedules.append, **options, **more}
        last, _ = loop(body, wave.h0.clone(), length=12, stores=(store,), **more)
        last.sum().backward()
        assert runs.value == before + 12 + schedules[-1].recomputed_steps
        return wave.w.grad

    monkeypatch.setattr("torchremat.loops.requests.measured_speed", speed_of)
    given = trained(transfer_steps=1)
    assert torch.equal(trained(), given)
    assert torch.equal(trained(), given)

    assert measured == [("cpu", ((CARRY, torch.float32),), None)]  # once for each store and size
    (first, found, _), writes = schedules, [one.hierarchy.traffic().writes for one in schedules]
    assert first.stores[0].write_steps == first.stores[0].read_steps == 0.5
    assert store.puts == sum(writes)
    assert writes[0] > 0
    if steps is None:  # far more than any step takes
        assert found.stores[0].write_steps == found.stores[0].read_steps >= 2**10
        assert found.stores[0].write_steps.hex().startswith("0x1.0000000000000p")  # a power of two
        assert writes[1:] == [0, 0]
    else:
        assert found.stores[0].write_steps == found.stores[0].read_steps == steps
        assert writes[1] >= writes[0]
    assert all(one.saved_bytes is None or one.saved_bytes <= 4 * CARRY for one in schedules)


def test_a_real_store_is_measured_and_gradients_are_the_same():
    wave, store = Wave(), Host(pin=False)
    loop(wave.body, wave.h0, length=40, slots=3, stores=(store,), transfer_steps=1)[0].sum().backward()
    given, wave.w.grad = wave.w.grad, None

    loop(wave.body, wave.h0, length=40, slots=3, stores=(store,))[0].sum().backward()

    assert torch.equal(wave.w.grad, given)
    assert store.statistics.stored_bytes == 0


def test_while_a_step_is_measured_a_move_counts_as_half_a_step():
    wave, schedules = Wave(), Log()

    options = {"slots": 3, "stores": (Store(0.0),), "on_schedule": schedules.append}
    measure(lambda: loop(wave.body, wave.h0, length=40, **options)[0].sum())

    assert schedules
    assert [(one.stores[0].write_steps, one.stores[0].read_steps) for one in schedules] == [(0.5, 0.5)] * len(schedules)


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_a_store_with_a_limit_runs_what_its_schedule_says(slots, room):
    wave, store, runs, schedules = Wave(), Host(room * CARRY, pin=False), Count(), []

    def body(h, _):
        runs.up()
        return wave.body(h, _)

    options = {"transfer_steps": 0, "on_schedule": schedules.append}
    loop(body, wave.h0.clone(), length=23, slots=slots, stores=(store,), **options)[0].sum().backward()

    assert runs.value == 23 + schedules[0].recomputed_steps
    assert store.statistics.copied_in_bytes == schedules[0].hierarchy.traffic().reads * CARRY
    assert store.statistics.peak_stored_bytes == room * CARRY
    assert store.statistics.refused == 0


@pytest.mark.parametrize("carries", [3, 10, 40])
def test_a_step_that_draws_keeps_the_state_of_its_generator(carries):
    quiet, noisy = Wave(), Wave()

    def draws(h, _):
        torch.rand(())
        return (h * noisy.w).sin(), None

    noisy.body = draws
    body = quiet.body
    quiet.body = lambda h, x: body(h, x)  # an object of data alone is an input, and one with a function is none
    plain_bytes, plain = quiet.peak_bytes(budget=carries * CARRY)
    peak_bytes, schedule = noisy.peak_bytes(budget=carries * CARRY + 40 * 5056)

    kept = schedule.borders().kept_blocks
    assert schedule.state_bytes == 5056
    assert schedule.saved_bytes - plain.saved_bytes == 5056 * (40 - len(kept) + (0 in kept))
    assert schedule.recomputed_steps == plain.recomputed_steps
    # The states of steps that are done are gone, if the peak is not the one at the end of the forward.
    most = schedule.saved_bytes - plain.saved_bytes
    assert peak_bytes - plain_bytes == (most if carries < 40 else 12 * 5056)


def test_a_loop_of_unknown_length_counts_the_states_of_the_most_steps_that_it_may_run():
    wave, schedules = Wave(), []

    def draws(carry, _):
        torch.rand(())
        h, count = carry
        return ((h * wave.w).sin(), count + 1), None

    def run(budget):
        start = wave.h0, torch.zeros(())
        options = {"max_length": 20, "budget": budget, "on_schedule": schedules.append}
        return loop(draws, start, condition=lambda carry: carry[1] < 9, **options)[0][0]

    run(8 * CARRY + 20 * 5056).sum().backward()

    assert schedules[0].slots == 5  # a step and its count besides
    with pytest.raises(BudgetError, match="below what 20 steps keep of the generators"):
        run(20 * 5056)
