"""Values that reach a call other than by its arguments, so that a recompute can pass them again."""

from __future__ import annotations

from torch import Tensor

from torchremat.errors import MutationError
from torchremat.tensors.structure import join, split
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
