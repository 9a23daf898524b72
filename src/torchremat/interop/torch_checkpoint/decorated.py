"""`checkpoint(use_reentrant=False)`, without a function: a decorator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Checkpoint = Callable[..., Any]


class Decorated:
    """A function that is recomputed in backward wherever it is called; a method too, if it is an attribute of a class.

    Args:
        checkpoint: The function that calls it.
        options: The keyword arguments of `checkpoint`.
        function: The function.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, object], function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"function: expected a callable, got {type(function).__name__}.")
        self.function = function
        self.options = dict(options)
        self._checkpoint = checkpoint
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result."""
        function = self.function
        if not kwargs.keys().isdisjoint(self.options):
            # Here all keyword arguments belong to the function, whatever their names.
            function, kwargs = partial(function, **kwargs), {}
        return self._checkpoint(function, *args, **self.options, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Decorated:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        return Decorated(self._checkpoint, self.options, bind(instance, owner))
