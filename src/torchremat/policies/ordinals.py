"""Policies by the number of the operator: for plans, which know the operators of a module."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torchremat.errors import OrderWarning, warn
from torchremat.policies.policy import Policy
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext, Window
from torchremat.regions.runtime import name
from torchremat.regions.selective.op_info import op_info_of


@dataclass(frozen=True)
class _Ordinals(Policy):
    operators: tuple[str, ...]
    held: frozenset[int]
    saves: tuple[int, ...] = ()
    asks_about_writes = True
    told: set[str | None] = field(default_factory=set[str | None], compare=False, repr=False)

    @cached_property
    def asks_in(self) -> tuple[Window, ...] | None:  # pyright: ignore[reportIncompatibleVariableOverride]: read alone
        return windows_of(self.operators, self.held, self.saves)

    @cached_property
    def _exchanges(self) -> frozenset[str]:
        return frozenset(name for name in map(self.operators.__getitem__, self.held) if _communicates(name))

    def __call__(self, ctx: OperatorContext, op: Any, /, *args: Any, **kwargs: Any) -> Decision:
        op_info = op_info_of(op)
        if op is name or not op_info.is_counted:
            return RECOMPUTE
        if op_info.is_paired and self._exchanges:
            return SAVE  # all alike; a send has nothing that a plan would hold
        ordinal = ctx.ordinal
        planned = self.operators[ordinal] if ordinal < len(self.operators) else "no operator any more"
        if planned != op_info.name:
            # Any decision is exact; only the memory is no longer known, and this decision takes the least.
            self._tell(ctx.module, f"runs {op} as its operator number {ordinal}, and was planned with {planned} there")
            return SAVE if op_info.name in self._exchanges else RECOMPUTE
        return SAVE if ordinal in self.held else RECOMPUTE

    def _tell(self, module: str | None, what: str) -> None:
        if module in self.told:
            return
        self.told.add(module)
        warn(
            f"{f'`{module}`' if module else 'a module of the plan'} {what}; operators that the plan does not know "
            "are recomputed. Gradients stay exact, but the memory may differ from the plan: plan again for what runs "
            "now (other switches, dtypes, train or eval), or with operators=False if operators depend on the data.",
            OrderWarning,
        )

    def __repr__(self) -> str:
        return f"save_ordinals({sorted(self.held)} of {len(self.operators)} operators)"


def windows_of(operators: tuple[str, ...], held: Iterable[int], saves: Sequence[int]) -> tuple[Window, ...] | None:
    """Return the operators of a call that `save_ordinals` is asked about: those that matter to it, and some beside.

    Operators that write in place matter: their watcher copies held outputs in that memory first. So do operators that
    return views with their own version counter, which torch calls unsafe: see NOTE [ Selective recompute ], 4.

    Args:
        operators: See `save_ordinals`.
        held: See `save_ordinals`.
        saves: See `save_ordinals`.

    Returns:
        None if it must be asked about all: a call that runs more than planned, for more of its experts say, may
        exchange only after them.
    """
    if any(_communicates(operators[number]) for number in held):
        return None
    matter = {*held, *(number for number, name in enumerate(operators) if _writes(name))}
    windows: list[Window] = []
    for number in sorted(matter):
        window = _window_of(number, saves)
        if windows and window.on <= bisect_right(saves, windows[-1].last) + 1:  # the mode is still on
            windows[-1] = windows[-1]._replace(last=number)
        else:
            windows.append(window)
    return tuple(windows)


def _window_of(number: int, saves: Sequence[int]) -> Window:
    """Return the shortest window that ends with an operator."""
    sees = bisect_right(saves, number)
    first = saves[sees - 1] if sees else 0
    # Two operators before: one that writes in place copies in the middle of its saves, and is no other operator then.
    on = bisect_right(saves, first - 2)
    return Window(number, first, on, sees) if on else Window(number)


def _communicates(name: str) -> bool:
    return name.partition(".")[0] in ("c10d", "_c10d_functional", "_dtensor")


def _writes(name: str) -> bool:
    packet = name.partition(".")[2].partition(".")[0]
    return (packet.endswith("_") and not packet.endswith("__")) or packet.startswith("unsafe_")


def save_ordinals(operators: tuple[str, ...], held: frozenset[int], saves: tuple[int, ...] = ()) -> Policy:
    """Return the policy that keeps the outputs of operators by their numbers in a call.

    Args:
        operators: The names of all operators that a call runs, as torch has them, without casts and views.
        held: The numbers of the operators whose outputs are kept.
        saves: How many of the operators have begun before each tensor that the call saves, if that is known.
    """
    return _Ordinals(operators, held, saves)
