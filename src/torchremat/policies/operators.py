"""Policies by operator."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from torchremat._compat.operators import name_of, overloads_of, packets_of, pattern_of
from torchremat.errors import PolicyError
from torchremat.policies.policy import Policy
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext
from torchremat.regions.naming import name


@dataclass(frozen=True)
class _Constant(Policy):
    label: str
    decision: Decision
    by_operator = True

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        return self.decision

    def __repr__(self) -> str:
        return self.label


nothing_saved: Policy = _Constant("nothing_saved", RECOMPUTE)
"""The policy that keeps nothing: the region is a plain checkpoint."""
everything_saved: Policy = _Constant("everything_saved", SAVE)
"""The policy that keeps every output, as far as autograd or a recompute asks for it."""


@dataclass(frozen=True)
class _Operators(Policy):
    names: frozenset[str]
    label: str
    by_operator = True

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        if op is name:
            return RECOMPUTE
        namespace, packet, overload = name_of(op)
        kept = not self.names.isdisjoint(
            (f"{namespace}.*", f"{namespace}.{packet}", f"{namespace}.{packet}.{overload}")
        )
        return SAVE if kept else RECOMPUTE

    def __repr__(self) -> str:
        return self.label


def save_operators(*operators: object) -> Policy:
    """Return the policy that keeps the outputs of some operators.

    Args:
        operators: Each an overload (`torch.ops.aten.mm.default`), a packet (`torch.ops.aten.mm`, all of its overloads),
            a namespace (`torch.ops.mylib`, all of its operators), a higher-order operator, or the name of one of
            these: `"aten.mm.default"`, `"aten.mm"`, `"mylib.*"`.

    Raises:
        PolicyError: An operator does not exist, or none is given.
    """
    if not operators:
        raise PolicyError("save_operators(): name at least one operator.")
    names = frozenset(_pattern_of(one) for one in operators)
    return _Operators(names, f"save_operators({', '.join(map(repr, sorted(names)))})")


def _pattern_of(operator: object) -> str:
    if isinstance(operator, str):
        return _checked(operator)
    found = pattern_of(operator)
    if found is None:
        raise PolicyError(
            f"save_operators: expected an operator such as torch.ops.aten.mm or its name, got {operator!r}. Functions "
            "of torch and methods of tensors are not operators: one may run several."
        )
    return found


def _checked(wanted: str) -> str:
    namespace, _, rest = wanted.partition(".")
    if not rest:
        raise PolicyError(
            f"save_operators({wanted!r}): expected a name such as 'aten.mm', 'aten.mm.default' or 'mylib.*'."
        )
    if namespace == "higher_order":
        return wanted
    known = packets_of(namespace)
    packet, _, overload = rest.partition(".")
    if not known or (packet != "*" and packet not in known):
        close = difflib.get_close_matches(packet, known, n=5, cutoff=0.4)
        there = f"Closest: {', '.join(f'{namespace}.{one}' for one in close)}." if close else "It has none like it."
        missing = f"has no operator `{packet}`. {there}" if known else "is not a namespace of operators."
        raise PolicyError(f"save_operators({wanted!r}): `{namespace}` {missing}")
    overloads = overloads_of(namespace, packet) if overload else []
    if overload and overload not in overloads:
        raise PolicyError(
            f"save_operators({wanted!r}): {namespace}.{packet} has no overload `{overload}`. It has: "
            f"{', '.join(overloads)}."
        )
    return wanted


_UNBATCHED = ("aten.mm", "aten.addmm", "aten._scaled_mm", "aten._int_mm", "aten.mv", "aten.addmv")
_BATCHED = ("aten.bmm", "aten.baddbmm", "aten.dot", "aten.vdot")
_CONVOLUTIONS = ("aten.convolution", "aten._convolution", "aten.mkldnn_convolution", "aten.cudnn_convolution")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "higher_order.flex_attention.default",
)

save_matmuls: Policy = _Operators(frozenset((*_UNBATCHED, *_BATCHED)), "save_matmuls")
"""The policy that keeps the outputs of matrix products, those of linear layers and of attention that is written out."""
save_unbatched_matmuls: Policy = _Operators(frozenset(_UNBATCHED), "save_unbatched_matmuls")
"""The policy that keeps the outputs of products without batch dimensions: those of linear layers."""
save_attention: Policy = _Operators(frozenset(_ATTENTION), "save_attention")
"""The policy that keeps the outputs of attention kernels: `scaled_dot_product_attention`, and flex attention."""
save_convolutions: Policy = _Operators(frozenset(_CONVOLUTIONS), "save_convolutions")
"""The policy that keeps the outputs of convolutions."""
