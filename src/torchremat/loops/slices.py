"""What a loop scans: a slice for each step."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.loops.carries import HeldInput, current_key
from torchremat.regions.slots import Key
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.structure import Leaf, join, leaves_of, split


class Slices:
    """The slices of each tensor in a nesting along its first dimension, in the forward of a loop.

    Args:
        xs: The nesting; None for a loop that scans nothing.

    Attributes:
        tensors: The tensors of the nesting.
        length: How many slices there are, None for a loop that scans nothing.

    Raises:
        UnsupportedError: Something in it is not a tensor, or has another length than the first tensor.
    """

    def __init__(self, xs: object) -> None:
        self.tensors: list[Tensor] = []
        self._template = split(xs, self.tensors, [])
        self.length: int | None = None
        for place, leaf in leaves_of(self._template, "xs"):
            if not isinstance(leaf, Leaf):
                if leaf is None:
                    continue
                raise UnsupportedError(f"loop: {place} is {leaf!r}; tensors, or None, are scanned.")
            tensor = self.tensors[leaf.index]
            found = len(tensor) if tensor.dim() else None
            if found is None or (self.length is not None and found != self.length):
                raise UnsupportedError(
                    f"loop: {place} has the shape {tuple(tensor.shape)}; all tensors of xs need the same first "
                    f"dimension{'' if self.length is None else f', {self.length} here'}, one slice for each step."
                )
            self.length = found
        self._slices = [tensor.unbind() for tensor in self.tensors]

    def at(self, index: int) -> object:
        """Return the slices for a step."""
        return self.joined(self.tensors_at(index))

    def tensors_at(self, index: int) -> list[Tensor]:
        """Return the tensors in the slices for a step."""
        return [each[index] for each in self._slices]

    def joined(self, tensors: list[Tensor]) -> object:
        """Return the slices for a step, given the tensors in them."""
        return join(self._template, tensors)


class HeldSlices:
    """The scanned tensors, held for the recomputes of all steps."""

    __slots__ = ("_cached", "_held", "_lock")

    def __init__(self, tensors: list[Tensor], hold: Callable[[Tensor], HeldTensor]) -> None:
        self._held = [hold(one) for one in tensors]
        self._cached: tuple[Key | None, dict[int, Tensor]] = None, {}
        self._lock = threading.Lock()

    def slice_of(self, place: int, index: int) -> Tensor:
        """Return the slice of the tensor number `place` for a step.

        Raises:
            ChangedError: The tensor was written in place since the forward.
        """
        held = self._held[place]
        if not held.is_hooked:
            return held.unpack().detach()[index]
        # A region around the loop gives each of its saved tensors once in a backward.
        with self._lock:
            key = current_key()
            if self._cached[0] != key or key is None:
                self._cached = key, {}
            if place not in self._cached[1]:
                self._cached[1][place] = held.unpack()
            return self._cached[1][place].detach()[index]


class SlicedInput(HeldInput):
    """What the region of a step holds in place of its slice of a tensor."""

    __slots__ = ("index", "place", "slices")

    def __init__(self, tensor: Tensor, slices: HeldSlices, place: int, index: int) -> None:
        super().__init__(tensor)
        self.slices = slices
        self.place = place
        self.index = index

    def bring(self) -> Tensor:
        """Return the slice."""
        return self.slices.slice_of(self.place, self.index)
