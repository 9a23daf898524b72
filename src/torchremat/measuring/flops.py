"""`FlopCounter`: the flops of matrix products, convolutions and attention, as they run.

The formulas are those of torch's own registry, so totals equal `torch.utils.flop_counter.FlopCounterMode`'s. Ours keeps
a running `total` that a hook can read at any moment, knows recomputed flops, and is a dictionary lookup per operator.
It also counts what `scaled_dot_product_attention` runs on the CPU, which torch's registry lacks.

Missing on purpose: elementwise operators, and the inside of higher-order operators that have no formula of their own
(`cond`). Compiled code runs eagerly under the counter, so its flops are those of the eager code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch.utils.flop_counter import flop_registry

from torchremat._compat.modes import EagerMode
from torchremat._compat.operators import has_kernel
from torchremat.tensors.structure import tensors_in

_Operator = Callable[..., object]
_Formula = Callable[..., int]

_FORMULAS = cast("dict[object, _Formula]", flop_registry)
_FLASH = "_scaled_dot_product_flash_attention"


def _of_aten(name: str) -> object:
    return getattr(torch.ops.aten, name)


# The same mathematics as the kernels that torch counts, under the name of another backend. To be removed once torch's
# registry has them.
_OURS: dict[object, _Formula] = {
    _of_aten(f"{_FLASH}_for_cpu"): _FORMULAS[_of_aten(_FLASH)],
    _of_aten(f"{_FLASH}_for_cpu_backward"): _FORMULAS[_of_aten(f"{_FLASH}_backward")],
}


def never() -> bool:
    """Return False: the `is_recomputing` of a counter that need not know."""
    return False


class FlopCounter(EagerMode):
    """Counts flops while it is entered; `total` and `recomputed` are right at every moment.

    Args:
        is_recomputing: Asked at each operator with flops whether it belongs to a recompute.
    """

    def __init__(self, is_recomputing: Callable[[], bool] = never) -> None:
        super().__init__()
        self.total = 0
        self.recomputed = 0
        self._is_recomputing = is_recomputing
        self._by_operator: dict[str, int] = {}
        # Operator to formula; None where nothing is counted. An operator's first call decides.
        self._formulas: dict[_Operator, _Formula | None] = {}
        # Backward of two devices runs in two threads.
        self._adding = threading.Lock()

    @property
    def by_operator(self) -> Mapping[str, int]:
        """The flops of each operator that has any, by name (`"aten.mm"`)."""
        return dict(self._by_operator)

    def __torch_dispatch__(
        self,
        func: _Operator,
        types: tuple[type, ...],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        try:
            formula = self._formulas[func]
        except KeyError:
            formula = formula_of(func)
            if formula is None:
                # Under inference mode `linear` arrives whole. Its parts are counted, as they are elsewhere.
                with self:
                    result = _decomposed(func, args, named)
                if result is not NotImplemented:
                    return result
            self._formulas[func] = formula
        result = func(*args, **named)
        if formula is not None:
            self._add(func, formula(*args, **named, out_val=result))
        return result

    def _add(self, func: _Operator, flops: int) -> None:
        recomputing = self._is_recomputing()
        name = str(getattr(func, "_overloadpacket", func))
        with self._adding:
            self.total += flops
            self.recomputed += flops if recomputing else 0
            self._by_operator[name] = self._by_operator.get(name, 0) + flops


def formula_of(func: _Operator) -> _Formula | None:
    """Return what tells the flops of an operator from its arguments and `out_val`; None if it counts for nothing."""
    # A higher-order operator has no overloads and is registered itself.
    packet: object = getattr(func, "_overloadpacket", func)
    return _OURS.get(packet) or _FORMULAS.get(packet)


def _decomposed(func: _Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Run a composite operator as its parts; NotImplemented for all others, higher-order ones too."""
    decompose = cast("_Operator | None", getattr(func, "decompose", None))
    if decompose is None or func is torch.ops.prim.device.default:
        return NotImplemented
    # The backward of `silu` has parts and a kernel. Without a counter the kernel runs, which takes other memory.
    tensor = next(iter(tensors_in((args, dict(kwargs)))), None)
    if tensor is not None and has_kernel(func, tensor.device):
        return NotImplemented
    return decompose(*args, **kwargs)
