"""Where the arguments of a region's calls come from, so that a recompute can pass them again."""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.regions.rules import external_inputs
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import tensors_in

# Where an argument of a call comes from: an input that the region holds, by number, or the output of an earlier call.
Source = int | tuple[int, int]


class Inputs:
    """What the calls of a region are given: tensors from outside, which it holds, and outputs of earlier calls.

    Args:
        kind: How a tensor is held.

    Attributes:
        held: The tensors from outside.
    """

    __slots__ = ("_kind", "_known", "held")

    def __init__(self, kind: type[HeldTensor] = HeldTensor) -> None:
        self._kind = kind
        self.held: list[HeldTensor] = []
        # Tensors that have been seen, by id, with the version that they had.
        self._known: dict[int, tuple[ReferenceType[Tensor], int, Source]] = {}

    def take(self, tensors: list[Tensor], *, last: bool) -> list[Source]:
        """Return the sources of the arguments of the next call, and hold what no earlier one was given or made.

        Args:
            tensors: The tensors among its arguments.
            last: Whether no further call follows, so that nothing need be remembered.
        """
        known = self._known
        given = {id(tensor): tensor for tensor in tensors}
        for key in given.keys() & known.keys() if known else ():
            seen, version, _ = known[key]
            # After `h.add_(1)` between two calls `h` is the same object and another value.
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
        """Remember what call `number` has returned, which later calls may be given."""
        for place, tensor in enumerate(tensors_in(output)):
            version = version_of(tensor)
            if version >= 0:
                self._known[id(tensor)] = (ref(tensor), version, (number, place))
