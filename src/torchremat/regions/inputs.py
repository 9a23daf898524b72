"""Where the arguments of a region's calls come from, so that a recompute can pass them again."""

from __future__ import annotations

from weakref import ReferenceType, ref

from torch import Tensor

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
        last_use: The last call that takes what comes from a source.
    """

    __slots__ = ("_kind", "_known", "held", "last_use")

    def __init__(self, kind: type[HeldTensor] = HeldTensor) -> None:
        self._kind = kind
        self.held: list[HeldTensor] = []
        self.last_use: dict[Source, int] = {}
        # Tensors that have been seen, by id, with the version they had.
        self._known: dict[int, tuple[ReferenceType[Tensor], int, Source]] = {}

    def take(self, tensors: list[Tensor], number: int, *, last: bool) -> list[Source]:
        """Return the sources of the arguments of call `number`, and hold what no earlier one was given or made.

        Args:
            tensors: The tensors among its arguments.
            number: The call, counted from 0.
            last: Whether no further call follows, so that nothing need be remembered.
        """
        found: list[Source] = []
        for tensor in tensors:
            known = self._known.get(id(tensor))
            # By identity *and* version: after `h.add_(1)` between two calls `h` is the same object and another value.
            if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
                source = known[2]
            else:
                source = len(self.held)
                held = self._kind(tensor)
                self.held.append(held)  # See Rule 2
                self._known[id(tensor)] = (ref(tensor), held.version, source)
            self.last_use[source] = number
            found.append(source)
        if last:
            self._known.clear()
        return found

    def made(self, output: object, number: int) -> None:
        """Remember what call `number` has returned, which later calls may be given."""
        for place, tensor in enumerate(tensors_in(output)):
            version = version_of(tensor)
            if version >= 0:
                self._known[id(tensor)] = (ref(tensor), version, (number, place))
