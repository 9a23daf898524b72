"""The sizes of the inputs that a plan was made for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from torchremat.tensors.structure import tensors_in


@dataclass(frozen=True, kw_only=True)
class InputSizes:
    """Elements in the inputs of each root's largest call, by name."""

    elements: dict[str, int]

    def are_exceeded(self, name: str, args: object) -> str | None:
        """Return a message if the arguments of a call of root `name` are larger than planned, else None."""
        planned = self.elements.get(name)
        if planned is None:
            return None
        found = elements_in(tensors_in(args))
        if found <= planned:
            return None
        return (
            f"`{name or 'the model'}` is called with {found} input elements, the plan was made for {planned}; its "
            "budget holds for those shapes only. Plan again with the largest batch."
        )


def elements_in(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of tensors, without 0-D tensors: no other size depends on theirs."""
    return sum(tensor.numel() for tensor in tensors if tensor.dim())
