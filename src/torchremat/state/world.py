"""What a call can reach through Python, found by `reach`."""

from __future__ import annotations

import types
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from torchremat._compat.modules import hooks_of_all_modules
from torchremat.errors import UnsupportedError
from torchremat.state.containers import Dict
from torchremat.state.holders import Bindings, Holder
from torchremat.state.sharding import WatchedShard

_MOST_ITEMS = 100_000
# Types whose objects have no state and hold nothing; those of libraries join them as they are met.
LEADS_NOWHERE: set[type] = {
    type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), types.ModuleType,
    types.BuiltinFunctionType, types.CodeType, torch.dtype, torch.device, torch.layout, torch.memory_format,
    torch.Size, np.dtype, object, property,
}  # fmt: skip


class World:
    """What can be reached from some roots.

    Attributes:
        dicts: Attributes, tables of modules, dicts: whatever is one.
        rest: The other holders, by kind.
        bindings: What cells, names and defaults mean, and which classes objects have.
        tensors: Those that count their versions. The recompute of a region is told if one was written.
        modules: Each once.
        roots: Those among the roots themselves.
        optimizers: Each once.
        proxied: What weak proxies stand for that were met whole; they are not followed.
        generators: torch's random generators.
        state: Tensors without grad that a module holds by name and may write to, other than parameters.
        loose: Tensors without grad elsewhere.
        named: By id, the tensors inside of what the user has named.
        shards: The parameters that FSDP2 has sharded.
        waits: Whether a lazy module was reached that has not made its parameters yet.
        sets_generators: Whether some code may set the state of a random generator.
        runs_code: Whether some code of the user's may change something that it reaches, or throw a switch.

    While roots are followed:
        pending: What is to be followed.
        seen: By id, what was, or is not to be.
        called: The names of attributes that code which was reached reads.
        classes: Those of the user's that were met, with the names of their methods that have been followed.
        has_cached: Whether the cache of parametrizations was reached.
        is_argument, is_named, is_whole: How, see `reach`.
    """

    __slots__ = (
        "bindings",
        "called",
        "classes",
        "dicts",
        "generators",
        "has_cached",
        "is_argument",
        "is_named",
        "is_whole",
        "loose",
        "modules",
        "named",
        "optimizers",
        "pending",
        "proxied",
        "rest",
        "roots",
        "runs_code",
        "seen",
        "sets_generators",
        "shards",
        "state",
        "tensors",
        "waits",
    )

    def __init__(self) -> None:
        self.dicts: list[Dict] = []
        self.rest: list[Holder] = []
        self.bindings = Bindings()
        self.tensors: list[Tensor] = []
        self.modules: list[nn.Module] = []
        self.roots: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.proxied: list[object] = []
        self.generators: list[torch.Generator] = []
        self.state: list[tuple[nn.Module, str, Tensor]] = []
        self.loose: list[Tensor] = []
        self.named: set[int] = set()
        self.shards: list[WatchedShard] = []
        self.waits = False
        self.sets_generators = False
        self.runs_code = False
        self.seen: set[int] = set()
        self.pending: list[object] = []
        self.called: set[str] = set()
        self.classes: dict[type, set[str]] = {}  # with the names of the methods that have been followed
        self.has_cached = False
        self.is_argument = False
        self.is_named = False
        self.is_whole = False

    def end(self) -> None:
        """Add what belongs to all that was reached."""
        if self.modules:
            self.dicts += hooks_of_all_modules
        if self.bindings:
            self.rest.append(self.bindings)

    def skip(self, item: object) -> None:
        """Leave one object alone."""
        self.seen.add(id(item))

    def skip_all_of(self, other: World) -> None:
        """Leave alone whatever another has reached."""
        self.seen |= other.seen

    @property
    def is_inert(self) -> bool:
        """Whether nothing that was reached can be changed by the call, since only modules of torch run in it."""
        reached = self.rest or self.loose or self.generators or self.classes or self.shards
        return not (self.runs_code or reached or any(hooks_of_all_modules))

    def push(self, items: Iterable[object]) -> None:
        """Have objects followed."""
        self.pending += [one for one in items if type(one) not in LEADS_NOWHERE]
        if len(self.seen) > _MOST_ITEMS and self.is_argument:
            raise UnsupportedError(
                f"more than {_MOST_ITEMS:,} objects hang on a region's arguments; whether the forward changes one "
                "cannot be watched. Pass what the function needs of them."
            )
