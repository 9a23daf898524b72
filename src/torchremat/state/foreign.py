"""Objects whose state lies outside of Python's: arrays, random numbers of Python and NumPy, scripted modules."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from torchremat.state.containers import holds_same
from torchremat.state.holders import ItemHolder


class _ForeignKind(NamedTuple):
    """How the state of a kind of foreign object is read, written and compared."""

    read: Callable[[Any], object]
    write: Callable[[Any, Any], None]
    is_same: Callable[[Any, Any], bool]


# By base class. Random numbers of NumPy are written without a comparison, which costs as much.
_FOREIGN: dict[type, _ForeignKind] = {
    random.Random: _ForeignKind(
        read=lambda item: item.getstate(),
        write=lambda item, state: item.setstate(state),
        is_same=lambda item, state: item.getstate() == state,
    ),
    np.ndarray: _ForeignKind(
        read=lambda item: item.copy(),
        write=lambda item, state: item.__setitem__(..., state),
        is_same=lambda item, state: np.array_equal(item, state, equal_nan=item.dtype.kind in "fc"),
    ),
    np.random.RandomState: _ForeignKind(
        read=lambda item: item.get_state(),
        write=lambda item, state: item.set_state(state),
        is_same=lambda item, state: False,
    ),
    np.random.Generator: _ForeignKind(
        read=lambda item: deepcopy(item.bit_generator.state),
        write=lambda item, state: setattr(item.bit_generator, "state", state),
        is_same=lambda item, state: False,
    ),
}
FOREIGN = tuple(_FOREIGN)


class Foreign(ItemHolder):
    """An object whose state lives outside of Python: an array, or random numbers of Python or NumPy."""

    __slots__ = ("_kind",)

    def __init__(self, item: object) -> None:
        super().__init__(item)
        self._kind = next(kind for base, kind in _FOREIGN.items() if isinstance(item, base))

    @classmethod
    def of(cls, item: object) -> Foreign | None:
        """Return the holder for an object, None if the object has no state or does not expose it."""
        if isinstance(item, random.SystemRandom) or (isinstance(item, np.ndarray) and not item.flags.writeable):
            return None
        return cls(item)

    def read(self) -> object:
        """Return its current contents."""
        return self._kind.read(self._item)

    def is_same(self, before: Any) -> bool:
        """Return whether its state is known to be unchanged."""
        return self._kind.is_same(self._item, before)

    def write(self, contents: Any) -> None:
        """Set its contents to what `read` returned."""
        self._kind.write(self._item, contents)


class ScriptState(ItemHolder):
    """The buffers and the other attributes of a scripted module, which are in C++; not its parameters."""

    __slots__ = ("_names",)

    def __init__(self, module: torch.jit.ScriptModule) -> None:
        super().__init__(module._c)
        attributes = cast("dict[str, tuple[object, bool]]", module._concrete_type.get_attributes())
        self._names = [name for name, (_, is_parameter) in attributes.items() if not is_parameter]

    def read(self) -> dict[str, object]:
        """Return its current contents."""
        found = {name: self._item.getattr(name) for name in self._names}
        return {name: value for name, value in found.items() if isinstance(value, _SCRIPT_VALUES)}

    def is_same(self, before: dict[str, object]) -> bool:
        """Return whether it holds what `read` returned: the very tensors, and equal values of other types."""
        return all(_is_same_in_script(self._item.getattr(name), value) for name, value in before.items())

    def write(self, contents: dict[str, object]) -> None:
        """Set its contents to what `read` returned."""
        for name, before in contents.items():
            if not _is_same_in_script(self._item.getattr(name), before):
                self._item.setattr(name, before)


# What Python can read and write; a list or a dict is a copy each time.
_SCRIPT_VALUES = (Tensor, types.NoneType, bool, int, float, complex, str, list, tuple, dict)


def _is_same_in_script(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if isinstance(now, Tensor) or isinstance(before, Tensor) or type(now) is not type(before):
        return False
    return holds_same(now, before)
