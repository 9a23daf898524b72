"""What a node of autograd's graph holds: its saved tensors as they are, or what a hook has made of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from torchremat._compat.binding import private

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.graph import Node

_PREFIX = "_raw_saved_"
_REPORT = "naming the nodes that save tensors"


class _SavedTensor(Protocol):
    @property
    def data(self) -> object: ...
    @property
    def unpack_hook(self) -> object: ...


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """One place in a node for a saved tensor.

    Attributes:
        node: The name of the node: `MulBackward0`, or the class of a custom Function.
        name: The name of the place: `self`, `indices[0]`, or the number of what a custom Function saved.
        sequence: The number of the node; nodes are numbered in the order in which they are made.
        packed: What a hook has made of the tensor; without a hook the tensor itself.
        is_hooked: Whether there is a hook.
    """

    node: str
    name: str
    sequence: int
    packed: object
    is_hooked: bool


def slots_below(root: Tensor) -> Iterator[NodeSlot]:
    """Yield every place that holds a saved tensor in the graph of `root`; no hook is called.

    Raises:
        VersionError: This torch does not say what a place holds.
    """
    # Looked up when it is asked for: all else works on a torch without it.
    private("_C._autograd.SavedTensor.data", needed_for=_REPORT)
    private("_C._autograd.SavedTensor.unpack_hook", needed_for=_REPORT)
    names: dict[type, list[str]] = {}
    waiting = [root.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = type(node)
        if kind not in names:
            names[kind] = [name for name in dir(node) if name.startswith(_PREFIX)]
        for name in names[kind]:
            yield from _places(node, name)
        waiting += [one for one, _ in node.next_functions]


def _places(node: Node, name: str) -> Iterator[NodeSlot]:
    try:
        found = getattr(node, name)
    except RuntimeError:  # a custom Function whose tensors have been freed
        return
    short, many = name.removeprefix(_PREFIX), isinstance(found, tuple | list)
    held = cast("tuple[_SavedTensor | None, ...]", found) if many else (cast("_SavedTensor", found),)
    sequence = node._sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]: not in the stubs
    for number, one in enumerate(held):
        packed = None if one is None else one.data
        if one is None or packed is None:  # optional and not there, or freed
            continue
        place = short
        if many:
            place = str(number) if short == "tensors" else f"{short}[{number}]"
        yield NodeSlot(node.name(), place, sequence, packed, one.unpack_hook is not None)
