"""The carries of one loop: which are in a slot, and the recompute of the others."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.autograd import at_end_of_backward, set_grad_mode
from torchremat.errors import CheckpointError, bug
from torchremat.loops.step_inputs import Carry, HeldInput, current_key
from torchremat.regions.slots import Key
from torchremat.schedules.binomial import CarrySlots
from torchremat.schedules.hierarchies import Hierarchy
from torchremat.schedules.loop_schedules import Division
from torchremat.stores.offloading import Offload
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.structure import tensors_in

if TYPE_CHECKING:
    from torchremat.regions.region import Region

# `threading.RLock` is a function that calls it.
_Lock = type(threading.RLock())


class Stretches:
    """The carries of one loop.

    Attributes:
        division: How a stretch is divided when it runs again.
        block: How many steps are recorded at once: their saved tensors are in memory together. A carry is in a slot
            only at the beginning of a block.
        kept: The blocks that were recorded in the forward, in order.
        stores: Where carries wait beyond the slots.
        hierarchy: Which of them, None without stores.
    """

    __slots__ = (
        "__weakref__",
        "_carries",
        "_key",
        "_lock",
        "_recorded",
        "_stored",
        "block",
        "division",
        "held_tensor",
        "hierarchy",
        "kept",
        "stores",
        "width",
    )

    def __init__(self, width: int, held_tensor: Callable[[Tensor], HeldTensor] = HeldTensor) -> None:
        self.width = width
        self.held_tensor = held_tensor
        self.stores: Sequence[Offload] = ()
        self.hierarchy: Hierarchy | None = None
        self._stored: list[ReferenceType[Carry]] = []
        self.division: Division = CarrySlots(1)
        self.block = 1
        self.kept: Sequence[int] = ()
        self._recorded: dict[int, int] = {}  # the blocks recorded in this backward, with their units
        self._carries: list[ReferenceType[Carry]] = []  # those in slots, in the order of the steps
        self._key: Key | None = None  # the backward or session that has recomputed last
        self._lock = _Lock()

    def hold(self, carry: Carry, tensors: list[Tensor], place: int) -> None:
        """Hold a carry from now on, the last one so far: in a slot, or with `place` in the store of this number."""
        if place:
            self._store(carry, tensors, place)
            return
        carry.held = [self.held_tensor(tensor) for tensor in tensors]
        self._carries.append(ref(carry))

    def _store(self, carry: Carry, tensors: list[Tensor], place: int) -> None:
        had_grad = torch.is_grad_enabled()
        set_grad_mode(True)  # as in a forward
        try:
            with self.stores[place - 1]:
                carry.held = [self.held_tensor(tensor) for tensor in tensors]
        finally:
            set_grad_mode(had_grad)
        carry.store = place
        carry.forget()
        self._stored = [one for one in self._stored if one() is not None] + [ref(carry)]

    def _put(self, carry: Carry) -> None:
        """Note that a carry is in a slot from now on; of later ones the last makes room for it."""
        inside = self._in_slots()
        while len(inside) * self.division.carry >= self.division.units and inside[-1].index > carry.index:
            inside.pop().drop()
        if carry not in inside:
            insort(inside, carry, key=attrgetter("index"))
        self._carries = [ref(one) for one in inside]

    def drop(self, place: int) -> None:
        """Free the slot of a carry, given its number among those in slots."""
        self._in_slots()[place].drop()

    def _in_slots(self) -> list[Carry]:
        alive = [one() for one in self._carries]
        return [one for one in alive if one is not None and one.takes_slot]

    # -------------------------------------------------------------------------------------------------- recompute

    def input_of(self, carry: Carry, place: int) -> Tensor:
        """Return a tensor of a carry for the region of its step.

        Raises:
            CheckpointError: A step before it differs from its forward.
            MutationError: An input or parameter was changed in place since.
        """
        held = carry.held
        if held is not None and carry.kept is None and not held[place].is_hooked:
            return held[place].unpack()
        with self._lock:
            if carry.waiting is None or place not in carry.waiting:
                self._bring(carry)
                assert carry.waiting is not None
            return carry.waiting.pop(place)

    def _bring(self, carry: Carry) -> None:
        """Let the tensors of a carry wait, after recomputing the stretch that ends with it if necessary."""
        self._begin(current_key())
        if carry.is_here:
            carry.wait(self._tensors(carry))
            return
        path: list[Carry] = []
        start = carry
        while not start.is_here:
            if start.before is None:
                raise bug(f"carry {start.index} is neither in a slot nor made by a step")
            path.append(start)
            start = start.before
        tensors = self._tensors(start)
        held, recorded = self._plan(start, carry.index)
        if start.store and start.index in held:
            self._leave(start, tensors, held[start.index])
        here = start
        while path:
            following = path.pop()
            here.wait(tensors)
            del tensors
            try:
                is_recorded = here.index // self.block in recorded
                output = cast("Region", following.region).advance(self._key if is_recorded else None)
            finally:
                here.waiting = None
            # The body of a step returns the next carry first.
            tensors = tensors_in(cast("tuple[object, object]", output)[0])
            del output
            if len(tensors) != self.width:
                raise CheckpointError(
                    f"step {here.index} of a loop returned a carry of {len(tensors)} tensors in its recompute, and of "
                    f"{self.width} in its forward."
                )
            if following.index in held:
                self._leave(following, tensors, held[following.index])
            here = following
        carry.wait(tensors)

    def _begin(self, key: Key | None) -> None:
        """Let a backward or session recompute, after dropping what another one has left."""
        if key == self._key:
            return
        self._key = key
        self._recorded.clear()
        self._forget_all_but(key)
        if isinstance(key, int):
            at_end_of_backward(partial(_end, ref(self)))

    def end(self) -> None:
        """Drop what the backward that has ended leaves: of a retained graph, as the rest is gone with the graph."""
        with self._lock:
            self._key = None
            self._forget_all_but(None)

    def _forget_all_but(self, key: Key | None) -> None:
        for one in self._in_slots():
            if one.key != key:
                one.forget()

    def _tensors(self, carry: Carry) -> list[Tensor]:
        if carry.kept is not None:
            return carry.kept
        assert carry.held is not None
        tensors = [one.unpack() for one in carry.held]
        if not carry.store and any(one.is_hooked for one in carry.held):
            # A region around the loop gives each of its saved tensors once in a backward.
            self._leave(carry, tensors, 0)
        return tensors

    def _leave(self, carry: Carry, tensors: list[Tensor], place: int) -> None:
        if place:
            self._store(carry, tensors, place)
        else:
            carry.keep(tensors, self._key)
            self._put(carry)

    def _plan(self, begin: Carry, last: int) -> tuple[dict[int, int], frozenset[int]]:
        """Return what a stretch leaves that runs again from a carry up to that of step `last`.

        Returns:
            The steps whose carries are held, each with its place, and the blocks that are recorded.
        """
        division, block, first = self.division, self.block, begin.index
        start = first // block
        if begin.store and self.hierarchy is not None:
            before = [one for ref in self._stored if (one := ref()) is not None and one.index <= first]
            used = sum(one.store == begin.store for one in before)
            places = self.hierarchy.places(last // block - start + 1, begin.store, used)
            return {(start + one) * block: place for one, place in places.items()}, frozenset([last // block])
        self._recorded = {one: units for one, units in self._recorded.items() if one < start}
        kept = self.kept[: bisect_left(self.kept, start)]
        held = [one.index for one in self._in_slots() if one.index <= first and one.index // block not in kept]
        used = len(held) * division.carry + len(kept) * division.step + sum(self._recorded.values())
        marks = division.marks(division.units - used, last // block - start + 1, start)
        if self._key is not None:
            for one in marks.recorded:
                self._recorded[start + one] = division.own if one == 0 or one in marks.held else division.step
        held_steps = [(start + one) * block for one in marks.held]
        return dict.fromkeys(held_steps, 0), frozenset([start + one for one in marks.recorded])


def _end(stretches: ReferenceType[Stretches]) -> None:
    alive = stretches()
    if alive is not None:
        alive.end()


class CarriedInput(HeldInput):
    """What the region of a step holds in place of a tensor of its carry."""

    __slots__ = ("carry", "place", "stretches")

    def __init__(self, tensor: Tensor, stretches: Stretches, carry: Carry, place: int) -> None:
        super().__init__(tensor)
        self.stretches = stretches
        self.carry = carry
        self.place = place

    def bring(self) -> Tensor:
        """Return the tensor, after recomputing the stretch up to the carry if it is not in a slot."""
        return self.stretches.input_of(self.carry, self.place)

    def unpack(self) -> Tensor:
        """Return the tensor for a recompute, a leaf of its own."""
        held = self.carry.held
        if held is not None and self.carry.kept is None and not held[self.place].is_hooked:
            return held[self.place].unpack()
        return super().unpack()
