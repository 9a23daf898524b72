"""Policies by the size of an operator's output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from torchremat.policies.policy import Policy
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext
from torchremat.tensors.sizes import parse_bytes


@dataclass(frozen=True)
class _Sizes(Policy):
    size_bytes: int
    larger: bool

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        found = _bytes(ctx.op_output)
        return SAVE if (found > self.size_bytes if self.larger else found < self.size_bytes) else RECOMPUTE

    def __repr__(self) -> str:
        return f"save_{'larger' if self.larger else 'smaller'}_than({self.size_bytes})"


def save_smaller_than(size: int | str) -> Policy:
    """Return the policy that keeps operator outputs smaller than `size`, in bytes or `"64KiB"`."""
    return _Sizes(parse_bytes(size), larger=False)


def save_larger_than(size: int | str) -> Policy:
    """Return the policy that keeps operator outputs larger than `size`, in bytes or `"1MiB"`.

    Together with others: `save_matmuls & ~save_larger_than("64MiB")`.
    """
    return _Sizes(parse_bytes(size), larger=True)


def _bytes(output: object) -> int:
    if isinstance(output, Tensor):
        return output.numel() * output.element_size()
    if isinstance(output, tuple | list):
        return sum(map(_bytes, cast("list[object]", output)))
    return 0
