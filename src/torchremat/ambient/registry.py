"""State that users register for a recompute to see again.

Python's and NumPy's random numbers are here as well: saving and setting NumPy's state takes about 0.1 ms each way, more
than the rest of a region's overhead, so they are opt-in by name.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from torchremat.errors import UnsupportedError


@runtime_checkable
class Ambient(Protocol):
    """One more piece of state that a recompute must see again, for example the state of an FP8 recipe.

    Before the forward of a region `capture` is called. Before a recompute `capture` is called again, then `restore`
    with the first call's result; after it `restore` with the second call's result. All of it runs in the thread of the
    forward or the recompute, and without grad.
    """

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    def capture(self) -> object:
        """Return a copy of the current state, which later changes do not reach."""
        ...

    def restore(self, state: Any) -> None:
        """Restore the state that `capture` returned. May be called many times with the same value."""
        ...


# The entries, in order of registration.
entries: list[Ambient] = []


def register(entry: Ambient) -> None:
    """Let every region that is made from now on, in any thread, capture and restore one more piece of state.

    Raises:
        UnsupportedError: It lacks `name`, `capture` or `restore`, or is registered already.
    """
    if not isinstance(entry, Ambient):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise UnsupportedError(
            f"entry: expected an object with `name`, `capture()` and `restore(state)`, got {type(entry).__name__}."
        )
    if any(one is entry for one in entries):
        raise UnsupportedError(f"{entry.name} is registered already.")
    entries.append(entry)


def unregister(entry: Ambient) -> None:
    """Leave the entry out of regions that are made from now on; those that have captured it still restore it.

    Raises:
        UnsupportedError: It is not registered.
    """
    found = [index for index, one in enumerate(entries) if one is entry]
    if not found:
        raise UnsupportedError(f"{getattr(entry, 'name', entry)} is not registered.")
    del entries[found[0]]


@contextmanager
def registered(entry: Ambient) -> Generator[None]:
    """Let the regions that are made inside the block capture and restore one more piece of state."""
    register(entry)
    try:
        yield
    finally:
        unregister(entry)


class Captured:
    """The registered state, as a forward saw it."""

    __slots__ = ("_states",)

    def __init__(self) -> None:
        with torch.no_grad():  # entries run outside of any graph
            self._states = [(entry, entry.capture()) for entry in entries]

    def restore(self, stack: ExitStack) -> None:
        """Restore it until `stack` is closed."""
        for entry, then in self._states:
            with torch.no_grad():
                stack.callback(_put_back, entry, entry.capture())
                entry.restore(then)

    def put_back(self) -> None:
        """Restore it for good."""
        for entry, then in self._states:
            _put_back(entry, then)


def _put_back(entry: Ambient, state: object) -> None:
    with torch.no_grad():
        entry.restore(state)


class _PythonRandom:
    name = "Python's `random`"

    def capture(self) -> object:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)


class _NumpyRandom:
    name = "`numpy.random`"

    def capture(self) -> object:
        return np.random.get_state()

    def restore(self, state: Any) -> None:
        np.random.set_state(state)


python_random: Ambient = _PythonRandom()
numpy_random: Ambient = _NumpyRandom()
