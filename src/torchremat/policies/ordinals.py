"""Policies by the number of the operator: for plans, which know what a module runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchremat.errors import PlanError
from torchremat.policies.policy import Policy
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext
from torchremat.regions.naming import name
from torchremat.regions.traits import traits_of


@dataclass(frozen=True)
class _Ordinals(Policy):
    operators: tuple[str, ...]
    held: frozenset[int]

    def __call__(self, ctx: OperatorContext, op: Any, /, *args: Any, **kwargs: Any) -> Decision:
        # Casts are not counted, see `regions.traits`.
        if op is name or traits_of(op).is_cast:
            return RECOMPUTE
        ordinal = ctx.ordinal
        planned = self.operators[ordinal] if ordinal < len(self.operators) else "no operator any more"
        if planned != str(op):
            raise PlanError(
                f"{f'`{ctx.module}`' if ctx.module else 'a module of the plan'} runs {op} as its operator number "
                f"{ordinal}, and was planned with {planned} there. A plan that holds single operators needs the same "
                "ones in each step: plan again for what runs now (other shapes, dtypes, switches, train or eval), or "
                "with operators=False."
            )
        return SAVE if ordinal in self.held else RECOMPUTE

    def __repr__(self) -> str:
        return f"save_ordinals({sorted(self.held)} of {len(self.operators)} operators)"


def save_ordinals(operators: tuple[str, ...], held: frozenset[int]) -> Policy:
    """Return the policy that keeps the outputs of operators by their numbers in a call.

    Args:
        operators: The names of all operators that a call runs, as torch has them, without casts.
        held: The numbers of those whose outputs are kept.
    """
    return _Ordinals(operators, held)
