"""Where the values of a region's calls come from, arguments and others, so that a recompute can pass them again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ReferenceType, ref

from torch import Tensor

from torchremat.errors import MutationError
from torchremat.regions.rules import external_inputs
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import join, split, tensors_in
from torchremat.tensors.versioned import Versioned


class Frozen:
    """A tensor, or a structure of tensors, that reaches a call other than by its arguments and is kept.

    The tensors are aliases, see NOTE [ Why an alias ].
    """

    __slots__ = ("_kept", "_template")

    def __init__(self, value: object) -> None:
        tensors: list[Tensor] = []
        self._template = split(value, tensors, [])
        self._kept = [(Versioned(tensor.detach()), tensor.requires_grad) for tensor in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The kept tensors."""
        return [kept.tensor for kept, _ in self._kept]

    def thaw(self, words: str) -> object:
        """Return the value for a recompute.

        Args:
            words: Where the forward got it, for messages.

        Raises:
            MutationError: A tensor was written in place.
        """
        found: list[Tensor] = []
        for kept, requires_grad in self._kept:
            if kept.is_written:
                raise MutationError(
                    f"the tensor of {words} was written in place after the forward had it: version "
                    f"{kept.version} then, {kept.now} now. Use a clone, or write out of place."
                )
            alias = kept.tensor.detach()
            found.append(alias.requires_grad_() if requires_grad else alias)
        return join(self._template, found)


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
        known, every = self._known, self.held
        sources: list[Source] = []
        if last and not known:  # as below where nothing is known, for the only call of a region, as most are
            numbers: dict[int, int] = {}
            for tensor in tensors:
                number = numbers.setdefault(id(tensor), len(every))
                if number == len(every):
                    every.append(self._kind(tensor))
                sources.append(number)
            return sources
        given = {id(tensor): tensor for tensor in tensors}
        for key in given.keys() & known.keys() if known else ():
            seen, version, _ = known[key]
            # After `h.add_(1)` between two calls `h` is the same object with another value.
            if seen() is not given[key] or version != version_of(given[key]):
                del known[key]
        for key in external_inputs(given, known):
            held = self._kind(given[key])
            known[key] = (ref(given[key]), held.version, len(every))
            every.append(held)
        sources += [known[id(tensor)][2] for tensor in tensors]
        if last:
            known.clear()
        return sources

    def made(self, output: object, number: int) -> None:
        """Remember the output of call `number`, which later calls may be given."""
        for place, tensor in enumerate(tensors_in(output)):
            version = version_of(tensor)
            if version >= 0:
                self._known[id(tensor)] = (ref(tensor), version, (number, place))
