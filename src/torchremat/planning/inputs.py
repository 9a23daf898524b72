"""How large the inputs were that a plan was made for."""

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
        """Return in words that the arguments of a call of root `name` are larger than planned for, or None."""
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
    """Return how many elements tensors have, without those that are numbers: nothing has their size."""
    return sum(tensor.numel() for tensor in tensors if tensor.dim())
