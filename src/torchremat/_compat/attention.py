"""Flops of attention whose keys and values have fewer heads than its queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torchremat._compat.binding import RELEASE

# By operator, the place of the query in its arguments; key and value follow.
_QUERIES = {
    f"_scaled_dot_product_{kernel}_attention{suffix}": place
    for kernel in ("flash", "efficient", "cudnn")
    for suffix, place in (("", 0), ("_backward", 1))
}


def grouped_formulas(formulas: dict[object, Callable[..., int]]) -> dict[object, Callable[..., int]]:
    """Return formulas that replace torch's, by operator, so that heads may be grouped."""
    # Torch 2.11's formulas raise an AssertionError where the numbers of heads differ; torch 2.13's do not.
    if RELEASE >= (2, 13):
        return {}
    operators = {getattr(torch.ops.aten, name): place for name, place in _QUERIES.items()}
    return {one: _grouped(formulas[one], place) for one, place in operators.items() if one in formulas}


def _grouped(formula: Callable[..., int], place: int) -> Callable[..., int]:
    """Return a formula that calls another one with as many heads of keys and values as queries have.

    The kernel computes with these numbers; the formula takes shapes as well as tensors.
    """

    def flops(*args: Any, **kwargs: Any) -> int:
        query, *pair = args[place : place + 3]
        repeated = [torch.Size((*one.shape[:-3], query.shape[-3], *one.shape[-2:])) for one in pair]
        return formula(*args[: place + 1], *repeated, *args[place + 3 :], **kwargs)

    return flops
