"""What the caller of a loop asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchremat.errors import UnsupportedError
from torchremat.schedules.loops import LoopSchedule
from torchremat.stores.tiers import Tiers
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
    transfer_steps: float
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
        if self.stores and self.slots == 1:
            raise UnsupportedError("loop: stores= needs at least two slots, one of them for a carry that is back.")
        if not self.transfer_steps >= 0:
            raise UnsupportedError(f"loop: transfer_steps={self.transfer_steps!r}: expected a number of steps.")

    @property
    def budget_bytes(self) -> int:
        """The budget in bytes, if there is one."""
        assert self.budget is not None
        return parse_bytes(self.budget)

    @property
    def store(self) -> Store | None:
        """The store for carries, if there is one."""
        return None if not self.stores else self.stores[0] if len(self.stores) == 1 else Tiers(*self.stores)

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
