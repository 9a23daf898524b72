"""Detects a recompute that reads a tensor which was written since the forward.

A tensor that a forward could reach and that was written in place since cannot be restored. A recompute that does not
read it is unaffected: the discriminator that has stepped, the queue of keys, the weights of a layer whose backward is
done and whose optimizer has run. So only when a tensor *has* been written, one recompute runs under a mode that checks
reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from torchremat._compat.modes import Args, EagerMode, Kwargs, Operation, Types, past_torch_function
from torchremat.ambient.hidden import hidden
from torchremat.tensors.parts import PLAIN_CLASSES


class WrittenError(BaseException):
    """A recompute reads a tensor that was written in place since the forward, and that was not copied.

    Not an `Exception`: user code that swallows exceptions must not swallow it.
    """

    def __init__(self, tensor: Tensor, then: int, now: int) -> None:
        super().__init__()
        self.tensor = tensor
        self.then = then
        self.now = now


class WrittenTensors(dict[int, WrittenError]):
    """The tensors that were written since, by id, with the error for each.

    Attributes:
        memory: By the address of its storage, those that were written past their version, as any alias is again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[int, WrittenError] = {}

    def add_memory(self, error: WrittenError) -> None:
        """Add a tensor that was written past its version."""
        self[id(error.tensor)] = error
        if error.tensor.layout is torch.strided and type(error.tensor) in PLAIN_CLASSES:
            self.memory[error.tensor.untyped_storage().data_ptr()] = error

    def check(self, tensor: Tensor) -> None:
        """Raise if a tensor is one of them, or a view of one.

        Raises:
            WrittenError: It is.
        """
        found = self.get(id(tensor)) or (self.get(id(tensor._base)) if tensor._base is not None else None)
        if found is not None:
            raise found


class Reading(EagerMode):
    """Inspects each operator of a recompute, and stops at one that is given a tensor written since the forward.

    Attributes:
        found: The error at which it stopped; user code may convert the raised error into another.
    """

    def __init__(self, written: WrittenTensors) -> None:
        super().__init__()
        self._written = written
        self.found: WrittenError | None = None

    def run(self, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        """Return the result of the function."""
        with self:
            return function(*args, **kwargs)

    def __torch_dispatch__(self, func: Operation, types: Types, args: Args = (), kwargs: Kwargs = None) -> object:
        """Run an operator."""
        kwargs = kwargs or {}
        if not hidden.now:
            for one in (*args, *kwargs.values()):
                self._look(one)
        if not has_torch_function(args):
            return func(*args, **kwargs)
        # It came from C++, as in a backward, where neither subclasses nor function modes are called; nor are they here.
        with past_torch_function():
            return func(*args, **kwargs)

    def _look(self, one: object) -> None:
        if isinstance(one, Tensor):
            found = self._written.get(id(one))
            if self._written.memory and type(one) in PLAIN_CLASSES and one.layout is torch.strided:
                found = found or self._written.memory.get(one.untyped_storage().data_ptr())
            if found is not None:
                self._stop(found)
        elif isinstance(one, list | tuple):
            for inner in one:  # pyright: ignore[reportUnknownVariableType]
                self._look(inner)  # pyright: ignore[reportUnknownArgumentType]

    def _stop(self, found: WrittenError) -> NoReturn:
        self.found = found
        raise found
