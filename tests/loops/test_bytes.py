"""The bytes that a loop holds are those of its slots and of the steps that it records."""

import pytest
import torch

from torchremat import Disk, loop, measure

ELEMENTS = 2**16
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


def test_a_slot_costs_a_carry():
    wave = Wave()

    one, _ = wave.peak_bytes(slots=1)
    peaks = {slots: wave.peak_bytes(slots=slots)[0] for slots in (2, 3, 5, 8, 12)}

    assert {slots: peak - one for slots, peak in peaks.items()} == {slots: (slots - 1) * CARRY for slots in peaks}


def test_a_recorded_step_costs_what_it_saves():
    wave = Wave()
    one, _ = wave.peak_bytes(slots=1)

    peak, schedule = wave.peak_bytes(budget=6 * CARRY)

    # A carry and a product for each step, of which the first carry of a stretch is in a slot.
    assert (schedule.carry_bytes, schedule.step_bytes, schedule.shared_bytes) == (CARRY, 2 * CARRY, CARRY)
    assert (schedule.slots, schedule.units, schedule.saved_bytes) == (4, 6, 6 * CARRY)
    assert peak - one == schedule.saved_bytes - 3 * CARRY  # one slot and one step


@pytest.mark.parametrize("carries", [3, 4, 7, 10, 16, 25, 40, 60])
def test_a_budget_is_kept_to_the_byte(carries):
    wave = Wave()
    least, smallest = wave.peak_bytes(budget=3 * CARRY)

    peak, schedule = wave.peak_bytes(budget=carries * CARRY)

    assert smallest.saved_bytes == 3 * CARRY
    assert schedule.saved_bytes == carries * CARRY
    assert peak - least == schedule.saved_bytes - smallest.saved_bytes


def test_a_store_holds_the_carries_between_periods():
    wave, store = Wave(), Disk()

    _, schedule = wave.peak_bytes(slots=4, stores=(store,))

    # The peak is not the same each time: a carry is in memory until the disk has it.
    assert schedule.period == 5
    assert store.statistics.peak_stored_bytes == 8 * CARRY  # of 40 carries every fifth
    assert store.statistics.stored_bytes == 0
