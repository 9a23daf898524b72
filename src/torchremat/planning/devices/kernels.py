"""Seconds and bytes of kernels: the signatures that identify them, a roofline, and the table of measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import cast

import torch
from torch import Tensor

from torchremat._compat.modes import Args, Operation
from torchremat.measuring.flops import formula_of
from torchremat.measuring.simulation import KernelCost
from torchremat.measuring.storages import tensors_in
from torchremat.planning.devices.device import Device

# Operators whose kernels are known to need a large workspace on some device; others need almost none.
_WITH_WORKSPACE = ("convolution", "scaled_dot_product", "rnn", "lstm", "gru", "_linalg", "_fft")


def signature(func: Operation, args: Args, kwargs: Mapping[str, object]) -> str:
    """Return the key shared by calls of equal cost: the operator's name, shapes, dtypes, layouts, options.

    Floats are left out: the cost of a kernel does not depend on them. Keyword arguments that are None are left out too,
    since torch omits them itself where a mode that sees the call passes it on.
    """
    told = {key: value for key, value in kwargs.items() if value is not None and key not in _UNTOLD}
    named = [f"{key}={_described(value)}" for key, value in told.items()]
    return f"{func}({', '.join([*map(_described, args), *named])})"


_UNTOLD = ("device", "pin_memory", "generator")


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        if value.dtype is torch.uint8 and value.ndim == 1:
            return "uint8[]"  # a buffer sized by a kernel, which is empty in a fake
        layout = "" if value.is_contiguous() else "~" if value.layout is torch.strided else "?"
        return f"{_short(value.dtype)}{layout}[{','.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_described, cast('list[object]', value)))}]"
    if isinstance(value, float):
        return "."
    return str(value)


@cache
def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def intensity(
    func: Operation, args: Args, kwargs: Mapping[str, object], result: object, made: list[Tensor]
) -> tuple[int, int, torch.dtype]:
    """Return the flops of an operator, the bytes that it reads and writes, and the dtype that it computes in."""
    formula = formula_of(func)
    flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
    touched = {id(one): one for one in tensors_in([*args, *kwargs.values(), made])}
    dtype = next((one.dtype for one in touched.values() if one.dtype.is_floating_point), torch.float32)
    return flops, sum(one.numel() * one.element_size() for one in touched.values()), dtype


class Kernels:
    """Seconds and bytes of the kernels of a described device; see `KernelModel`.

    Attributes:
        unknown: Operators whose workspace was never measured, with the number of their runs.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.block_bytes = device.block_bytes
        self.has_host_generator = device.type == "cpu"
        self.unknown: dict[str, int] = {}
        # A kernel that needed workspace needs some with other shapes too.
        self._taking = {
            name.partition("(")[0] for name, kernel in device.kernels.items() if kernel.workspace_bytes > _NOTABLE_BYTES
        }

    def storage_bytes(self, func: Operation, args: Args, kwargs: Mapping[str, object]) -> tuple[int, ...]:
        """Return the bytes of the storages that an operator makes, as measured."""
        known = self.device.kernels.get(signature(func, args, kwargs)) if self.device.kernels else None
        return () if known is None else known.storage_bytes

    def kernel(
        self, func: Operation, args: Args, kwargs: Mapping[str, object], result: object, made: list[Tensor]
    ) -> KernelCost:
        """Return the seconds and bytes of an operator: measured, or else by a roofline. A view costs nothing."""
        if not made and not is_mutable(func):
            return _NOTHING
        if self.device.kernels:
            known = self.device.kernels.get(signature(func, args, kwargs))
            if known is not None:
                return KernelCost(known.seconds, known.workspace_bytes)
        return KernelCost(self._seconds(*intensity(func, args, kwargs, result, made)), self._workspace(func, args))

    def _seconds(self, flops: int, touched_bytes: int, dtype: torch.dtype) -> float:
        rates = self.device.flops
        rate = rates.get(_short(dtype), min(rates.values()))
        bound = max(flops / rate, touched_bytes / self.device.bandwidth)
        return bound / self.device.efficiency + self.device.latency_s

    def _workspace(self, func: Operation, args: Args) -> int:
        name = str(func)
        if self.device.type == "cuda" and "flash_attention" in name:
            return _attention_workspace(args) if "backward" in name else 0
        if "attention" in name and "backward" not in name and self.device.type == "cuda":
            return 0
        if name in self._taking if self.device.kernels else any(one in name for one in _WITH_WORKSPACE):
            self.unknown[name] = self.unknown.get(name, 0) + 1
        return 0


_NOTHING = KernelCost(0.0)
_NOTABLE_BYTES = 4096


def notice(device: Device, unknown: Mapping[str, int]) -> str:
    """Return the message about operators whose workspace a plan does not count."""
    operators = ", ".join(f"{name} ({count} times)" for name, count in sorted(unknown.items()))
    described = "with these shapes" if device.kernels else "at all"
    return (
        f"{device.name}: the workspaces of kernels are not described {described} for {operators}, and not counted, "
        "so the real peak may be higher. Describe the device with `Planner.save_device` where such a step runs, or "
        "leave a margin."
    )


@cache
def is_mutable(func: Operation) -> bool:
    """Return whether an operator writes to one of its arguments."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


def _attention_workspace(args: Args) -> int:
    """Return the workspace of FlashAttention's backward: dQ and its row sums in float32, dK and dV of shared heads.

    Source: `mha_bwd` in flash_api.cpp of FlashAttention 2, as in torch: lengths are rounded up to 128, widths to 32.
    """
    _, query, key = (cast("Tensor", one) for one in args[:3])
    batch, heads, length, width = query.shape
    rounded = -(-length // 128) * 128
    gradient = batch * heads * rounded * (-(-width // 32) * 32) * 4
    sums = batch * heads * rounded * 4
    shared = 2 * batch * heads * key.shape[2] * width * key.element_size() if key.shape[1] != heads else 0
    return gradient + sums + shared
