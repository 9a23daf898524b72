"""`FlopCounter`: the flops of matrix products, convolutions, attention and recurrent layers, as they run.

The formulas come from torch's own registry, so totals equal `torch.utils.flop_counter.FlopCounterMode`'s; `formulas`
adds the ones that the registry lacks. The counter keeps a running `total` that a hook can read at any time, separates
recomputed flops, and costs a dictionary lookup per operator.

Missing on purpose: elementwise operators, and the inside of higher-order operators without their own formula (`cond`).
Compiled code runs eagerly under the counter, so its flops describe the eager code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import cast

from torch import Tensor

from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types
from torchremat._compat.operators import has_kernel, is_query
from torchremat._compat.tensors import is_jagged, is_nested_strided
from torchremat.measuring.formulas import OF_TORCH, OURS, Formula
from torchremat.regions.selective.op_info import op_info_of
from torchremat.tensors.structure import tensors_in

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
