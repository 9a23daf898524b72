"""The ways in which the steps of a loop run: plainly, with a known length, and with one that is not known.

The observers at the top see the regions of single steps: what a step holds, and saved tensors that stay for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import BudgetError
from torchremat.loops.first_run import Body, Forward
from torchremat.loops.requests import LoopRequest, may_be_timed
from torchremat.loops.step_inputs import Slices
from torchremat.loops.stretches import Stretches
from torchremat.measuring.storages import storages_in
from torchremat.regions.region import Region
from torchremat.regions.settings import Observer, Settings
from torchremat.regions.slots import Recomputable
from torchremat.regions.transforms import new_region
from torchremat.schedules.binomial import CarrySlots, OnlineBorders
from torchremat.schedules.loop_schedules import LoopSchedule, within_bytes
from torchremat.stores.offloading import Offload, offload
from torchremat.tensors.sizes import format_bytes
from torchremat.tensors.structure import tensors_in

# The owner of tensors that a forward leaves in slots: no backward has this number.
_FORWARD = -2


class Keeping(Observer):
    """Lets the saved tensors of a step stay in their slots until the next step begins.

    Of a loop whose length is not known any step may be the last one, with which the backward begins.
    """

    def __init__(self) -> None:
        self._region: ReferenceType[Region] | None = None

    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """Keep a saved tensor."""
        slot = region.slots[-1]()
        if slot is not None:
            own = cast("Region", region)
            slot.put(_FORWARD, None, own.detached(tensor))  # See NOTE [ What is handed back to autograd ]

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """Let them stay, and drop the ones of the step before."""
        own = cast("Region", region)
        own.stays_for = _FORWARD
        self._region = ref(own)

    def _region_alive(self) -> Region | None:
        return None if self._region is None else self._region()

    def let_go(self) -> None:
        """Drop the saved tensors of the step that ran last."""
        region = self._region_alive()
        if region is not None:
            region.stays_for = None
            region.forget(_FORWARD)


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """The bytes of a step, each storage once.

    Attributes:
        carry: Of the carry that it returns, without what it hands on of its own.
        step: What autograd saves in it beyond what was there before, and beyond what the next step saves as well.
        shared: The part of that which is the carry that it is given.
        state: Of the states of generators that it drew from, which every step keeps for itself.
    """

    carry: int
    step: int
    shared: int
    state: int


class Measuring(Keeping):
    """Measures what one step holds; it keeps what autograd saves in the step."""

    def __init__(self) -> None:
        super().__init__()
        self._saved: list[Tensor] = []
        self._before: list[Tensor] = []

    def began(self, region: Recomputable, call: int, tensors: list[Tensor]) -> None:
        """Note the inputs."""
        self._before += tensors

    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """Note a saved tensor."""
        super().saved(region, call, tensor)
        self._saved.append(tensor.detach())
        if tensor.is_leaf and tensor.requires_grad:
            self._before.append(self._saved[-1])

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """Note what the body reaches."""
        super().ended(region, call, output)
        self._before += region.calls[call].reached()

    def end(self, given: list[Tensor], returned: list[Tensor]) -> StepBytes:
        """Return the bytes, and let go of the tensors."""
        before, saved = _sizes(self._before), _sizes(self._saved)
        carry = _sizes(returned)
        shared = 0
        for one, other in zip(given, returned, strict=True):
            into, out = _sizes([one]), _sizes([other])
            # A carry that is saved on its way out is there on the way in already.
            if into.keys() <= saved.keys() and not out.keys() <= saved.keys():
                shared += sum(out.values())
        self._saved.clear()
        self._before.clear()
        region = self._region_alive()
        return StepBytes(
            carry=sum(size for address, size in carry.items() if address not in before),
            step=sum(size for address, size in saved.items() if address not in before) + shared,
            shared=shared,
            state=0 if region is None else sum(one.nbytes for one in region.calls[0].generators.values()),
        )


def _sizes(tensors: list[Tensor]) -> dict[int, int]:
    return {storage.data_ptr(): storage.nbytes() for storage in storages_in(tensors)}


class Way(Protocol):
    """Runs the steps of a loop in order."""

    def run(self, index: int, carry: object, tensors: list[Tensor]) -> object:
        """Run a step and return its output, given its carry and the tensors in it."""
        ...


class KnownWay:
    """Runs the steps of a loop whose length is known.

    Attributes:
        keeps_first: Whether autograd keeps the saved tensors of the first step.
    """

    def __init__(self, forward: Forward, schedule: LoopSchedule, stores: Sequence[Offload]) -> None:
        self._forward = forward
        self._borders = borders = schedule.borders()
        self._block = schedule.block
        self._kept = frozenset(borders.kept_blocks)
        self.keeps_first = 0 in self._kept
        stretches = forward.stretches
        stretches.stores, stretches.hierarchy = stores, schedule.hierarchy if stores else None
        stretches.division, stretches.block, stretches.kept = schedule.division, schedule.block, borders.kept_blocks

    def take_first(self, tensors: list[Tensor]) -> None:
        """Move the first carry to its store, if it has one: the first step ran before the schedule was known."""
        place = self._borders.places.get(0)
        if place:
            self._forward.move(tensors, place)

    def run(self, index: int, carry: object, tensors: list[Tensor]) -> object:
        """Run a step and return its output."""
        borders = self._borders
        if index // self._block in self._kept:
            return self._forward.run_plainly(index, carry)
        return self._forward.run(index, carry, tensors, place=borders.places.get(index))


class OnlineWay:
    """Runs the steps of a loop that ends when its condition says so."""

    def __init__(self, forward: Forward, slots: int) -> None:
        forward.stretches.division = CarrySlots(slots)
        self._forward = forward
        self._borders = OnlineBorders(slots)
        # A policy keeps tensors in slots of its own.
        self._keeping = Keeping() if forward.settings.policy is None else None
        self._settings = replace(forward.settings, observer=self._keeping)

    def run(self, index: int, carry: object, tensors: list[Tensor]) -> object:
        """Run a step and return its output."""
        if self._keeping is not None:
            self._keeping.let_go()
        in_slot = True
        if index:
            dropped = self._borders.next()
            in_slot = dropped is None or dropped < self._borders.slots
            if in_slot and dropped is not None:
                self._forward.stretches.drop(dropped)
        return self._forward.run(index, carry, tensors, place=0 if in_slot else None, settings=self._settings)


class MeasuredWay:
    """Measures the first step, and runs the others by what it has shown.

    Args:
        follow: Returns the way for the other steps, given the bytes of the first, and its seconds.
        is_timed: Whether the seconds are measured.
    """

    def __init__(self, forward: Forward, follow: Callable[[StepBytes, float | None], Way], *, is_timed: bool) -> None:
        self._forward = forward
        self._follow = follow
        self._is_timed = is_timed
        self._measuring = Measuring()
        self._way: Way | None = None

    def run(self, index: int, carry: object, tensors: list[Tensor]) -> object:
        """Run a step and return its output.

        Raises:
            BudgetError: The first step does not fit.
        """
        if self._way is not None:
            if index == 1 and not (isinstance(self._way, KnownWay) and self._way.keeps_first):
                self._measuring.let_go()
            return self._way.run(index, carry, tensors)
        forward, measuring = self._forward, self._measuring
        settings = replace(forward.settings, observer=measuring)
        device = tensors[0].device
        clock = accelerator_of(device).seconds if self._is_timed else None
        start_s = clock(device) if clock else 0.0
        output = forward.run(index, carry, tensors, place=0, settings=settings)
        step_s = max(clock(device) - start_s, 1e-9) if clock else None
        following = tensors_in(cast("tuple[object, ...]", output)[:1]) if isinstance(output, tuple) else []
        if len(following) == len(tensors):  # else the check of the carry says so
            self._way = self._follow(measuring.end(tensors, following), step_s)
            if isinstance(self._way, KnownWay):
                self._way.take_first(tensors)
        return output


def way_of(
    body: Body,
    slices: Slices,
    tensors: list[Tensor],
    steps: int | None,
    request: LoopRequest,
    settings: Settings,
) -> Way:
    """Return the way in which a loop runs whose backward recomputes."""
    forward = Forward(body, slices, Stretches(len(tensors), new_region(settings).held_tensor), settings)
    stores = [offload(store, window_bytes=0) for store in request.stores]
    with_slots = LoopSchedule(steps=steps, slots=request.slots or 1, step_costs=request.step_costs)

    def follow(schedule: LoopSchedule, step_s: float | None) -> Way:
        if stores:
            schedule = replace(schedule, stores=request.store_costs(tensors, schedule.block, step_s))
        if request.on_schedule is not None:
            request.on_schedule(schedule)
        return OnlineWay(forward, schedule.slots) if steps is None else KnownWay(forward, schedule, stores)

    def within(step_bytes: StepBytes, step_s: float | None) -> Way:
        if request.slots is not None:
            return follow(with_slots, step_s)
        most = steps or request.max_length or 0
        budget_bytes = request.budget_bytes - most * step_bytes.state
        if budget_bytes < 1:
            raise BudgetError(
                f"a budget of {format_bytes(request.budget_bytes)} is below what {most} steps keep of the generators "
                f"that they draw from, {format_bytes(step_bytes.state)} each."
            )
        sizes = step_bytes.carry, step_bytes.step, budget_bytes
        schedule = within_bytes(
            steps, *sizes, shared_bytes=step_bytes.shared, mixes=not stores, step_costs=request.step_costs
        )
        return follow(replace(schedule, state_bytes=step_bytes.state), step_s)

    is_timed = bool(stores) and request.transfer_steps is None and may_be_timed(tensors)
    if request.slots is None or is_timed:
        return MeasuredWay(forward, within, is_timed=is_timed)
    return follow(with_slots, None)
