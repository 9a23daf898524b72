"""Bytes in slots: the sizes of a chain rounded up, and the slot size with the least rounding loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchremat.schedules.chain import Chain, Option, Stage

Bytes = NDArray[np.int64]
Slots = NDArray[np.int64]

Sized = TypeVar("Sized", Chain, Stage, Option)

# Cuts x slots that the solver may visit (about three seconds of one slow core), and numbers in its tables (1 GB).
_WORK = 3_000_000_000
_TABLE = 250_000_000
# Below 500 slots rounding matters; above 4000 it is below the accuracy of a profile.
_SLOTS = (500, 4000)
# With loops, whose equal steps have sizes that few slots divide, and for which there are tables of several limits.
_SLOTS_OF_LOOPS = (100, 2000)


@dataclass(frozen=True, kw_only=True)
class Term:
    """One option of one stage in one context, which determines the inputs that it has to pay for.

    Attributes:
        cost: Of its full forward, if that costs, and inside its backward.
        stopped_cost: The same with a forward that stops at its last save.
        held: Slots that it holds until its backward is over.
        backward: Free slots that it needs before its forward, so that its backward fits.
        full_bytes: Highest live bytes of its forward above base and held.
        stopped_bytes: The same with a forward that stops at its last save.
    """

    cost: np.float32
    stopped_cost: np.float32
    held: int
    backward: int
    full_bytes: int
    stopped_bytes: int


class Rounding:
    """The sizes of a chain in slots. See NOTE [ What a tree means ] and NOTE [ Tables of the persistent solver ]."""

    def __init__(self, chain: Chain, *, slot_bytes: int, slots: int) -> None:
        self.chain = chain
        self.slot_bytes = slot_bytes
        self.slots = slots
        stages = chain.stages
        self.forward_base: Bytes = np.array([stage.forward_base_bytes for stage in stages], np.int64)
        self.backward_base: Bytes = np.array([stage.backward_base_bytes for stage in stages], np.int64)
        self._forward: NDArray[np.float32] = np.array([stage.forward for stage in stages], np.float32)
        self.external: Bytes = np.array([stage.external_bytes for stage in stages], np.int64)
        self._terms: dict[tuple[int, bool, bool, bool], list[Term]] = {}
        self._first_drop: Bytes = np.array([max(stage.drop_peak_bytes, stage.output_bytes) for stage in stages])
        self._later_drop: Bytes = np.array(
            [max(stage.linked_bytes + stage.drop_peak_bytes, stage.output_bytes) for stage in stages]
        )

    def up(self, size_bytes: int) -> int:
        """Return the slots that a size takes, capped at one more than exist."""
        return min(-(-size_bytes // self.slot_bytes), self.slots + 1)

    def up_all(self, sizes_bytes: Bytes) -> Slots:
        """Return `up` of every size."""
        return np.minimum(-(-sizes_bytes // self.slot_bytes), self.slots + 1)

    def kept_need(self, term: Term, live_bytes: int) -> int:
        """Return the slots that must be free before a stage is kept; `live_bytes`: added to held by its forward."""
        return max(term.backward, self.up(live_bytes))

    def drops(self, first: int, end: int) -> Bytes:
        """Return the bytes above base and held of each stage in first..end-1, run without saving as one region."""
        drops = self._later_drop[first:end].copy()
        drops[:1] = self._first_drop[first]
        return drops

    def forwards(self, first: int, end: int) -> NDArray[np.float32]:
        """Return the cost of a forward from `first` through each stage in first..end-1."""
        return np.cumsum(self._forward[first:end], dtype=np.float32)

    def terms(self, stage: int, *, linked: bool = False, external: bool = False, again: bool = False) -> list[Term]:
        """Return the options of a stage.

        Args:
            stage: Its number.
            linked: Whether its linked input counts in addition to held bytes, and is paid for if saved.
            external: The same for its external inputs.
            again: Whether its forward is a recompute, which costs.
        """
        key = stage, linked, external, again
        if key not in self._terms:
            self._terms[key] = list(self._make_terms(*key))
        return self._terms[key]

    def _make_terms(self, stage: int, linked: bool, external: bool, again: bool) -> Iterator[Term]:
        one = self.chain.stages[stage]
        linked_bytes, external_bytes = one.linked_bytes * linked, one.external_bytes * external
        for option in one.options:
            held_bytes = option.saved_bytes + linked_bytes * option.saves_input + external_bytes * option.saves_external
            inputs_bytes = linked_bytes + external_bytes
            never = math.inf if again and not option.nests else 0.0
            yield Term(
                cost=np.float32(option.cost + one.forward * again + never),
                stopped_cost=np.float32(option.cost + one.truncated * (again and not option.is_region) + never),
                held=self.up(held_bytes),
                backward=self.up(held_bytes + one.backward_base_bytes + option.backward_peak_bytes),
                full_bytes=inputs_bytes + option.forward_peak_bytes,
                stopped_bytes=inputs_bytes + option.truncated_peak_bytes,
            )


def default_slot(chain: Chain, limit_bytes: int) -> int:
    """Return the slot size with the least rounding loss among the ones that the solver can afford.

    The loss is up to one slot for each held tensor: with 48 equal boundaries and a thousandth of the limit, 5%. So the
    slot should divide the sizes that are held most often, and fractions of the common sizes compete with plain
    fractions of the limit. The number of slots is bounded by the time and memory of the tables: 4000 for up to 160
    stages, 2250 for 200, 500 for 350 and more, and from 500 stages on fewer.
    """
    stages, n = chain.stages, len(chain.stages)
    if chain.borders:
        lengths = [len(stretch) for stretch in chain.stretches if not chain.is_uniform(stretch)]
        most = _WORK // max(1, 4 * n**2 + sum(length**3 // 6 for length in lengths))
        most = int(np.clip(most, *_SLOTS_OF_LOOPS))
    else:
        most = int(np.clip(_WORK // max(1, n**3 // 6), *_SLOTS))
        most = max(100, min(most, _TABLE // n**2 - n))
    least = min(most, _SLOTS[0])
    smallest, largest = max(1, limit_bytes // most), max(1, limit_bytes // least)
    held = Counter[int]()
    for stage in stages:
        held[stage.linked_bytes] += 1
        held.update(option.saved_bytes + stage.linked_bytes * option.saves_input for option in stage.options)
    candidates = {max(1, -(-limit_bytes // slots)) for slots in range(least, most + 1, 20)}
    for size, _ in held.most_common(8):
        parts = range(max(1, size // largest), min(size // smallest, 4096) + 1)
        candidates.update(slot for part in parts if smallest <= (slot := -(-size // part)) <= largest)
    slots = np.array(sorted(candidates, reverse=True), np.int64)
    sizes = np.array(list(held), np.int64)
    lost = (-sizes % slots[:, None]) @ np.array(list(held.values()), np.int64)
    # Of equals the largest, which makes the smallest tables.
    return int(slots[np.argmin(lost)])


def rounded_down(chain: Chain, slot_bytes: int) -> Chain:
    """Return the chain with each of its sizes rounded down to a multiple of a slot, so that none is rounded up later.

    Every tree then peaks at most as high as before, and costs the same.
    """

    def down(sized: Sized) -> Sized:
        sizes = [one.name for one in fields(sized) if one.name.endswith("_bytes")]
        return replace(sized, **{name: getattr(sized, name) // slot_bytes * slot_bytes for name in sizes})

    stages = tuple(replace(down(stage), options=tuple(map(down, stage.options))) for stage in chain.stages)
    return replace(down(chain), stages=stages)
