"""One call in a region: everything needed to run it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from operator import is_not
from types import CellType, FunctionType, ModuleType
from typing import TYPE_CHECKING, cast
from weakref import ReferenceType

import torch
from torch import Tensor

from torchremat._compat.accelerators import current_devices
from torchremat._compat.transforms import is_in_batch, outside_batches
from torchremat.ambient.generators import States, drawn, generator_states, restore
from torchremat.ambient.global_state import AmbientState, ambient_state
from torchremat.ambient.locks import EXCHANGING
from torchremat.ambient.registry import Captured, entries
from torchremat.errors import MutationError
from torchremat.regions.inputs import Source
from torchremat.regions.settings import Settings
from torchremat.regions.threads import thread
from torchremat.state.code import function_of, reads_of
from torchremat.state.containers import ContainerCopies
from torchremat.state.exchange import Exchange
from torchremat.state.following.code import plain_cells
from torchremat.state.following.tensors import reach_arguments
from torchremat.state.guarded import looks_after_itself
from torchremat.state.holders import contents_of
from torchremat.state.naming import name_of
from torchremat.state.reach import reach
from torchremat.state.reading import Reading, WrittenError, WrittenTensors
from torchremat.state.snapshot import NOTHING, Snapshot
from torchremat.state.world import World
from torchremat.tensors.metadata import version_of
from torchremat.tensors.structure import join, split, tensors_in

if TYPE_CHECKING:
    from torchremat.regions.diagnosis.operators import OperatorLog
    from torchremat.regions.selective.cache import Selection

# What a call runs: the user's function, or a wrapper of ours around it. A recompute runs the same body as the forward,
# so a body must look up nothing that may have changed since.
Body = Callable[..., object]


class Call:
    """Everything that one call needs to run again."""

    __slots__ = (
        "_ambient_state",
        "_captured",
        "_cells",
        "_context",
        "_frozen",
        "body",
        "generators",
        "is_pure",
        "log",
        "preserves_rng",
        "region",
        "selection",
        "sets_generators",
        "slots",
        "sources",
        "template",
        "world",
    )

    def __init__(
        self, body: Body, template: object, sources: list[Source], region: ReferenceType[object] | None = None
    ) -> None:
        self.body = body
        self.region = region  # weak, since the region owns its calls
        self.template = template
        self.sources = sources
        self.slots = -1  # the region's number of slots after the call; negative during the call's first run
        self.world: Snapshot = NOTHING
        self.preserves_rng = True
        self.is_pure = False  # whether the user's code calls nothing by name, so that it cannot change a global setting
        self.sets_generators = False  # whether it may set the state of a generator
        self.generators: States = {}
        self.log: OperatorLog | None = None  # of the forward, with `debug=True`
        self.selection: Selection | None = None  # outputs that a policy keeps, here or in an inner region
        self._ambient_state: AmbientState
        self._context: Context
        self._captured: Captured | None = None
        # The function's cells and their contents, if nothing else was captured.
        self._cells: tuple[tuple[CellType, ...], list[object]] | None = None
        self._frozen: dict[object, list[Frozen]] | None = None

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
        return self._ambient_state.casts

    def look(self, tensors: list[Tensor], roots: Sequence[object], objects: list[object], settings: Settings) -> None:
        """Capture all state that the call is about to see and may change, as Rule 6 may ask for it in the middle.

        Args:
            tensors: The tensors among its arguments.
            roots: The code that runs in it: the user's function, or modules.
            objects: Other arguments that could have state.
            settings: What else to capture.
        """
        self._ambient_state = ambient_state()
        self._context = copy_context()
        guard = settings.guard
        special = [one for one in tensors if type(one) is not Tensor or one.__dict__]
        modes = self._ambient_state.modes if self._ambient_state.has_modes else ()
        contents = None if objects or guard or special or modes or len(roots) != 1 else plain_cells(roots[0])
        if contents is not None:
            function = cast("FunctionType", roots[0])
            reads = reads_of(function.__code__)
            self.is_pure = not reads.names and ModuleType not in map(type, contents)
            self.sets_generators = reads.sets_generators
            if contents:
                self._cells = function.__closure__ or (), contents
        else:
            world = World()
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
            self.is_pure = self.world.is_inert and not modes
        self.preserves_rng = settings.preserve_rng
        if settings.preserve_rng:
            devices = _devices([*tensors, *self.world.tensors()]) if _ACCELERATED else ()
            self.generators = generator_states(devices, self.world.generators)
        if entries:
            self._captured = Captured()

    def reached(self) -> list[Tensor]:
        """Return the tensors that the call reaches in other ways than by its arguments."""
        return self.world.tensors() if self._cells is None else tensors_in(self._cells[1])

    def settle(self) -> None:
        """Keep only state that the call has changed."""
        # A call that sets a generator may restore its state at the end and still have drawn from it.
        if self.generators and not self.sets_generators:
            self.generators = drawn(self.generators)
        if self.world is not NOTHING:
            self.world.settle()

    def restored(self, *, without_gradients: bool = False) -> Restored:
        """Restore the state that the call may see in addition to its arguments; return the object that undoes this.

        Args:
            without_gradients: Whether the gradients of leaves are put aside meanwhile.

        Raises:
            UnsupportedError: A parameter is sharded now, and was not.
        """
        return Restored(self, without_gradients)

    def words(self, error: WrittenError, region: str) -> str:
        """Return the words for a tensor that was written, given the words for the region."""
        return self.world.words(error, self.name_of(error.tensor), region)

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a tensor that it reaches, None if it is not found."""
        return name_of(tensor, function_of(self.body), self.template, self.world.roots)

    def run_again(
        self, copies: ContainerCopies, written: WrittenTensors | None, /, *args: object, **kwargs: object
    ) -> object:
        """Run the call in a recompute: it sets no context variable and freezes no value again.

        Args:
            copies: Of the containers in context variables, see NOTE [ What a recompute leaves behind ].
            written: Tensors that were written since, which the call must not read.
            args: As the forward's.
            kwargs: As the forward's.

        Raises:
            WrittenError: It reads one of them.
        """
        if written:
            reading = Reading(written)
            try:
                return reading.run(self.run_again, copies, None, *args, **kwargs)
            finally:
                if reading.found is not None:
                    raise reading.found
        context = self._context.copy()  # a context can be entered once at a time
        if context:
            looked_after = self.world.containers
            for variable, value in self._context.items():
                own = copies.of(value, looked_after)
                if own is not value:
                    context.run(variable.set, own)
        now = thread.now
        if self._frozen is None and not now.frozen:
            return context.run(self.body, *args, **kwargs)
        had = now.frozen
        now.frozen = {name: iter(kept) for name, kept in self._frozen.items()} if self._frozen else {}
        try:
            return context.run(self.body, *args, **kwargs)
        finally:
            now.frozen = had

    def freeze(self, name: object, kept: Frozen) -> None:
        """Keep a value for the recomputes of the call; values with the same name keep their order."""
        if self._frozen is None:
            self._frozen = {}
        self._frozen.setdefault(name, []).append(kept)

    @property
    def frozen(self) -> list[Tensor]:
        """The tensors that it keeps in addition to its arguments."""
        return [tensor for each in (self._frozen or {}).values() for one in each for tensor in one.tensors]


class Frozen:
    """A tensor, or a structure of tensors, that reaches a call other than by its arguments and is kept.

    The tensors are aliases, see NOTE [ Why an alias ].
    """

    __slots__ = ("_kept", "_template")

    def __init__(self, value: object) -> None:
        tensors: list[Tensor] = []
        self._template = split(value, tensors, [])
        self._kept = [(tensor.detach(), tensor.requires_grad, version_of(tensor)) for tensor in tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The kept tensors."""
        return [tensor for tensor, _, _ in self._kept]

    def thaw(self, words: str) -> object:
        """Return the value for a recompute.

        Args:
            words: Where the forward got it, for messages.

        Raises:
            MutationError: A tensor was written in place.
        """
        found: list[Tensor] = []
        for tensor, requires_grad, then in self._kept:
            now = version_of(tensor)
            if now != then:
                raise MutationError(
                    f"the tensor of {words} was written in place after the forward had it: version {then} then, {now} "
                    "now. Use a clone, or write out of place."
                )
            alias = tensor.detach()
            found.append(alias.requires_grad_() if requires_grad else alias)
        return join(self._template, found)


class Restored:
    """The state that a call saw, shown to a recompute until closed. See NOTE [ The world of a call ]."""

    __slots__ = ("_exchange", "_here", "_stack", "written")

    def __init__(self, call: Call, without_gradients: bool) -> None:
        self.written: WrittenTensors | None = None
        self._exchange: Exchange | None = None
        self._stack: ExitStack | None = None
        # The ambient state of the backward now; None if the call cannot change it.
        self._here: AmbientState | None = None
        then = call._ambient_state
        is_here = then.are_here()
        if not (is_here and call.is_pure):
            self._here = then if is_here else AmbientState()
        try:
            if not is_here or call.generators or call._captured is not None:
                self._stack = ExitStack()
                self._enter(self._stack, call, is_here)
            world = call.world if call._cells is None else _of_cells(*call._cells)
            if world is not NOTHING:
                self._exchange = Exchange(world, without_gradients=without_gradients)
                self.written = self._exchange.written or None
        except BaseException:
            self.close()
            raise

    def _enter(self, stack: ExitStack, call: Call, is_here: bool) -> None:
        if call.generators or call._captured is not None:
            stack.enter_context(EXCHANGING)
        if not is_here:
            call._ambient_state.restore(stack)
        if call.generators:
            if is_in_batch():
                stack.enter_context(outside_batches())
            restore(call.generators, stack)
        if call._captured is not None:
            call._captured.restore(stack)

    @property
    def wrote(self) -> list[Tensor]:
        """The tensors that the recompute has written in place and that cannot be restored."""
        return [] if self._exchange is None else self._exchange.wrote

    def close(self) -> None:
        """Put everything back, in reverse order."""
        try:
            if self._exchange is not None:
                self._exchange.close()
        finally:
            if self._stack is not None:
                self._stack.close()
            if self._here is not None and not self._here.are_the_same():
                self._here.put_back()


def _of_cells(cells: tuple[CellType, ...], contents: list[object]) -> Snapshot:
    """Return a world in which cells held other contents than now, `NOTHING` if the contents are the same."""
    return Snapshot.of_cells(cells, contents) if any(map(is_not, contents_of(cells), contents)) else NOTHING


def _devices(tensors: list[Tensor]) -> list[torch.device]:
    """Return the devices other than the CPU that a call can draw random numbers on."""
    devices = {tensor.device for tensor in tensors} | {*current_devices()}
    return [device for device in devices if device.type not in ("cpu", "meta")]


# Whether this build of torch knows another device than the CPU; this query initializes nothing.
_ACCELERATED = torch.accelerator.current_accelerator() is not None
