"""Objects that calls visibly reach, described by name, and the paths of the modules whose calls are running."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from torchremat._compat.dynamo import is_compiled
from torchremat.frames import running_modules
from torchremat.regions.calls import Call
from torchremat.state.code import function_of
from torchremat.state.naming import named_objects


class ModulePaths:
    """The modules that a call reaches, by path; they are searched for on the first query.

    Args:
        call: The call.
        label: The words for its region, which the paths of a wrapped module's parts begin with.
    """

    def __init__(self, call: Call, label: object) -> None:
        self._call = call
        self._label = label
        self._names: dict[int, str] | None = None

    def known(self) -> list[str]:
        """Return all paths."""
        return list(self._found().values())

    def running(self) -> Iterator[str]:
        """Yield the paths of the modules that are running, innermost first."""
        names = self._found()
        for module in running_modules():
            path = names.get(id(module))
            if path is not None:
                yield path

    def _found(self) -> dict[int, str]:
        if self._names is None:
            self._names = Reach([self._call], self._label).names
        return self._names


_MOST = 2_000  # described values; more would not help a reader
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class StateChange:
    """A value that differs before and after a call."""

    name: str
    before: str
    after: str


class Reach:
    """The objects that calls reach.

    Attributes:
        modules: The modules that a region sees.
        names: Their paths, by id.
        compiled: The names of compiled functions and modules.
        scripted: The names of scripted functions and modules.
    """

    def __init__(self, calls: Iterable[Call], label: object) -> None:
        self.names: dict[int, str] = {}
        self.modules: list[nn.Module] = []
        self.compiled: list[str] = []
        self.scripted: list[str] = []
        self._calls = list(calls)
        self._label = label if isinstance(label, str) else ""
        self._generators: dict[str, torch.Generator] = {}
        self._state: dict[str, str] = {}
        for call in self._calls:
            for name, value in named_objects(function_of(call.body), call.template or ((), {}), self._label):
                if is_compiled(value):
                    self.compiled.append(name or type(value).__name__)
                if isinstance(value, torch.jit.ScriptModule | torch.jit.ScriptFunction):
                    self.scripted.append(name or type(value).__name__)
                if isinstance(value, nn.Module) and id(value) not in self.names:
                    self.names[id(value)] = name or type(value).__name__
                    self.modules.append(value)
                elif isinstance(value, torch.Generator):
                    self._generators[name] = value

    def look(self) -> None:
        """Record the current state of everything."""
        self._state = self._described()

    def generators(self) -> dict[str, torch.Generator]:
        """Return the reachable random generators, by name."""
        return self._generators

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the parameters and buffers of the modules, by their names."""
        found: list[tuple[str, Tensor]] = []
        for module in self.modules:
            path = self.names[id(module)]
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            found += [(f"{path}.{name}", tensor) for name, tensor in own]
        return found

    def changes(self) -> list[StateChange]:
        """Return what differs now; containers come first, and outer ones before their contents."""
        before, now = self._state, self._described()
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        names.sort(key=lambda name: ("items" not in before.get(name, ""), len(name)))
        return [StateChange(name, before.get(name, "nothing"), now.get(name, "nothing")) for name in names]

    def _described(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for call in self._calls:
            for name, value in named_objects(function_of(call.body), call.template or ((), {}), self._label):
                if len(found) >= _MOST:
                    return found
                if isinstance(value, _PLAIN):
                    found[name] = _short(value)
                elif isinstance(value, Tensor):
                    found[name] = f"shape {tuple(value.shape)}"
                elif isinstance(value, dict | list | tuple | set | bytearray | deque):
                    found[name] = f"{len(cast('list[object]', value))} items"
        return found


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
