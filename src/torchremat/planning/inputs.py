"""How large the inputs were that a plan was made for, and the warning when a call gets larger ones."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from torchremat.errors import ShapeWarning
from torchremat.tensors.structure import tensors_in


@dataclass(frozen=True, kw_only=True)
class InputSizes:
    """Elements in the inputs of each root's largest call, by name. `check` warns once."""

    elements: dict[str, int]
    _warned: list[str] = field(default_factory=list[str], compare=False, repr=False)

    def check(self, name: str, args: object) -> None:
        """Warn if the arguments of a call of root `name` have more elements than those planned for."""
        planned = self.elements.get(name)
        if planned is None or name in self._warned:
            return
        found = sum(tensor.numel() for tensor in tensors_in(args))
        if found > planned:
            self._warned.append(name)
            warnings.warn(
                f"`{name or 'the model'}` is called with {found} input elements, the plan was made for "
                f"{planned}; its budget holds for those "
                "shapes only. Plan again with the largest batch.",
                ShapeWarning,
                stacklevel=9,  # the code that called the root
            )
