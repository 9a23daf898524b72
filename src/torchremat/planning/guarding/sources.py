"""Objects of a step that have advanced after it has run: iterators and optimizers."""

# The objects that a step holds are searched in plain sight, as in `measuring.step`: its arguments, closure cells,
# defaults, the globals that its code names, and, for a bound method, the attributes of its object that it names.
#
#     an iterator     the next attempt would get another batch: refused before the first step
#     an optimizer    its state is written before its parameters, and memory may run out between: versions are watched

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.measuring.step import held_by, is_iterator
from torchremat.tensors.metadata import version_of


def check_no_iterators(step: Callable[..., object], objects: Iterable[object]) -> None:
    """Refuse a step that takes its batch from an iterator.

    Args:
        step: The user's step.
        objects: Its arguments that are not tensors.

    Raises:
        UnsupportedError: The step receives one, or holds one.
    """
    held = [(f"`{name}`", one) for name, one in held_by(step)]
    found = next((words for words, one in (*(("an argument", one) for one in objects), *held) if is_iterator(one)), "")
    if found:
        raise UnsupportedError(
            f"guard: the step takes from an iterator ({found}). Run again, it would get the next batch, and planning "
            "takes some too. Take the batch before: `for batch in loader: run(batch)`."
        )


def optimizers_of(given: torch.optim.Optimizer | None, *callables: object) -> list[torch.optim.Optimizer]:
    """Return the given optimizer, and the optimizers that callables hold, each once."""
    held = (one for function in callables for _, one in held_by(function))
    found = [given, *(one for one in held if isinstance(one, torch.optim.Optimizer))]
    return list(dict.fromkeys(one for one in found if one is not None))


class OptimizerState:
    """The state of optimizers as it is now: its tensors and their versions."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._before = self._read()

    def is_written(self) -> bool:
        """Return whether a tensor of it was written or added."""
        return self._read() != self._before

    def _read(self) -> list[tuple[int, int]]:
        states = (
            state for one in self._optimizers for state in cast("dict[object, dict[str, object]]", one.state).values()
        )
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return [(id(tensor), version_of(tensor)) for tensor in tensors]
