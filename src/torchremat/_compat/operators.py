"""Operators by name, and flops of attention whose keys and values have fewer heads than its queries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import ge, gt, le, lt
from typing import Any, NamedTuple, cast

import torch

from torchremat._compat.binding import RELEASE, private

_bind = partial(private, needed_for="policies per operator")
_Overload: type = _bind("_ops.OpOverload")
_Packet: type = _bind("_ops.OpOverloadPacket")
_Operator: type = _bind("_ops.OperatorBase")
_all_names: Callable[[], list[str]] = _bind("_C._dispatch_get_all_op_names")
_key_of_device: Callable[[str], str] = _bind("_C._dispatch_key_for_device")
_is_registered: Callable[[str], bool] = _bind("_C._dispatch_has_kernel")
_has_kernel: Callable[[str, str], bool] = _bind("_C._dispatch_has_kernel_for_dispatch_key")

# Reads the value of a tensor: what it gives is a number in Python.
READ_AS_NUMBER: Callable[..., object] = _bind("ops.aten._local_scalar_dense.default")

# Up to torch 2.13 clamp passes the gradient at the very bound, from 2.14 on it does not.
above_bound, below_bound = (ge, le) if RELEASE < (2, 14) else (gt, lt)
"""Where clamp passes a gradient: above its least value, below its largest."""


class OperatorName(NamedTuple):
    """The name of an operator: `aten`, `mm`, `default`."""

    namespace: str
    packet: str
    overload: str


def name_of(operator: object) -> OperatorName:
    """Return the name of an operator; higher-order ones are in the namespace `higher_order`."""
    if isinstance(operator, _Overload):
        packet, _, overload = str(operator).rpartition(".")
        namespace, _, packet = packet.partition(".")
        return OperatorName(namespace, packet, overload)
    return OperatorName("higher_order", str(operator), "default")


def entry_of(operator: Callable[..., object]) -> Callable[..., object]:
    """Return the function that an operator calls: equivalent, with one Python frame less."""
    return cast("Any", operator)._op if type(operator) is _Overload else operator


def is_operator(thing: object) -> bool:
    """Return whether something is an overload or a higher-order operator, as opposed to all overloads of one name."""
    return isinstance(thing, _Operator) and not isinstance(thing, _Packet)


def is_packet(thing: object) -> bool:
    """Return whether something stands for all overloads of one name."""
    return isinstance(thing, _Packet)


def pattern_of(operator: object) -> str | None:
    """Return the name of an operator, a packet or a namespace, like `"aten.mm"`; None for anything else."""
    if isinstance(operator, type(torch.ops.aten)):
        return f"{str(operator.__name__).rpartition('.')[2]}.*"
    if isinstance(operator, _Packet):
        return str(operator)
    return ".".join(name_of(operator)) if isinstance(operator, _Operator) else None


def is_query(operator: object) -> bool:
    """Return whether an operator only asks for a size or a device: a mode sees it, and torch has no kernel of it."""
    return isinstance(operator, _Overload) and not _is_registered(cast("Any", operator).name())


def has_kernel(operator: object, device: torch.device) -> bool:
    """Return whether an operator has its own kernel for a kind of device, even if it also decomposes."""
    return isinstance(operator, _Overload) and _has_kernel(cast("Any", operator).name(), _key_of_device(device.type))


def overloads_of(namespace: str, packet: str) -> list[str]:
    """Return the overloads of an operator; none if it does not exist."""
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return cast("Any", found).overloads() if isinstance(found, _Packet) else []


def packets_of(namespace: str) -> list[str]:
    """Return the operators of a namespace."""
    found = (name.partition("::") for name in _all_names())
    return sorted({name.partition(".")[0] for space, _, name in found if space == namespace})


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
