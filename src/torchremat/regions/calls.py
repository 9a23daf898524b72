"""One call in a region: everything needed to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import cast
from weakref import ReferenceType

import torch
from torch import Tensor

from torchremat._compat.accelerators import current_devices
from torchremat.ambient.generators import States, drawn, generator_states
from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.ambient.registry import Captured, entries
from torchremat.errors import MutationError
from torchremat.regions.diagnosis.operators import OperatorLog
from torchremat.regions.selective.cache import Selection
from torchremat.state.code import function_of, is_library
from torchremat.state.following.objects import reach_arguments
from torchremat.state.guarded import looks_after_itself
from torchremat.state.naming import name_of
from torchremat.state.plain import plain_cells
from torchremat.state.reach import reach
from torchremat.state.reading import WrittenError
from torchremat.state.roots import known_root
from torchremat.state.snapshot import NOTHING, Snapshot
from torchremat.state.world import Reaching
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.structure import join, split, tensors_in
from torchremat.tensors.versioned import Versioned

# What a call runs: the user's function, or a wrapper of ours around it. A recompute runs the same body as the forward,
# so a body must look up nothing that may have changed since.
Body = Callable[..., object]


class Frozen:
    """A tensor, or a structure of tensors, that reaches a call other than by its arguments and is kept.

    The tensors are aliases, see NOTE [ Why an alias ].
    """

    __slots__ = ("_kept", "_template")

    def __init__(self, value: object) -> None:
        tensors: list[Tensor] = []
        self._template = split(value, tensors, [])
        self._kept = [(Versioned(tensor.detach()), tensor.requires_grad) for tensor in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The kept tensors."""
        return [kept.tensor for kept, _ in self._kept]

    def thaw(self, words: str) -> object:
        """Return the value for a recompute.

        Args:
            words: Where the forward got it, for messages.

        Raises:
            MutationError: A tensor was written in place.
        """
        found: list[Tensor] = []
        for kept, requires_grad in self._kept:
            if kept.is_written:
                raise MutationError(
                    f"the tensor of {words} was written in place after the forward had it: version "
                    f"{kept.version} then, {kept.now} now. Use a clone, or write out of place."
                )
            alias = kept.tensor.detach()
            found.append(alias.requires_grad_() if requires_grad else alias)
        return join(self._template, found)


# The source of a call's argument: an input that the region holds, by number, or the output of an earlier call.
Source = int | tuple[int, int]


class Call:
    """Everything that one call needs to run again.

    Attributes:
        body: The code that it runs.
        template: Its arguments, with numbers in place of tensors.
        sources: Where each of these tensors comes from.
        region: The region that it belongs to, if any.
        slots: How many tensors the region has saved after the call; negative during the call's first run.
        world: The state that it could reach.
        ambient_state: The state around it.
        context: The context variables around it.
        cells: The function's cells and their contents, if nothing else is in its world.
        captured: The state of registered entries.
        generators: The states of the generators that it draws from.
        preserves_rng: Whether a recompute draws the same numbers.
        is_pure: Whether the user's code calls nothing by name, so that it cannot change a global setting.
        sets_generators: Whether it may set the state of a generator.
        frozen_values: Values that reached it other than by its arguments, by name, in their order.
        log: The operators of the forward, with `debug=True`.
        selection: Outputs that a policy keeps, here or in an inner region.
    """

    __slots__ = (
        "ambient_state", "body", "captured", "cells", "context", "frozen_values", "generators", "is_pure", "log",
        "preserves_rng", "region", "selection", "sets_generators", "slots", "sources", "template", "world",
    )  # fmt: skip

    def __init__(
        self, body: Body, template: object, sources: list[Source], region: ReferenceType[object] | None = None
    ) -> None:
        self.body = body
        self.region = region  # weak, since the region owns its calls
        self.template = template
        self.sources = sources
        self.slots = -1
        self.world: Snapshot = NOTHING
        self.preserves_rng = True
        self.is_pure = False
        self.sets_generators = False
        self.generators: States = {}
        self.log: OperatorLog | None = None
        self.selection: Selection | None = None
        self.ambient_state: AmbientState
        self.context: Context
        self.captured: Captured | None = None
        self.cells: tuple[tuple[CellType, ...], list[object]] | None = None
        self.frozen_values: dict[object, list[Frozen]] | None = None

    def again(self, body: Body, region: ReferenceType[object]) -> Call:
        """Return the same call of another region, which saves nothing there, with another body around its own."""
        made = Call(body, self.template, self.sources, region)
        for name in _STATE:
            setattr(made, name, getattr(self, name))
        made.slots = 0
        return made

    @property
    def is_running(self) -> bool:
        """Whether the call runs for the first time."""
        return self.slots < 0

    @property
    def name(self) -> str:
        """The name of its function."""
        function = function_of(self.body)
        return getattr(function, "__qualname__", None) or type(function).__name__

    @property
    def is_under_autocast(self) -> bool:
        """Whether autocast was on around the call."""
        return self.ambient_state.casts

    def look(
        self, given: CallArguments, roots: Sequence[object], *, guard: Sequence[object], preserve_rng: bool
    ) -> None:
        """Capture all state that the call is about to see and may change, as Rule 6 may ask for it in the middle.

        Args:
            given: Its arguments.
            roots: The code that runs in it: the user's function, or modules, or what is known of one of them.
            guard: Objects that the user named.
            preserve_rng: Whether a recompute draws the same numbers.
        """
        tensors, objects = given.tensors, given.objects
        ambient = self.ambient_state = ambient_state()
        self.context = copy_context()
        special = [one for one in tensors if type(one) is not Tensor or one.__dict__]
        # torch's own, as that of a default device, have no state of the user's.
        modes = [one for one in ambient.modes if not is_library(type(one).__module__)] if ambient.has_modes else ()
        is_bare = not (objects or guard or special or modes) and len(roots) == 1
        root, roots = known_root(roots)
        plain = plain_cells(roots[0]) if is_bare else None
        known = root.recall() if is_bare and plain is None and root is not None else None
        if plain is not None:
            reads, contents = plain
            self.is_pure = not (reads.names or (contents and ModuleType in map(type, contents)))
            self.sets_generators = reads.sets_generators
            if contents:
                self.cells = cast("FunctionType", roots[0]).__closure__ or (), contents
        elif known is not None:
            self.world, self.is_pure, self.sets_generators = known, known.is_inert, known.sets_generators
        else:
            world = Reaching()
            for one in guard:
                if looks_after_itself(one):
                    world.skip(one)
            if guard:  # first, since a guarded object may be an argument too
                reach(world, guard, are_named=True)
            if special:
                reach_arguments(world, special)
            if objects:
                reach(world, objects, are_arguments=True)
            reach(world, roots)
            if modes:
                reach(world, modes)
            self.sets_generators = world.sets_generators
            self.world = Snapshot(world, guard)
            if is_bare and root is not None:
                root.remember(world)
            self.is_pure = self.world.is_inert and not modes
        self.preserves_rng = preserve_rng
        if preserve_rng:
            devices = _devices([*tensors, *self.world.tensors()]) if _ACCELERATED else ()
            self.generators = generator_states(devices, self.world.generators)
        if entries:
            self.captured = Captured()

    def reached(self) -> list[Tensor]:
        """Return the tensors that the call reaches in other ways than by its arguments."""
        return self.world.tensors() if self.cells is None else tensors_in(self.cells[1])

    def captured_graphs(self) -> list[Tensor]:
        """Return those of them that have a graph."""
        return self.world.with_graphs() if self.cells is None else tensors_in(self.cells[1])

    def settle(self) -> None:
        """Keep only state that the call has changed."""
        # A call that sets a generator may restore its state at the end and still have drawn from it.
        if self.generators and not self.sets_generators:
            self.generators = drawn(self.generators)
        if self.world is not NOTHING:
            self.world.settle()

    def words(self, error: WrittenError, region: str) -> str:
        """Return the words for a tensor that was written, given the words for the region."""
        return self.world.words(error, self.name_of(error.tensor), region)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that it reaches, None if it is not found."""
        return name_of(tensor, function_of(self.body), self.template, self.world.roots)

    def freeze(self, name: object, kept: Frozen) -> None:
        """Keep a value for the recomputes of the call; values with the same name keep their order."""
        if self.frozen_values is None:
            self.frozen_values = {}
        self.frozen_values.setdefault(name, []).append(kept)

    @property
    def frozen(self) -> list[Tensor]:
        """The tensors that it keeps in addition to its arguments."""
        return [tensor for each in (self.frozen_values or {}).values() for one in each for tensor in one.tensors]


_STATE = (
    "ambient_state", "captured", "cells", "context", "frozen_values", "generators", "is_pure", "preserves_rng",
    "sets_generators", "world",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class CallArguments:
    """The arguments of a call, taken apart.

    Attributes:
        template: The arguments, with numbers in place of tensors.
        tensors: The tensors in them.
        held: Inputs as a caller holds them who knows better than the region, as a loop does.
        sources: Where each tensor comes from.
        objects: Other arguments that could have state.
    """

    template: object
    tensors: list[Tensor]
    held: list[HeldTensor]
    sources: list[Source]
    objects: Sequence[object] = field(default=(), kw_only=True)


def _devices(tensors: list[Tensor]) -> list[torch.device]:
    """Return the devices other than the CPU that a call can draw random numbers on."""
    devices = {tensor.device for tensor in tensors} | {*current_devices()}
    return [device for device in devices if device.type not in ("cpu", "meta")]


# Whether this build of torch knows another device than the CPU; this query initializes nothing.
_ACCELERATED = torch.accelerator.current_accelerator() is not None
