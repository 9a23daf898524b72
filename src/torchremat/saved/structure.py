"""Arguments taken apart into tensors and a template, and put together again.

Tensors in keyword arguments and nested containers are inputs of a region like any other, so a region has to find all of
them. `torch.utils._pytree` does this and costs tens of microseconds per call; the built-in containers are handled here, and
types that are registered with it (the outputs of `transformers`) are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, slice}
)


@dataclass(frozen=True, slots=True)
class Leaf:
    """The place of tensor number `index` in a template."""

    index: int


@dataclass(frozen=True, slots=True)
class _Registered:
    """A container of a type that is registered with torch's pytree."""

    kind: type
    context: object
    children: list[object]


def split(value: object, tensors: list[Tensor], objects: list[object]) -> object:
    """Return `value` with a `Leaf` in the place of each tensor.

    Args:
        value: Any nesting of tuples, lists, dicts, registered containers, tensors and other objects.
        tensors: Gets the tensors, in order.
        objects: Gets what is neither a container, a tensor nor a plain value: things that could have state.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Leaf(len(tensors) - 1)
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is tuple:
        return tuple([split(item, tensors, objects) for item in cast("tuple[object, ...]", value)])
    if kind is list:
        return [split(item, tensors, objects) for item in cast("list[object]", value)]
    if kind is dict:
        return {key: split(item, tensors, objects) for key, item in cast("dict[object, object]", value).items()}
    registered = _pytree.SUPPORTED_NODES.get(kind)
    if registered is None and isinstance(value, tuple) and hasattr(value, "_fields"):
        registered = _pytree.SUPPORTED_NODES.get(_pytree.namedtuple)  # pyright: ignore[reportArgumentType]
    if registered is not None:
        children, context = registered.flatten_fn(value)
        return _Registered(kind, context, [split(child, tensors, objects) for child in children])
    objects.append(value)
    return value


def join(template: object, tensors: Sequence[Tensor]) -> object:
    """Return the value that `split` made `template` from, with `tensors` in their places."""
    kind = type(template)
    if kind is Leaf:
        return tensors[cast("Leaf", template).index]
    if kind is tuple:
        return tuple([join(item, tensors) for item in cast("tuple[object, ...]", template)])
    if kind is list:
        return [join(item, tensors) for item in cast("list[object]", template)]
    if kind is dict:
        return {key: join(item, tensors) for key, item in cast("dict[object, object]", template).items()}
    if kind is _Registered:
        node = cast("_Registered", template)
        registered = _pytree.SUPPORTED_NODES.get(node.kind) or _pytree.SUPPORTED_NODES[_pytree.namedtuple]  # pyright: ignore[reportArgumentType]
        return registered.unflatten_fn([join(child, tensors) for child in node.children], node.context)
    return template


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in `value`, in order."""
    tensors: list[Tensor] = []
    split(value, tensors, [])
    return tensors


def place_of(template: object, index: int, prefix: str = "") -> str | None:
    """Return where tensor number `index` sits in a template, as `"[0]['mask']"`, or None."""
    kind = type(template)
    if kind is Leaf:
        return prefix if cast("Leaf", template).index == index else None
    if kind is _Registered:
        return place_of(cast("_Registered", template).children, index, prefix)
    if kind is dict:
        items = list(cast("dict[object, object]", template).items())
    elif kind is tuple or kind is list:
        items = list(enumerate(cast("list[object]", template)))
    else:
        return None
    for key, item in items:
        found = place_of(item, index, f"{prefix}[{key!r}]")
        if found is not None:
            return found
    return None
