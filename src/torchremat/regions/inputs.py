"""Where the arguments of a region's calls come from, so that a recompute can pass them again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.regions.rules import external_inputs
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import tensors_in

# The source of a call's argument: an input that the region holds, by number, or the output of an earlier call.
Source = int | tuple[int, int]


class Inputs:
    """The inputs of a region's calls: tensors from outside, which it holds, and outputs of earlier calls.

    Args:
        kind: Holds a tensor.

    Attributes:
        held: The tensors from outside.
    """

    __slots__ = ("_kind", "_known", "held")

    def __init__(self, kind: Callable[[Tensor], HeldTensor] = HeldTensor) -> None:
        self._kind = kind
        self.held: list[HeldTensor] = []
        # Tensors seen so far, by id, each with its version.
        self._known: dict[int, tuple[ReferenceType[Tensor], int, Source]] = {}

    def take(self, tensors: list[Tensor], *, last: bool) -> list[Source]:
        """Return the sources of the next call's arguments, and hold tensors that no earlier call was given or returned.

        Args:
            tensors: The tensors among its arguments.
            last: Whether no further call follows, so that nothing needs to be remembered.
        """
        known = self._known
        given = {id(tensor): tensor for tensor in tensors}
        for key in given.keys() & known.keys() if known else ():
            seen, version, _ = known[key]
            # After `h.add_(1)` between two calls `h` is the same object with another value.
            if seen() is not given[key] or version != version_of(given[key]):
                del known[key]
        for key in external_inputs(given, known):
            held = self._kind(given[key])
            known[key] = (ref(given[key]), held.version, len(self.held))
            self.held.append(held)
        sources = [known[id(tensor)][2] for tensor in tensors]
        if last:
            known.clear()
        return sources

    def made(self, output: object, number: int) -> None:
        """Remember the output of call `number`, which later calls may be given."""
        for place, tensor in enumerate(tensors_in(output)):
            version = version_of(tensor)
            if version >= 0:
                self._known[id(tensor)] = (ref(tensor), version, (number, place))
