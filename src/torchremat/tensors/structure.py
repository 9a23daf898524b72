"""Arguments split into tensors and a template, and joined again.

Tensors in keyword arguments and nested containers are inputs of a region like any other, so a region has to find all of
them. Torch's pytree does this but costs tens of microseconds per call; this module handles the built-in containers
itself, and leaves types registered with pytree (the outputs of `transformers`) to pytree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from torchremat._compat.tensors import registered_containers

_ATOMS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type, slice}
)


class Leaf:
    """The place of tensor number `index` in a template."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


# Every call of every region needs leaves, so they are made once.
_LEAVES = [Leaf(index) for index in range(64)]


class _Node:
    """A container other than a tuple, list or dict: of a type registered with torch, a named tuple or a dataclass."""

    __slots__ = ("children", "context", "kind")

    def __init__(self, kind: type, children: object, context: object = None) -> None:
        self.kind = kind
        self.children = children
        self.context = context


def split(value: object, tensors: list[Tensor], objects: list[object]) -> object:
    """Return `value` with a `Leaf` in place of each tensor.

    Args:
        value: Any nesting of tuples, lists, dicts, registered containers, dataclasses, tensors and other objects.
        tensors: Gets the tensors, in order.
        objects: Gets everything that is neither a container, a tensor nor a plain value: objects that could have state.
    """
    # `type(...) is` instead of `isinstance` and `cast`: this runs for every argument of every region.
    if type(value) is Tensor:
        return _leaf(value, tensors)
    kind = type(value)
    if kind in _ATOMS:
        return value
    if type(value) is tuple:
        return tuple(
            [_leaf(item, tensors) if type(item) is Tensor else split(item, tensors, objects) for item in value]
        )
    if type(value) is list:
        return [split(item, tensors, objects) for item in value]
    if type(value) is dict:
        return {key: split(item, tensors, objects) for key, item in value.items()} if value else {}
    if isinstance(value, Tensor):
        return _leaf(value, tensors)
    registered = registered_containers.get(kind)
    if registered is not None:
        children, context = registered.flatten_fn(value)
        return _Node(kind, [split(child, tensors, objects) for child in children], context)
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        return _Node(kind, [split(item, tensors, objects) for item in cast("tuple[object, ...]", value)])
    if hasattr(kind, "__dataclass_fields__"):
        found = len(tensors)
        inside: list[object] = []
        children = {name: split(item, tensors, inside) for name, item in _attributes(value).items()}
        if len(tensors) > found:
            objects += inside
            return _Node(kind, children)
    # A dataclass without tensors is an object: a write to it must reach that very object.
    objects.append(value)
    return value


class _Whole:
    """An argument that is not split, since it contains itself: an object among the arguments."""

    __slots__ = ("children",)

    def __init__(self, value: object) -> None:
        self.children = [value]


def split_call(
    args: tuple[object, ...], kwargs: dict[str, object], tensors: list[Tensor], objects: list[object]
) -> object:
    """Return the template of the arguments of a call, `split((args, kwargs), ...)`."""
    if len(args) == 1 and not kwargs and type(args[0]) is Tensor:
        tensors.append(args[0])
        return _ONE_TENSOR  # by far the most frequent call
    try:
        return split((args, kwargs), tensors, objects)
    except RecursionError:
        tensors.clear()
        objects.clear()
        return (
            tuple([_split_or_whole(one, tensors, objects) for one in args]),
            {name: _split_or_whole(one, tensors, objects) for name, one in kwargs.items()},
        )


def _split_or_whole(value: object, tensors: list[Tensor], objects: list[object]) -> object:
    inside: list[Tensor] = []
    others: list[object] = []
    try:
        split(value, inside, others)
    except RecursionError:
        objects.append(value)
        return _Whole(value)
    return split(value, tensors, objects)


_ONE_TENSOR: tuple[tuple[Leaf], dict[str, object]] = ((_LEAVES[0],), {})


def _leaf(tensor: Tensor, tensors: list[Tensor]) -> Leaf:
    index = len(tensors)
    tensors.append(tensor)
    return _LEAVES[index] if index < 64 else Leaf(index)


def _attributes(value: object) -> dict[str, object]:
    names = [one.name for one in dataclasses.fields(value)]  # pyright: ignore[reportArgumentType]
    own = {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {**own, **getattr(value, "__dict__", {})}


def join(template: object, tensors: Sequence[Tensor]) -> object:
    """Return the value that `split` made `template` from, with `tensors` in their places."""
    if template is _ONE_TENSOR:
        return (tensors[0],), {}
    if type(template) is Leaf:
        return tensors[template.index]
    if type(template) is tuple:
        return tuple([tensors[item.index] if type(item) is Leaf else join(item, tensors) for item in template])
    if type(template) is list:
        return [join(item, tensors) for item in template]
    if type(template) is dict:
        return {key: join(item, tensors) for key, item in template.items()} if template else {}
    if type(template) is _Node:
        return _join_node(template, tensors)
    return template.children[0] if type(template) is _Whole else template


def _join_node(node: _Node, tensors: Sequence[Tensor]) -> object:
    children = join(node.children, tensors)
    registered = registered_containers.get(node.kind)
    if registered is not None:
        return registered.unflatten_fn(cast("list[object]", children), node.context)
    if issubclass(node.kind, tuple):
        return tuple.__new__(node.kind, cast("list[object]", children))
    value = object.__new__(node.kind)
    for name, child in cast("dict[str, object]", children).items():
        object.__setattr__(value, name, child)  # as `__init__` does where the dataclass is frozen
    return value


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in `value`, in order."""
    tensors: list[Tensor] = []
    split(value, tensors, [])
    return tensors


def place_of(template: object, index: int) -> str | None:
    """Return where tensor number `index` sits in a template, as `"[0]['mask']"`, or None."""
    places = (place for place, leaf in leaves_of(template) if type(leaf) is Leaf and leaf.index == index)
    return next(places, None)


def leaves_of(template: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the non-containers of a template, a `Leaf` for each tensor, with the place: `"[0]['mask']"`."""
    kind = type(template)
    if kind is _Node:
        node = cast("_Node", template)
        fields = cast("tuple[str, ...] | None", getattr(node.kind, "_fields", None))
        if isinstance(node.children, dict):
            items = [(f".{name}", item) for name, item in cast("dict[str, object]", node.children).items()]
        else:
            children = cast("list[object]", node.children)
            keys = node.context if isinstance(node.context, list) else range(len(children))
            items = list(
                zip([f".{name}" for name in fields or ()] or [f"[{key!r}]" for key in keys], children, strict=False)
            )
    elif kind is dict:
        items = [(f"[{key!r}]", item) for key, item in cast("dict[object, object]", template).items()]
    elif kind is tuple or kind is list:
        items = [(f"[{number}]", item) for number, item in enumerate(cast("list[object]", template))]
    else:
        yield prefix, template
        return
    for name, item in items:
        yield from leaves_of(item, prefix + name)


def same_structure(one: object, other: object) -> bool:
    """Return whether two templates have their tensors in the same places, and all other values equal."""
    if type(one) is not type(other):
        return False
    if type(one) is Leaf:
        return one.index == cast("Leaf", other).index
    if type(one) is _Node:
        node = cast("_Node", other)
        return one.kind is node.kind and same_structure(one.children, node.children) and one.context == node.context
    if type(one) is tuple or type(one) is list:
        items = cast("Sequence[object]", other)
        return len(one) == len(items) and all(map(same_structure, cast("Sequence[object]", one), items))
    if type(one) is dict:
        items = cast("dict[object, object]", other)
        found = cast("dict[object, object]", one)
        return found.keys() == items.keys() and all(same_structure(found[key], items[key]) for key in found)
    return one is other or bool(one == other)
