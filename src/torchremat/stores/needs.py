"""Saved tensors whose values backward does not need: it needs only the shape, or a bit for each element.

NOTE [ A surrogate ]
A max pool saves its input but uses only its shape; relu saves its result but uses only where it is above zero. In
backward such a slot gets a *surrogate*: a tensor of the same shape, strides, dtype and device, for which the node's
formula yields the same gradient bit for bit. The same holds for double backward: the node of the second derivative
saves the surrogate, and uses no more of it. The table below was made from autograd's formulas, and
tests/stores/test_needs.py checks each entry against the installed torch: over dtypes, memory formats, values on the
borders, infinities and NaNs, first and second derivatives. Formulas change from one torch to the next, so under a torch
newer than those it was checked against nothing is narrowed.

Missing on purpose: pairs of slots that depend on each other (the two sides of `maximum`), and slots that must
distinguish three cases (`abs`, whose derivative at zero is zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from torchremat._compat.operators import above_bound, below_bound
from torchremat.stores.codecs.lossless import spread_bits
from torchremat.tensors.metadata import Metadata

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class TwoCases:
    """A tensor for which it matters only which of two cases each element is.

    Attributes:
        bits: Bool, of one dimension, in the order of the tensor's memory.
        true: The value for the elements whose bit is set.
        false: The value for the others.
    """

    bits: Tensor
    true: float
    false: float


def surrogate(metadata: Metadata, packed: Tensor, true: float, false: float) -> Tensor:
    """Return the surrogate of a tensor that was split."""
    shape, dtype, _, strides = metadata
    assert isinstance(strides, tuple)
    return spread_bits(packed, shape.numel(), true, false, dtype).as_strided(shape, strides)


def in_order(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a view of one dimension, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Shape:
    """Only the shape is needed."""


SHAPE = Shape()
# Makes the split of a slot from the node and the saved tensor, in memory order; None if it has no split.
Splitter = Callable[[Any, Tensor], "TwoCases | None"]


def _ones(tensor: Tensor) -> Tensor:
    return tensor.new_ones(()).expand_as(tensor)


# Where a backward formula has its own kernel, that kernel is asked which elements pass a gradient of one: so the
# code need not know how it compares (bfloat16 with 0.1, NaNs with anything).


def _relu(_: object, result: Tensor) -> TwoCases:
    return TwoCases((result <= 0).logical_not_(), 1.0, 0.0)  # NaNs pass the gradient


def _leaky_relu(_: object, tensor: Tensor) -> TwoCases:
    return TwoCases(tensor > 0, 1.0, 0.0)


def _hardtanh(node: Any, tensor: Tensor) -> TwoCases | None:
    least, most = node._saved_min_val, node._saved_max_val
    middle = _middle(least, most, tensor.dtype)
    if middle is None or _has_unsure_nans(tensor):
        return None
    return TwoCases(_aten.hardtanh_backward(_ones(tensor), tensor, least, most) != 0, middle, inf)


def _threshold(node: Any, tensor: Tensor) -> TwoCases | None:
    threshold = node._saved_threshold
    if not math.isfinite(threshold):
        return None
    return TwoCases(_aten.threshold_backward(_ones(tensor), tensor, threshold) != 0, inf, -inf)


def _hardsigmoid(_: object, tensor: Tensor) -> TwoCases:
    return TwoCases(_aten.hardsigmoid_backward(_ones(tensor), tensor) != 0, 0.0, inf)


def _shrink(backward: Callable[[Tensor, Tensor, float], Tensor], node: Any, tensor: Tensor) -> TwoCases | None:
    width = node._saved_lambd
    if not 0 <= width < inf or _has_unsure_nans(tensor):
        return None
    return TwoCases(backward(_ones(tensor), tensor, width) != 0, inf, 0.0)


def _clamp(node: Any, tensor: Tensor) -> TwoCases | None:
    least, most = node._saved_min, node._saved_max
    if least is None or most is None:
        return _clamp_min(node, tensor) if most is None else _clamp_max(node, tensor)
    middle = _middle(least, most, tensor.dtype)
    if middle is None:
        return None
    return TwoCases(above_bound(tensor, least).logical_and_(below_bound(tensor, most)), middle, nan)


def _clamp_min(node: Any, tensor: Tensor) -> TwoCases | None:
    least = node._saved_min
    return None if math.isnan(least) else TwoCases(above_bound(tensor, least), inf, nan)


def _clamp_max(node: Any, tensor: Tensor) -> TwoCases | None:
    most = node._saved_max
    return None if math.isnan(most) else TwoCases(below_bound(tensor, most), -inf, nan)


def _has_unsure_nans(tensor: Tensor) -> bool:
    # These CPU kernels pass a gradient through a NaN or not, depending on whether the strides of the gradient allow
    # vectorization. The forward does not know these strides.
    return tensor.device.type == "cpu" and bool(tensor.isnan().any())


@cache
def _middle(least: float, most: float, dtype: torch.dtype) -> float | None:
    """Return a value between the two, however they are rounded to the dtype; None if no such value exists."""
    if not (math.isfinite(least) and math.isfinite(most)):
        return None
    ends = torch.tensor([least, most], dtype=torch.float64)
    rounded = ends.to(dtype).to(torch.float64)
    low, high = float(torch.maximum(ends, rounded)[0]), float(torch.minimum(ends, rounded)[1])
    middle = float(torch.tensor(low / 2 + high / 2, dtype=dtype))
    return middle if low < middle < high else None


Need = Shape | Splitter

_SHAPE_OF_SELF = (
    "AdaptiveAvgPool2DBackward0", "AdaptiveAvgPool3DBackward0", "AdaptiveMaxPool2DBackward0",
    "AdaptiveMaxPool3DBackward0", "AvgPool2DBackward0", "AvgPool3DBackward0", "CummaxBackward0", "CumminBackward0",
    "FractionalMaxPool2DBackward0", "FractionalMaxPool3DBackward0", "GatherBackward0", "MaskedSelectBackward0",
    "MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0", "NllLoss2DBackward0", "NllLossBackward0",
    "ReflectionPad1DBackward0", "ReflectionPad2DBackward0", "ReflectionPad3DBackward0", "ReplicationPad1DBackward0",
    "ReplicationPad2DBackward0", "ReplicationPad3DBackward0", "TakeBackward0",
)  # fmt: skip
# By the name of the node and the name of the slot. See NOTE [ A surrogate ]
NEEDS: Mapping[str, Mapping[str, Need]] = {
    **{node: {"self": SHAPE} for node in _SHAPE_OF_SELF},
    "ClampBackward1": {"self": _clamp},
    "ClampMaxBackward0": {"self": _clamp_max},
    "ClampMinBackward0": {"self": _clamp_min},
    "HardshrinkBackward0": {"self": partial(_shrink, _aten.hardshrink_backward)},
    "HardsigmoidBackward0": {"self": _hardsigmoid},
    "HardtanhBackward0": {"self": _hardtanh},
    "LeakyReluBackward0": {"self": _leaky_relu},
    "LeakyReluBackward1": {"result": _leaky_relu},
    "NativeLayerNormBackward0": {"bias": SHAPE},
    "ReluBackward0": {"result": _relu},
    "SoftshrinkBackward0": {"self": partial(_shrink, _aten.softshrink_backward)},
    "ThresholdBackward0": {"self": _threshold},
    "ThresholdBackward1": {"self": _threshold},
}
