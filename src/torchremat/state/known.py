"""What modules reach: looked for in the first call, compared in each one after that.

NOTE [ What is known keeps nothing ]
What a module reaches is known for as long as the module is there. That must not keep the module, nor for long what is
in it no longer, nor anything large. So the module itself is left out, and nothing is known where some tensor is neither
a parameter nor a buffer, such as an output of the last call. What was taken out of a module goes with its next call. A
module that is reached from itself goes by the cycle collector, as ever: what is known goes before each full collection.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from weakref import ReferenceType, ref

from torch import nn

from torchremat.state.contents import Bindings
from torchremat.state.world import Reached, World, differ


def reached_from(module: nn.Module) -> Reached:
    """Return what a module reaches and holds now."""
    key = id(module)
    known = _all.get(key)
    if known is not None and (found := known.of(module)) is not None:
        return found
    world = World()
    world.reach([module])
    found = world.end()
    if world.is_whole and found.is_of_modules(but=module):
        _all[key] = _Known(module, found)
    elif known is not None:
        _all.pop(key, None)
    return found


class _Known:
    """What one module reaches, without the module: it was met first."""

    __slots__ = ("_bindings", "_kind", "_module", "_reached")

    def __init__(self, module: nn.Module, found: Reached) -> None:
        self._module: ReferenceType[nn.Module] = ref(module, partial(_forget, id(module)))
        self._kind = type(module)
        *rest, (bindings, contents) = found.rest
        assert isinstance(bindings, Bindings)
        self._bindings = bindings.without_first(contents)
        self._reached = found.with_parts(found.modules[1:], [], rest)

    def of(self, module: nn.Module) -> Reached | None:
        """Return what the module reaches if it is the same, None if not."""
        reached, (bindings, contents) = self._reached, self._bindings
        if (
            self._module() is not module
            or type(module) is not self._kind
            or module.__dict__ is not reached.dicts[0]
            or not reached.then.are_here()
            or not bindings.is_same(contents)
            or (reached.rest and differ(reached.rest))
        ):
            return None
        rest = [*reached.rest, bindings.with_first(module, contents)]
        return reached.with_parts([module, *reached.modules], [module], rest)


# By id of the module.
_all: dict[int, _Known] = {}


def _forget(key: int, _: object) -> None:
    _all.pop(key, None)


def _let_go(phase: str, info: Mapping[str, int]) -> None:
    if phase == "start" and info["generation"] == 2:
        _all.clear()


gc.callbacks.append(_let_go)  # See NOTE [ What is known keeps nothing ]
