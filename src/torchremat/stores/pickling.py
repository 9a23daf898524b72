"""What happens to a store when its owner is copied or sent to another process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self


class Remade:
    """A store that copies of a model share, and that another process makes anew: empty, from the same arguments.

    Its file, threads and locks belong to one process; a copy of them would close the file of the original.
    """

    _made_of: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments."""
        made = super().__new__(cls)
        made._made_of = args, kwargs
        return made

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Any, ...]]:
        args, kwargs = self._made_of
        return partial(type(self), **kwargs), args
