"""`FlopCounter`: the flops of matrix products, convolutions, attention and recurrent layers, as they run.

The formulas come from torch's own registry, so totals equal `torch.utils.flop_counter.FlopCounterMode`'s, and those
that the registry lacks are here. Each takes the operator's arguments and `out_val`, the operator's result. A matrix
product of (m, k) and (k, n) is 2*m*k*n flops, as in the registry. The counter keeps a running `total` that a hook can
read at any time, separates recomputed flops, and costs a dictionary lookup per operator.

Missing on purpose: elementwise operators, and the inside of higher-order operators without their own formula (`cond`);
operators that are not matrix products at heart (solvers and decompositions of `torch.linalg`, FFTs, dot and outer
products), products with sparse or packed matrices, and the fused operators that `nn.MultiheadAttention` and
`nn.TransformerEncoderLayer` run without grad. Compiled code runs eagerly under the counter, so its flops describe the
eager code.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat._compat.operators import grouped_formulas, has_kernel, is_query
from torchremat._compat.tensors import is_jagged, is_nested_strided
from torchremat.regions.selective.op_info import op_info_of
from torchremat.tensors.structure import tensors_in

# -------------------------------------------------------------------------------------------- formulas that torch lacks

Formula = Callable[..., int]

OF_TORCH = cast("dict[object, Formula]", flop_registry)
# Attention formulas that this torch has only for equally many heads of keys and queries.
_GROUPS_OF_HEADS = grouped_formulas(OF_TORCH)
_ATTENTION = OF_TORCH | _GROUPS_OF_HEADS
_FLASH = "_scaled_dot_product_flash_attention"


def _product(_: Tensor, one: Tensor, other: Tensor, **rest: object) -> int:
    """Of `self + one @ other`, with matrices, batches of them or a vector."""
    return _matmul(one, other)


def _matmul(one: Tensor, other: Tensor, *_: object, **rest: object) -> int:
    return 2 * one.numel() * (other.shape[-1] if other.ndim > 1 else 1)


def _grouped(one: Tensor, other: Tensor, *_: object, **rest: object) -> int:
    """Offsets divide one side of a matrix among the groups, so each of its entries belongs to one group.

    one           other         groups are parts of
    (m, k)        (g, k, n)     m
    (g, m, k)     (k, n)        n
    (m, k)        (k, n)        k, and each has a product of its own
    (g, m, k)     (g, k, n)     nothing: a batch
    """
    rows, inner = one.shape[-2:]
    groups = one.shape[0] if one.ndim == other.ndim == 3 else 1
    return 2 * groups * rows * inner * other.shape[-1]


def _layer(inputs: Tensor, w_ih: Tensor, w_hh: Tensor, *_: object, **rest: object) -> int:
    """One direction of one layer: each step of each sequence meets both matrices."""
    return 2 * math.prod(inputs.shape[:-1]) * (w_ih.numel() + w_hh.numel())


def _layer_backward(inputs: Tensor, w_ih: Tensor, w_hh: Tensor, *_: object, **rest: object) -> int:
    """Gradients of inputs and weights, requested or not: the kernel computes them all."""
    return 2 * _layer(inputs, w_ih, w_hh)


def _recurrent(inputs: Tensor, weights: Sequence[Tensor], *_: object, **rest: object) -> int:
    """All layers and directions; weights that are not matrices are biases."""
    return 2 * math.prod(inputs.shape[:-1]) * sum(weight.numel() for weight in weights if weight.ndim > 1)


def _recurrent_backward(inputs: Tensor, weights: Sequence[Tensor], *others: object, **rest: object) -> int:
    """The kernel always computes gradients of inputs; the operator's last argument enables gradients of weights."""
    mask = cast("Sequence[bool]", others[-1])
    return (1 + mask[3]) * _recurrent(inputs, weights)


def _trilinear(
    one: Tensor, two: Tensor, three: Tensor, new1: Sequence[int], new2: Sequence[int], new3: Sequence[int], *_: object,
    **rest: object,
) -> int:  # fmt: skip
    """The sum of a product of three over some dimensions; `new1` and so on are dimensions to insert."""
    shapes: list[list[int]] = []
    for tensor, new in ((one, new1), (two, new2), (three, new3)):
        shape = list(tensor.shape)
        for place in sorted(new):
            shape.insert(place, 1)
        shapes.append(shape)
    return 2 * math.prod(map(max, zip(*shapes, strict=True)))


def _distances(one: Tensor, other: Tensor, **rest: object) -> int:
    """A product of rows with two extra columns for the squares of their lengths."""
    return 2 * math.prod(one.shape[:-1]) * (one.shape[-1] + 2) * other.shape[-2]


def _over_time(_: Tensor, weight: Tensor, *__: object, out_val: Tensor, **rest: object) -> int:
    """A convolution over (time, batch, channels)."""
    width, channels, _channels_out = weight.shape
    return 2 * out_val.numel() * width * channels


_BY_NAME: dict[str, Formula] = {
    # The same math as the kernels that torch counts, under another backend's name.
    f"{_FLASH}_for_cpu": _ATTENTION[getattr(torch.ops.aten, _FLASH)],
    f"{_FLASH}_for_cpu_backward": _ATTENTION[getattr(torch.ops.aten, f"{_FLASH}_backward")],
    # `nn.LSTM` on the CPU, and all kinds of `nn.RNNBase` on CUDA and ROCm. The rest of those modules runs as `addmm`
    # and `mm`.
    "mkldnn_rnn_layer": _layer,
    "mkldnn_rnn_layer_backward": _layer_backward,
    "_cudnn_rnn": _recurrent,
    "_cudnn_rnn_backward": _recurrent_backward,
    "miopen_rnn": _recurrent,
    "miopen_rnn_backward": _recurrent_backward,
    # Mixtures of experts.
    "_grouped_mm": _grouped,
    "_scaled_grouped_mm": _grouped,
    "_scaled_grouped_mm_v2": _grouped,
    # Other products, and products into existing memory.
    "_int_mm": _matmul,
    "_scaled_mm_v2": _matmul,
    "mv": _matmul,
    "addmv": _product,
    "addmv_": _product,
    "addmm_": _product,
    "_addmm_activation": _product,
    "addbmm": _product,
    "addbmm_": _product,
    "baddbmm_": _product,
    "_trilinear": _trilinear,
    "_euclidean_dist": _distances,
    "conv_tbc": _over_time,
}

# Remove each once torch's registry has it. Operators that this torch does not have are left out.
OURS: dict[object, Formula] = _GROUPS_OF_HEADS | {
    getattr(torch.ops.aten, name): formula for name, formula in _BY_NAME.items() if hasattr(torch.ops.aten, name)
}


# ---------------------------------------------------------------------------------------------------------- the counter

# Their flops depend on nothing but the shapes and numbers among their arguments.
_BY_SHAPE = frozenset(
    {
        "aten.mm.default",
        "aten.addmm.default",
        "aten.bmm.default",
        "aten.baddbmm.default",
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    }
)


def never() -> bool:
    """Return False: the `is_recomputing` of a counter that does not separate recomputes."""
    return False


class FlopCounter(EagerMode):
    """Counts flops while it is entered; `total` and `recomputed` are right at any time.

    Args:
        is_recomputing: Called at each operator with flops; returns whether it belongs to a recompute.
    """

    def __init__(self, is_recomputing: Callable[[], bool] = never) -> None:
        super().__init__()
        self.total = 0
        self.recomputed = 0
        self._is_recomputing = is_recomputing
        # Operator to formula; None for operators that do not count. An operator's first call decides.
        self._formulas: dict[Operation, Formula | None] = {}
        self._found: dict[object, int] = {}  # of operators in `_BY_SHAPE`: torch's formulas take longer than this
        # Backward of two devices runs in two threads.
        self._adding = threading.Lock()

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        for kind in types:
            if is_jagged(kind):
                # Its operators are counted as those on plain tensors of which its class makes them. As they are, they
                # do not decompose, and their sizes are symbols.
                with self:
                    return kind.__torch_dispatch__(func, types, args, kwargs or {})
        return self.run(func, args, kwargs or {})

    def run(self, func: Operation, args: Args, named: Mapping[str, object]) -> object:
        """Run an operator and count its flops: for another mode, which costs less than two of them."""
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = formula_of(func)
            if formula is None:
                # Under inference mode `linear` arrives whole. Its parts are counted, as in other modes.
                with self:
                    result = _decomposed(func, args, named)
                if result is not NotImplemented:
                    return result
            self._formulas[func] = formula
        result = func(*args, **named)
        if formula is not None:
            self._add(func, self._flops_of(func, formula, args, named, result))
        return result

    def _flops_of(
        self,
        func: Operation,
        formula: Formula,
        args: Args,
        named: Mapping[str, object],
        result: object,
    ) -> int:
        if op_info_of(func).name not in _BY_SHAPE:
            return formula(*args, **named, out_val=result)
        key = id(func), *map(_shape_of, args), *map(_shape_of, named.items())
        try:
            return self._found[key]
        except KeyError:
            found = self._found[key] = formula(*args, **named, out_val=result)
            return found
        except TypeError:  # a symbolic size has no hash
            return formula(*args, **named, out_val=result)

    def _add(self, func: Operation, flops: int) -> None:
        recomputing = self._is_recomputing()
        with self._adding:
            self.total += flops
            self.recomputed += flops if recomputing else 0


def _shape_of(value: object) -> object:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape_of, cast("list[object]", value))) if isinstance(value, list | tuple) else value


def formula_of(func: Operation) -> Formula | None:
    """Return the formula from an operator's arguments and `out_val` to its flops; None for one that does not count."""
    # A higher-order operator has no overloads and is registered itself.
    packet: object = getattr(func, "_overloadpacket", func)
    return OURS.get(packet) or OF_TORCH.get(packet)


def _decomposed(func: Operation, args: Args, kwargs: Mapping[str, object]) -> object:
    """Run a composite operator as its parts; NotImplemented for all others, higher-order ones too."""
    decompose = cast("Operation | None", getattr(func, "decompose", None))
    if decompose is None or is_query(func):
        return NotImplemented
    # The backward of `silu` has both parts and a kernel. Without a counter the kernel runs, and takes different memory.
    tensor = next(iter(tensors_in((args, dict(kwargs)))), None)
    if tensor is not None and (has_kernel(func, tensor.device) or is_nested_strided(tensor)):
        return NotImplemented
    return decompose(*args, **kwargs)
