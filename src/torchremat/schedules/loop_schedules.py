"""How a loop is taken back: how many carries wait in slots, and how many steps are recorded at once.

A block is a run of steps whose saved tensors are in memory together; carries are kept between blocks alone. With blocks
of one step the schedule is that of `binomial.py`. With blocks of the square root of the length, and a slot for each, it
is the checkpoint by hand: each step runs once more. A budget in bytes may lie anywhere between the two; and where it is
tight, a mixture of carries and recorded blocks may be better than either, see `mixtures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, isqrt
from typing import TypeAlias, cast

from torchremat.errors import BudgetError, ScheduleError
from torchremat.schedules.binomial import CarrySlots, advances
from torchremat.schedules.hierarchies import Hierarchy, StoreCost
from torchremat.schedules.mixtures import MixtureTable
from torchremat.schedules.uneven import UnevenSlots
from torchremat.tensors.sizes import format_bytes

# NOTE [ The bound ]
#
# From a schedule of n steps leave out those that run again more than q times. A schedule of the others remains, within
# the same bytes. So they are at most A(m, q), the most steps that can be taken back with m bytes and q repeats, and the
# steps that run again are in all at least the sum of n - A(m, q) over q. With c bytes for a carry and s for a step
#
#     A(m, 0) = m // s
#     A(m, q) = max(1 + A(m - s, q),                   the first step is recorded
#                   H(m - c, q) + A(m - c, q))         its carry is held, up to some later step
#     H(m, q) = max(H(m, q - 1) + A(m, q - 1),         that stretch runs again, while the carry stays
#                   1 + A(m + c - s, q - 1))           or the first step, recorded, takes the place of the carry

# Rounding sizes for the bound to this many units loses less than a percent of it.
_UNITS = 512
_MOST_REPEATS = 64

# A mixture is found in about 50 ms if its table has at most so many entries times its steps; beyond, steps are joined
# to blocks of a few.
_MOST_WORK = 34_000_000
_MOST_UNITS = 96


# How a stretch is divided when it runs again.
Division: TypeAlias = CarrySlots | MixtureTable | UnevenSlots

# The loop of a training step is the same each time, and so are its tables.
_hierarchy, _mixture, _uneven_slots = lru_cache(16)(Hierarchy), lru_cache(16)(MixtureTable), lru_cache(16)(UnevenSlots)


@dataclass(frozen=True, kw_only=True)
class LoopSchedule:
    """The schedule of a loop.

    Attributes:
        steps: The length; None if it is not known before the loop ends.
        slots: How many carries are in memory at a time.
        block: How many steps are recorded at once.
        state_bytes: Of the states of generators that a step draws from, and keeps unless autograd keeps the step.
        stores: Where carries wait beyond the slots, with costs in blocks.
        carry_bytes: Of one carry, None if not measured.
        step_bytes: What autograd saves in one step, None if not measured.
        shared_bytes: The part of that which is the step's carry, which may be in a slot at the same time.
        units: With a mixture, how many units carries and recorded blocks share; else None.
        unit_bytes: Of one unit.
        step_costs: The times of the steps, None if they count as equal.
        is_best: Whether no schedule with as many bytes runs fewer steps again, as a table of all of them shows.
    """

    steps: int | None
    slots: int
    block: int = 1
    state_bytes: int = 0
    stores: tuple[StoreCost, ...] = ()
    carry_bytes: int | None = None
    step_bytes: int | None = None
    shared_bytes: int = 0
    units: int | None = None
    unit_bytes: int = 1
    step_costs: tuple[float, ...] | None = None
    is_best: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "slots", "block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"{name}={value} must be at least 1")

    @property
    def blocks(self) -> int:
        """The number of blocks of a loop whose length is known."""
        assert self.steps is not None
        return -(-self.steps // self.block)

    @property
    def hierarchy(self) -> Hierarchy:
        """The places of carries in slots and stores."""
        return _hierarchy(self.blocks, self.slots, self.stores)

    @property
    def division(self) -> Division:
        """How the steps of a stretch are divided when they run again."""
        if self.step_costs is not None:
            costs, block = self.step_costs, self.block
            if block > 1:
                costs = tuple(sum(costs[first : first + block]) for first in range(0, len(costs), block))
            return _uneven_slots(self.slots, costs)
        if self.units is None:
            return CarrySlots(self.slots)
        carry, step, unit = self.carry_bytes or 1, self.block * (self.step_bytes or 1), self.unit_bytes
        return _mixture(
            self.blocks, self.units, -(-carry // unit), -(-step // unit), -(-(step - self.shared_bytes) // unit)
        )

    @property
    def saved_bytes(self) -> int | None:
        """The most bytes that slots, recorded steps and states hold together, None if not measured.

        If the length is not known, without the states.
        """
        if self.carry_bytes is None or self.step_bytes is None:
            return None
        if self.steps is None:
            return self.slots * self.carry_bytes + self.step_bytes
        # The first step keeps its states in any case: it is measured.
        kept = self.borders().kept_blocks
        states = self.steps - sum(min(self.block, self.steps - one * self.block) for one in kept) + (0 in kept)
        state_bytes = self.state_bytes * states
        division = self.division
        if isinstance(division, MixtureTable):
            return division.most(self.blocks).units * self.unit_bytes + state_bytes
        # With a slot for each block the last one begins with a carry in a slot; else that carry passes by.
        shared = 0 if self.slots < self.blocks else self.shared_bytes
        return self.slots * self.carry_bytes + self.block * self.step_bytes - shared + state_bytes

    @property
    def recomputed_steps(self) -> int | None:
        """How many steps run again in the backward, None if the length is not known."""
        if self.steps is None:
            return None
        division = self.division
        if isinstance(division, MixtureTable):
            return self.block * ((division.runs(self.blocks) or 0) - self.blocks)
        if self.stores:
            return self.block * (self.hierarchy.traffic().runs - self.blocks)
        if isinstance(division, UnevenSlots):
            return self.block * division.runs
        return _count_recomputed(self.steps, self.slots, self.block)

    def least_recomputed(self) -> int | None:
        """Return a lower bound on that number for all schedules with as many bytes; None if they are not known.

        Without measured bytes it is the fewest for as many slots, with a slot for a carry and one recorded step.
        """
        if self.steps is None or self.stores or self.step_costs is not None:
            return None
        saved = self.saved_bytes
        own_bytes = 0 if self.step_bytes is None else self.step_bytes - self.shared_bytes
        if self.is_best:
            return self.recomputed_steps
        if saved is None or not (self.carry_bytes and own_bytes):
            return _count_recomputed(self.steps, self.slots, 1) if self.block == 1 and self.units is None else None
        return least_recomputed(self.steps, self.carry_bytes, own_bytes, saved)

    def borders(self) -> Borders:
        """Return where the first forward of a loop of known length leaves carries, and where it keeps its steps.

        Raises:
            ScheduleError: The length is not known.
        """
        if self.steps is None:
            raise ScheduleError("the length of the loop is not known before it ends")
        blocks, division = self.blocks, self.division
        if isinstance(division, MixtureTable):
            marks = division.first_marks(blocks)
            found = [block * self.block for block in marks.held]
            return Borders(places=dict.fromkeys(found, 0), kept_blocks=marks.recorded)
        if self.stores:
            places = {block * self.block: place for block, place in self.hierarchy.first_places().items()}
        else:
            held = division.marks(self.slots - 1, blocks).held
            places = dict.fromkeys([0, *(block * self.block for block in held)], 0)
        return Borders(places=places, kept_blocks=(blocks - 1,))

    def __str__(self) -> str:
        words = [f"{self.slots} slot{'s' if self.slots > 1 else ''}"]
        if self.units is not None:
            words = [f"up to {self.slots} carr{'ies' if self.slots > 1 else 'y'}"]
        if self.steps is not None:
            words.insert(0, f"{self.steps} steps")
        if self.carry_bytes is not None:
            words[-1] += f" of {format_bytes(self.carry_bytes)}"
        if self.block > 1:
            words.append(f"blocks of {self.block} steps")
        if self.units is not None:
            words.append("and recorded steps in their place")
        if self.stores:
            traffic = self.hierarchy.traffic()
            names = "the store" if len(self.stores) == 1 else f"{len(self.stores)} stores"
            words.append(f"{traffic.writes} carries to {names} and {traffic.reads} back")
        if self.saved_bytes is not None:
            words.append(f"{format_bytes(self.saved_bytes)} at most")
        if self.recomputed_steps is not None:
            words.append(f"{self.recomputed_steps} steps run again")
        division = self.division
        if isinstance(division, UnevenSlots):
            best = ", no schedule with as many slots takes less" if division.is_best and self.block == 1 else ""
            words.append(f"which takes {division.time / sum(self.step_costs or ()):.2f} of all steps{best}")
        least = self.least_recomputed()
        if least is not None:
            words.append(f"no schedule with these bytes runs fewer than {least}")
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True)
class Borders:
    """What the first forward of a loop keeps.

    Attributes:
        places: Where carries are, by step: 0 for a slot, n for the n-th store.
        kept_blocks: The blocks whose saved tensors autograd keeps, in order; backward begins with the last.
    """

    places: Mapping[int, int]
    kept_blocks: tuple[int, ...]


def _count_recomputed(steps: int, slots: int, block: int) -> int:
    """Return how many steps run again in the backward: those recorded, and those advanced for a carry."""
    return block * advances(-(-steps // block), slots)


def within_bytes(
    steps: int | None,
    carry_bytes: int,
    step_bytes: int,
    budget_bytes: int,
    *,
    shared_bytes: int = 0,
    mixes: bool = True,
    step_costs: tuple[float, ...] | None = None,
) -> LoopSchedule:
    """Return the schedule of blocks and slots that runs the fewest steps again within a budget.

    With the times of the steps it is one whose steps that run again take the least time: of slots for carries of single
    steps, and of the blocks that are best for equal steps.

    Args:
        steps: The length of the loop, None if it is not known.
        carry_bytes: Of one carry.
        step_bytes: What autograd saves in one step.
        budget_bytes: For carries in slots and recorded steps.
        shared_bytes: The part of `step_bytes` which is the step's carry.
        mixes: Whether recorded blocks may take the place of carries.
        step_costs: The times of the steps, if they differ; then none do.

    Raises:
        BudgetError: It is below one carry and one step.
        ScheduleError: There are no steps.
    """
    carry_bytes = max(carry_bytes, 1)
    own_bytes = step_bytes - shared_bytes if steps == 1 else step_bytes
    if budget_bytes < carry_bytes + own_bytes:
        raise BudgetError(
            f"a budget of {format_bytes(budget_bytes)} is below one step of the loop: a carry has "
            f"{format_bytes(carry_bytes)}, and autograd saves {format_bytes(own_bytes)} in a step. "
            f"Smallest budget that works: {format_bytes(carry_bytes + own_bytes)}."
        )
    if steps is None:
        slots = (budget_bytes - step_bytes) // carry_bytes
        return LoopSchedule(
            steps=None, slots=slots, carry_bytes=carry_bytes, step_bytes=step_bytes, shared_bytes=shared_bytes
        )
    root = isqrt(steps)
    # Of all blocks that divide the loop into as many, the shortest leaves the most bytes to slots.
    lengths = {*range(1, root + 1), *(-(-steps // count) for count in range(1, root + 1))}
    found: list[tuple[int, int, int]] = []
    for block in sorted(lengths):
        blocks, left = -(-steps // block), budget_bytes - block * step_bytes
        slots = blocks if blocks * carry_bytes <= left + shared_bytes else left // carry_bytes
        if slots > 0:
            found.append((_count_recomputed(steps, slots, block), block, slots))
    schedule = LoopSchedule(
        steps=steps,
        slots=1,
        carry_bytes=carry_bytes,
        step_bytes=step_bytes,
        shared_bytes=shared_bytes,
        step_costs=step_costs,
    )
    if step_costs is not None:
        few = [one for one in found if one[1] == 1] + [min(found)]
        schedules = (replace(schedule, slots=slots, block=block) for _, block, slots in few)
        return min(schedules, key=lambda one: cast("UnevenSlots", one.division).time)
    _, block, slots = min(found)
    schedule = replace(schedule, slots=slots, block=block)
    return _mix(schedule, budget_bytes) if mixes else schedule


def _mix(schedule: LoopSchedule, budget_bytes: int) -> LoopSchedule:
    """Return a schedule with a mixture if it runs fewer steps again within the budget, else the one given."""
    steps, carry, step, fewest = schedule.steps, schedule.carry_bytes, schedule.step_bytes, schedule.recomputed_steps
    assert steps is not None and carry is not None and step is not None and fewest is not None
    if fewest == 0:
        return replace(schedule, is_best=True)
    unit = max(gcd(carry, step, schedule.shared_bytes), -(-budget_bytes // _MOST_UNITS))
    units = budget_bytes // unit
    block = 1
    if steps * steps * (units + 1) > _MOST_WORK:
        block = -(-steps // isqrt(2 * _MOST_WORK // (3 * (units + 1))))
    found = replace(schedule, block=block, units=units, unit_bytes=unit)
    division = found.division
    assert isinstance(division, MixtureTable)
    runs = division.runs(found.blocks)
    if runs is None:
        return schedule
    # The table has all schedules if nothing is rounded, and if a recorded step has its carry and so takes its place.
    is_best = block == 1 and not (carry % unit or step % unit) and schedule.shared_bytes == carry
    if block * (runs - found.blocks) >= fewest:
        return replace(schedule, is_best=is_best)
    return replace(found, slots=max(division.most(found.blocks).carries, 1), is_best=is_best)


def least_recomputed(steps: int, carry_bytes: int, step_bytes: int, budget_bytes: int) -> int:
    """Return a lower bound on the steps that run again, for all schedules within a budget. See NOTE [ The bound ].

    Args:
        steps: The length of the loop.
        carry_bytes: Of one carry, at least 1.
        step_bytes: What autograd saves in one step, at least 1.
        budget_bytes: For carries that are held and steps that are recorded.
    """
    unit = max(1, min(carry_bytes, step_bytes, max(budget_bytes // _UNITS, 1)))
    carry, step, most = carry_bytes // unit, step_bytes // unit, -(-budget_bytes // unit)
    reach = [size // step for size in range(most + 1)]
    held = [0] * (most + 1)
    bound = 0
    for _ in range(_MOST_REPEATS):
        left = steps - reach[most]
        if left <= 0:
            break
        bound += left
        held = [
            max(held[size] + reach[size], 1 + (reach[size + carry - step] if 0 <= size + carry - step <= most else 0))
            if size + carry >= step
            else 0
            for size in range(most + 1)
        ]
        following: list[int] = []
        for size in range(most + 1):
            best = 1 + following[size - step] if size >= step else 0
            if size >= carry:
                best = max(best, held[size - carry] + following[size - carry])
            following.append(best)
        reach = following
    return bound
