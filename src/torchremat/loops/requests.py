"""What the caller of a loop asks for, and what it takes to move a carry to a store and back, in steps.

Where the caller does not say the times of moves, they are measured. The step is the first one of the loop, timed as it
runs; no step runs for that alone. The store is timed as for a plan, once for carries of a size, in a thread of its own:
hooks, modes and autocast of the caller's are not those of a store. Times are rounded to powers of two, so that a loop
has the same schedule in most training steps, and its table is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import log2
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchremat._compat.fakes import is_fake
from torchremat._compat.transforms import is_transformed
from torchremat.errors import UnsupportedError
from torchremat.measuring.store_speeds import Payload, Speed, measured_speed
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.schedules.hierarchies import StoreCost
from torchremat.schedules.loop_schedules import LoopSchedule
from torchremat.stores.base import statistics_of
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import parse_bytes


@dataclass(frozen=True, kw_only=True)
class LoopRequest:
    """The options of a loop, as of `loop`.

    Raises:
        BudgetError: The budget is not a size.
        UnsupportedError: An option has an invalid value, or two contradict each other.
    """

    length: int | None
    condition: Callable[[Any], object] | None
    max_length: int | None
    slots: int | None
    budget: int | str | None
    stores: tuple[Store, ...]
    transfer_steps: float | tuple[float, ...] | None
    step_costs: tuple[float, ...] | None
    on_schedule: Callable[[LoopSchedule], object] | None

    def __post_init__(self) -> None:
        """Refuse options that cannot be honoured."""
        for name in ("length", "max_length", "slots"):
            value: object = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UnsupportedError(f"loop: {name}={value!r}: expected an int of at least 1.")
        if (self.slots is None) == (self.budget is None):
            raise UnsupportedError("loop: pass either slots=, a number of carries, or budget=, bytes.")
        if self.budget is not None:
            parse_bytes(self.budget)
        if self.condition is not None and self.length is not None:
            raise UnsupportedError("loop: length= and condition= contradict each other; see max_length=.")
        if self.condition is None and self.max_length is not None:
            raise UnsupportedError("loop: max_length= is for a loop with a condition=.")
        if self.stores and self.condition is not None:
            raise UnsupportedError("loop: stores= need a length that is known; a condition= has none.")
        if self.step_costs is not None:
            if self.condition is not None:
                raise UnsupportedError(
                    "loop: step_costs= are the times of all steps, and with a condition= their number is not known. "
                    "Leave out step_costs=, or pass length= in place of condition=."
                )
            if self.stores:
                raise UnsupportedError(
                    "loop: step_costs= and stores= together: the places of carries in stores are found for steps that "
                    "take the same time. Leave out step_costs=, and the mean step counts; or leave out stores=."
                )
            if not all(isinstance(one, int | float) and 0 <= one < math.inf for one in self.step_costs):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
                raise UnsupportedError("loop: step_costs= has to be the times of the steps, numbers from 0 on.")
        given = 0.0 if self.transfer_steps is None else self.transfer_steps
        times = given if isinstance(given, tuple) else (given,)
        if not all(isinstance(one, int | float) and one >= 0 for one in times):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
            raise UnsupportedError(f"loop: transfer_steps={self.transfer_steps!r}: expected a number of steps.")
        if isinstance(self.transfer_steps, tuple) and len(times) != len(self.stores):
            raise UnsupportedError(
                f"loop: transfer_steps={self.transfer_steps!r} has {len(times)} times, and stores= {len(self.stores)} "
                "stores; pass one time for each, or one for all."
            )

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, if there is one."""
        assert self.budget is not None
        return parse_bytes(self.budget)

    def store_costs(self, tensors: Sequence[Tensor], block: int, step_s: float | None) -> tuple[StoreCost, ...]:
        """Return what the stores have and take for carries, in blocks of so many steps."""
        given = self.transfer_steps
        if given is None:
            moves = [move_steps(store, tensors, step_s) for store in self.stores]
        else:
            times = given if isinstance(given, tuple) else (given,) * len(self.stores)
            moves = [(time / 2, time / 2) for time in times]
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        return tuple(
            StoreCost(room=_room(store, size_bytes), write_steps=write / block, read_steps=read / block)
            for store, (write, read) in zip(self.stores, moves, strict=True)
        )

    def steps(self, slices: int | None) -> int | None:
        """Return the number of steps, None if only the condition knows.

        Args:
            slices: The number of slices that are scanned, if any.

        Raises:
            UnsupportedError: It is zero, missing, or another than the length.
        """
        if self.condition is not None:
            if slices is not None:
                raise UnsupportedError("loop: xs and condition= contradict each other; xs has a length.")
            return None
        if slices is None and self.length is None:
            raise UnsupportedError("loop: pass xs, length= or condition=.")
        if slices is not None and self.length is not None and slices != self.length:
            raise UnsupportedError(f"loop: length={self.length}, but xs has {slices} slices.")
        steps = slices if slices is not None else self.length
        if steps == 0:
            raise UnsupportedError("loop: xs has no slice, so the form of the outputs is not known. Pass at least one.")
        if self.step_costs is not None and len(self.step_costs) != steps:
            raise UnsupportedError(f"loop: step_costs= has {len(self.step_costs)} times for {steps} steps.")
        return steps

    def goes_on(self, index: int, steps: int | None, carry: object) -> bool:
        """Return whether step `index` runs.

        Raises:
            UnsupportedError: The condition asks for more steps than allowed.
        """
        if self.condition is None:
            assert steps is not None
            return index < steps
        with torch.no_grad():
            more = bool(self.condition(carry))
        if more and self.max_length is not None and index >= self.max_length:
            raise UnsupportedError(
                f"loop: the condition still holds after max_length={self.max_length} steps. Raise max_length, or see "
                "why the loop does not end."
            )
        return more


def _room(store: Store, carry_bytes: int) -> int | None:
    """Return how many carries a store has room for, None without a limit."""
    statistics = statistics_of(store)
    if statistics is None or statistics.limit_bytes is None:
        return None
    return max(statistics.limit_bytes - statistics.stored_bytes, 0) // max(carry_bytes, 1)


# Less of a step than this is nothing.
_LEAST_STEPS = 2.0**-10

_speeds: WeakKeyDictionary[Store, dict[tuple[torch.device, Payload], Speed]] = WeakKeyDictionary()


def may_be_timed(tensors: Sequence[Tensor]) -> bool:
    """Return whether steps with such a carry have times: not so while the library itself measures, or plans."""
    return not (is_rehearsing() or is_transformed() or any(map(is_fake, tensors)))


def move_steps(store: Store, tensors: Sequence[Tensor], step_s: float | None) -> tuple[float, float]:
    """Return how many steps it takes to write a carry to a store, and to read it.

    Args:
        store: The store.
        tensors: The tensors of the carry.
        step_s: The seconds of a step; without, each move takes half a step.
    """
    if step_s is None:
        return 0.5, 0.5
    speed = _speed_of(store, tensors)
    count, size_bytes = len(tensors), sum(tensor.nbytes for tensor in tensors)
    write, read = (_round(one.seconds(count, size_bytes) / step_s) for one in (speed.out, speed.back))
    return write, read


def _speed_of(store: Store, tensors: Sequence[Tensor]) -> Speed:
    known = _speeds.setdefault(store, {})
    key = tensors[0].device, Payload(tensors=tuple((tensor.nbytes, tensor.dtype) for tensor in tensors))
    if key not in known:
        statistics = statistics_of(store)
        limit_bytes = None if statistics is None else statistics.limit_bytes
        with ThreadPoolExecutor(1) as pool:
            known[key] = pool.submit(measured_speed, store, *key, limit_bytes).result()
    return known[key]


def _round(steps: float) -> float:
    return 2.0 ** round(log2(steps)) if steps >= _LEAST_STEPS else 0.0
