"""Follows a model in training: which optimizers step on it, found as they step, and its bytes.

Until the optimizers are known, each that steps on the model's parameters is recorded; see `state.optimizer_steps`. A
wrapper (accelerate's, Lightning's) makes its inner optimizer step, so the inner one is found whatever the wrapper is.
Not found are an optimizer that is none of torch's, and the state of a wrapper whose step runs none of torch's hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar
from weakref import finalize, ref

import torch
from torch import nn

from torchremat._compat.modules import WeakIdentityDict
from torchremat.measuring.before import BytesBefore, bytes_before
from torchremat.measuring.optimizers import parameters_of
from torchremat.measuring.untouched import have_gradients
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.state.optimizer_steps import after_each_step

Optimizer = torch.optim.Optimizer
T = TypeVar("T")


class Trained:
    """A model in training. It keeps nothing alive."""

    def __init__(self, model: nn.Module | None, device: torch.device) -> None:
        self._model = None if model is None else ref(model)
        self._device = device
        self._met: WeakIdentityDict[nn.Module, None] = WeakIdentityDict()
        self._models: list[ref[nn.Module]] = []
        self._optimizers: list[ref[Optimizer]] = []
        self._ends: Callable[[], object] | None = None

    def meet(self, module: nn.Module) -> None:
        """Record a module that is called: a part of the model, or of a copy that also has the plan on it."""
        if module in self._met:
            return
        self._met[module] = None
        model = None if self._model is None else self._model()
        is_part = model is not None and any(one is module for one in model.modules())
        found = module if model is None or not is_part else model
        if all(one() is not found for one in self._models):
            self._models.append(ref(found))

    def listen(self) -> None:
        """Record optimizers that step, from now on."""
        if self._ends is None:
            self._ends = finalize(self, after_each_step(partial(_stepped, ref(self))))

    def stop(self) -> None:
        """Stop recording."""
        if self._ends is not None:
            self._ends()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers found."""
        return _alive(self._optimizers)

    @property
    def has_gradients(self) -> bool:
        """Whether a parameter of the model has a gradient."""
        return have_gradients(one for model in _alive(self._models) for one in model.parameters())

    def is_stepped_by(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps on a parameter of the model."""
        own = {id(one) for model in _alive(self._models) for one in model.parameters()}
        return not own.isdisjoint(map(id, parameters_of([optimizer])))

    def note(self, optimizer: Optimizer) -> None:
        """Record an optimizer that steps on the model."""
        if all(one is not optimizer for one in self.optimizers):
            self._optimizers.append(ref(optimizer))

    def bytes_now(self) -> BytesBefore:
        """Return the bytes of the model and of its optimizers on the device."""
        models, optimizers = _alive(self._models), self.optimizers
        leaves = {id(one): one for model in models for one in model.parameters()}
        leaves |= {id(one): one for one in parameters_of(optimizers)}
        return bytes_before(
            models=models, leaves=leaves.values(), optimizers=optimizers, inputs=(), device=self._device
        )


def _stepped(trained: ref[Trained], optimizer: Optimizer) -> None:
    own = trained()
    if own is not None and not is_rehearsing() and own.is_stepped_by(optimizer):
        own.note(optimizer)


def _alive(seen: list[ref[T]]) -> list[T]:
    return [one for known in seen if (one := known()) is not None]
