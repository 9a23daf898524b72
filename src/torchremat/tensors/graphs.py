"""The contents of a graph: its nodes, and their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, cast

from torch import Tensor

from torchremat._compat.autograd import unpacks_alone

if TYPE_CHECKING:
    from torch.autograd.graph import Node

    from torchremat._compat.autograd import RawSavedTensor, Unpack

_RAW = "_raw_saved_"


class GraphSlot:
    """One place where a node keeps a tensor, or the object that hooks have made of it.

    The slot belongs to the node: it is readable as long as the node is alive, and this object keeps the node alive.
    """

    __slots__ = ("_name", "_number", "node")

    def __init__(self, node: Node, name: str, number: int | None) -> None:
        self.node = node
        self._name = name
        self._number = number

    @property
    def raw(self) -> RawSavedTensor:
        """Torch's own saved tensor."""
        found = getattr(self.node, _RAW + self._name)
        return cast("RawSavedTensor", found if self._number is None else found[self._number])

    def tensor(self, *, own: Unpack | None = None) -> Tensor:
        """Return the tensor as the node would get it, if no hooks are set.

        Args:
            own: An unpack hook that may be called in the process.

        Raises:
            RuntimeError: The tensor was written in place since it was saved; or other hooks would be called.
        """
        if unpacks_alone(self.raw):
            try:
                return self.raw.unpack()
            except RuntimeError:
                if self._calls_other_hooks(own):  # or it is an output of the node, unpacked only for the node itself
                    raise
        elif self._calls_other_hooks(own):
            raise RuntimeError("hooks of others would be called.")
        of_function = self._name == "tensors" and hasattr(self.node, "saved_tensors")
        found = getattr(self.node, "saved_tensors" if of_function else f"_saved_{self._name}")
        return cast("Tensor", found if self._number is None else found[self._number])

    def _calls_other_hooks(self, own: Unpack | None) -> bool:
        """Return whether reading this slot would call another hook: a node unpacks all slots of one name together."""
        hooks = [slot.raw.unpack_hook for slot in slots_of(self.node) if slot._name == self._name]
        return any(hook is not None and hook is not own for hook in hooks)

    @property
    def name(self) -> str:
        """The place in the node: `self`, `indices[0]`."""
        return self._name if self._number is None else f"{self._name}[{self._number}]"

    @property
    def sequence(self) -> int:
        """The number of the node; nodes of a thread are numbered in the order in which they are made."""
        return self.node._sequence_nr()

    def __str__(self) -> str:
        return f"`{self.name}` of {self.node.name()}"


def nodes_of(roots: Iterable[Tensor]) -> list[Node]:
    """Return every node that a backward from some tensors can reach, each once."""
    pending = [root.grad_fn for root in roots if root.grad_fn is not None]
    found = dict.fromkeys(pending)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in found:
                found[node] = None
                pending.append(node)
    return list(found)


def slots_of(node: Node) -> Iterator[GraphSlot]:
    """Yield the slots of a node that hold a tensor or a packed object; none if the node has freed them."""
    for name in _names(type(node)):
        try:
            found = cast("RawSavedTensor | tuple[RawSavedTensor, ...]", getattr(node, _RAW + name))
        except RuntimeError:
            continue  # lists of tensors that were freed
        if isinstance(found, tuple):
            yield from (GraphSlot(node, name, number) for number, raw in enumerate(found) if _holds(raw))
        elif _holds(found):
            yield GraphSlot(node, name, None)


def _holds(raw: RawSavedTensor) -> bool:
    return raw.unpack_hook is not None or raw.data is not None


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name.removeprefix(_RAW) for name in dir(kind) if name.startswith(_RAW))


def leaves_of(nodes: Iterable[Node]) -> Iterator[Tensor]:
    """Yield the tensors for which the nodes accumulate gradients."""
    for node in nodes:
        variable = cast("Callable[[], Tensor] | Tensor | None", getattr(node, "variable", None))
        if isinstance(variable, Tensor):
            yield variable
