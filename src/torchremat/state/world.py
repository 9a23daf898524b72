"""Everything that a call can reach through Python, found by `reach`."""

from __future__ import annotations

import functools
import types
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sized

import numpy as np
import torch
from torch import Tensor, nn

from torchremat._compat.modules import hooks_of_all_modules
from torchremat.errors import UnsupportedError
from torchremat.state.code import ClassCode
from torchremat.state.containers import Dict, Dicts
from torchremat.state.holders import Bindings, Holder
from torchremat.state.leaves import WatchedShard
from torchremat.state.world_state import WorldState

_MOST_ITEMS = 100_000
# Types whose objects have no state and hold nothing; types of libraries join them as they are met.
LEADS_NOWHERE: set[type] = {
    type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), types.CodeType, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype, object, property,
}  # fmt: skip


class World(ABC):
    """Everything that can be reached from some roots.

    Attributes:
        rest: The other holders, by kind.
        bindings: The values of cells, names and defaults, and the classes of objects.
        tensors: The tensors that count their versions. The recompute of a region is told if one was written.
        modules: Each module once.
        roots: The modules among the roots themselves.
        generators: torch's random generators.
        state: Tensors without grad that a module holds by name and may write to, other than parameters.
        loose: Tensors without grad elsewhere.
        named: By id, the tensors inside of the objects that the user has named.
        shards: The parameters that FSDP2 has sharded.
        waits: Whether a lazy module was reached that has not made its parameters yet.
        sets_generators: Whether some code may set the state of a random generator.
        passes_versions: Whether some code may write to a tensor past its version counter.
        is_inert: Whether the call can change nothing that was reached, since only torch's modules run in it.
    """

    __slots__ = (
        "bindings", "generators", "loose", "modules", "named", "passes_versions", "rest", "roots",
        "sets_generators", "shards", "state", "tensors", "waits",
    )  # fmt: skip

    is_inert: bool

    def __init__(self) -> None:
        self.rest: list[Holder] = []
        self.bindings = Bindings()
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.roots: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self.state: list[tuple[nn.Module, str, Tensor]] = []
        self.loose: list[Tensor] = []
        self.named: set[int] = set()
        self.shards: list[WatchedShard] = []
        self.waits = False
        self.sets_generators = False
        self.passes_versions = False

    @abstractmethod
    def read(self) -> WorldState:
        """Return its contents now, or as they have just been read."""


class Reaching(World):
    """The search for everything that can be reached from some roots, and what it has found so far.

    Attributes:
        dicts: Attributes, tables of modules, dicts: every dict.
        optimizers: Each optimizer once.
        proxied: The targets of weak proxies that were met whole; they are not followed.
        partials: Each `functools.partial` once.
        tables: Containers that were not followed, being long.
        namespaces: The Python modules of whose names those are followed that code reads as attributes.
        imports: The names of Python modules that code imports when it runs.
        runs_code: Whether some user code may change an object that it reaches, or flip a global switch.
        pending: The objects still to be followed.
        seen: By id, the objects that were followed, or must not be.
        met: Modules whose tables are still to be followed.
        called: The names of attributes that reached code reads.
        classes: The user's classes that were met, with their code and the names of the methods that were followed.
        files: The Python modules that were met as values of attributes and items.
        asked: How many names of attributes had been read when names were last looked up in these.
        homes: The names of the Python modules that these classes are from.
        methods: Those of packages' classes, to be followed when nothing else is left.
        in_file: By id, these methods and the functions that they name, which are followed within their file.
        has_cached: Whether the cache of parametrizations was reached.
        leaves_iterators: Whether objects with `__next__` are left alone: where their items come from has advanced.
        is_argument, is_named, is_whole: How the roots are followed, see `reach`.
    """

    __slots__ = (
        "asked", "called", "classes", "dicts", "files", "has_cached", "homes", "imports", "in_file", "is_argument",
        "is_named", "is_whole", "leaves_iterators", "met", "methods", "namespaces", "optimizers", "partials", "pending",
        "proxied", "runs_code", "seen", "tables",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.dicts: list[Dict] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.proxied: list[object] = []
        self.partials: list[functools.partial[object]] = []
        self.tables: list[Sized] = []
        self.namespaces: list[types.ModuleType] = []
        self.imports: list[str] = []
        self.runs_code = False
        self.seen: set[int] = set()
        self.pending: list[object] = []
        self.met: list[nn.Module] = []
        self.called: set[str] = set()
        self.classes: dict[type, tuple[ClassCode, set[str]]] = {}
        self.files: list[types.ModuleType] = []
        self.asked = -1
        self.homes: set[str] = set()
        self.methods: list[types.FunctionType] = []
        self.in_file: set[int] = set()
        self.has_cached = False
        self.leaves_iterators = False
        self.is_argument = False
        self.is_named = False
        self.is_whole = False

    @property
    def is_inert(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the call can change nothing that was reached, since only torch's modules run in it."""
        rest = [one for one in self.rest if one is not self.bindings]
        reached = rest or self.loose or self.generators or self.classes or self.shards
        return not (self.runs_code or reached or any(hooks_of_all_modules))

    def read(self) -> WorldState:
        """End the search, and return the contents of all that it has found."""
        if self.modules:
            self.dicts += hooks_of_all_modules
        if self.bindings:
            self.rest.append(self.bindings)
        return WorldState([Dicts(self.dicts)], [(one, one.read()) for one in self.rest])

    def skip(self, item: object) -> None:
        """Leave one object alone."""
        self.seen.add(id(item))

    def skip_all_of(self, other: Reaching) -> None:
        """Leave alone all objects that another search has reached."""
        self.seen |= other.seen

    def push(self, items: Iterable[object]) -> None:
        """Queue objects to be followed."""
        self.pending += [one for one in items if type(one) not in LEADS_NOWHERE]
        if len(self.seen) > _MOST_ITEMS and self.is_argument:
            raise UnsupportedError(
                f"more than {_MOST_ITEMS:,} objects are reachable from a region's arguments, too many to watch for "
                "changes. Pass only what the function needs."
            )
