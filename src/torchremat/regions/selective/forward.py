"""A call under a policy: its forward, and its part in a recompute.

See NOTE [ Selective recompute ].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from weakref import ref

from torch import Tensor, UntypedStorage

from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.transforms import is_in_batch, outside_batches
from torchremat.ambient.generators import set_generator
from torchremat.regions.calls import Body, Call
from torchremat.regions.diagnosis.captures import ModulePaths
from torchremat.regions.recording import Recording
from torchremat.regions.refilling import Refill
from torchremat.regions.selective.cache import Selection
from torchremat.regions.selective.kept import KeptValue, StoredOutput, memory_of
from torchremat.regions.selective.mode import SeenBy, alias_unseen, unseen
from torchremat.regions.selective.watching import Collecting, Replaying
from torchremat.regions.settings import Settings
from torchremat.regions.slots import Recomputable, Served, Slot
from torchremat.regions.threads import thread
from torchremat.tensors.held import HeldTensor, holding
from torchremat.tensors.metadata import version_of


class PutBack(AbstractContextManager[None]):
    """A block for a recompute that restores the generators moved in it."""

    __slots__ = ("_had",)

    def __enter__(self) -> None:
        now = thread.now
        self._had, now.moved = now.moved, {}

    def __exit__(self, *error: object) -> None:
        now = thread.now
        moved, now.moved = now.moved, self._had
        if moved:
            with outside_batches() if is_in_batch() else nullcontext():
                for generator, state in moved.items():
                    set_generator(generator, state)


class Choosing:
    """The forward of a call under a policy, its own or the policy of the region around it.

    Args:
        region: The region.
        settings: How it behaves.
        around: The watcher of the operators around the call.
        call: The call, which gets the selection.
        tensors: The tensors among its arguments.
    """

    def __init__(
        self,
        region: Recomputable,
        settings: Settings,
        around: Collecting | Replaying | None,
        call: Call,
        tensors: list[Tensor],
    ) -> None:
        self._region = region
        self._settings = settings
        self._call = call
        now = thread.now
        taken_over = next(now.inner, None) if now.inner is not None and now.recomputing else None
        selection = None if taken_over is None else taken_over()
        self._is_nested = bool(now.calls) or now.recomputing > 0
        self._run: Collecting | Replaying
        if selection is not None:
            self._run = Replaying(selection, takes=False)
        else:
            asked = settings.asked
            if asked is None:
                assert around is not None
                asked = around.selection.asked  # See NOTE [ Selective recompute ], 7
            assert asked is not None
            selection = Selection(asked)
            paths = ModulePaths(call, region.label)
            # An outer region may draw after it. See NOTE [ Selective recompute ], 6
            preserve_rng = settings.preserve_rng or self._is_nested
            self._run = Collecting(selection, paths, preserve_rng)
            if now.calls and not isinstance(around, Replaying):
                _selection_of(now.calls[-1]).inner.append(ref(selection))
        self.selection = call.selection = selection
        self._held: dict[UntypedStorage, HeldTensor] = {}
        for tensor, source in zip(tensors, call.sources, strict=True):
            memory = memory_of(tensor)
            if memory is not None and isinstance(source, int):
                self._held[memory] = region.held[source]

    def run(self, run: Body, /, *args: object, **kwargs: object) -> object:
        """Run the call and watch its operators."""
        if isinstance(self._run, Replaying):
            thread.now.inner = iter(self.selection.inner)  # the call restores the old value
        with SeenBy(self._run, Choosing.run.__code__):
            return run(*args, **kwargs)

    def hook(self, pack: Callable[[Tensor], object], *, computes: bool) -> Callable[[Tensor], object]:
        """Return the hook for saved tensors: the slot of a tensor holds the tensor if it is kept anyway.

        Args:
            pack: The region's own hook, which makes the slot.
            computes: Whether it runs operators, which must stay unseen.
        """
        pack = partial(unseen, pack) if computes else pack
        return partial(self._pack, pack)

    @outside_graphs  # code under dynamo calls it, compiled or not
    def _pack(self, pack: Callable[[Tensor], object], tensor: Tensor) -> object:
        slot = pack(tensor)
        if not isinstance(slot, Slot):
            return slot  # See NOTE [ What is traced in a region ]
        self._run.saved()
        if isinstance(self._run, Replaying):
            return slot
        if slot.value is not None:
            return slot  # a parameter from a store, which it brings back itself
        value = self._value(tensor) if self._region.serves else None
        if value is None:
            self.selection.end = len(self.selection.operators)
            return slot
        return slot.served(value)

    def _value(self, tensor: Tensor) -> KeptValue | StoredOutput | None:
        memory = memory_of(tensor)
        if memory is not None:
            selection = self.selection
            if memory in selection.memories():
                return KeptValue(alias_unseen(tensor))
            if selection.stores(memory):
                return unseen(partial(selection.stored, memory=memory), tensor)
            held = self._held.get(memory)
            if held is not None:
                return _value_in(held, tensor)
        base = tensor._base
        leaf = tensor if base is None else base
        # A parameter, or a view of it. The memory of a sharded parameter is freed after the forward. Inputs that an
        # inner region holds are leaves as well, and no parameters. See NOTE [ What is handed back to autograd ]
        if leaf.is_leaf and leaf.requires_grad and not (holding.now or self._call.world.has_shards):
            return KeptValue(alias_unseen(tensor))
        return None

    def settle(self) -> None:
        """Drop kept outputs that no recompute needs."""
        self._held.clear()
        if isinstance(self._run, Replaying):
            self._run.check(self._region.name(0))
        else:
            self.selection.settle(everything=self._is_nested or not self._settings.early_stop)


class ChosenRecompute:
    """The part of a call in a recompute.

    Args:
        selection: The outputs that its forward kept.
        takes: Whether this is the last recompute, so that kept outputs are removed.
        is_running: Whether its forward still runs.
    """

    def __init__(self, selection: Selection, *, takes: bool, is_running: bool) -> None:
        self._selection = selection
        self._run = None
        if selection.asked is not None:
            self._run = Replaying(selection, takes=takes, is_running=is_running)

    def run(self, run: Body, /, *args: object, **kwargs: object) -> object:
        """Run the call again; inner regions take over the kept outputs of their forwards."""
        thread.now.inner = iter(self._selection.inner)
        with PutBack(), SeenBy(self._run, ChosenRecompute.run.__code__):
            return run(*args, **kwargs)

    def hook(self, pack: Callable[[Tensor], object], refill: Refill) -> Callable[[Tensor], object]:
        """Return the hook for saved tensors, given the one that fills their slots."""
        if pack != refill.pack or not refill.detaches_by(alias_unseen):
            pack = partial(unseen, pack)
        return pack if self._run is None else partial(self._pack, pack, self._run, refill)

    @outside_graphs  # code under dynamo calls it, compiled or not
    def _pack(self, pack: Callable[[Tensor], object], run: Replaying, refill: Refill, tensor: Tensor) -> object:
        count, packed = refill.count, pack(tensor)
        if refill.count > count:  # else it is traced: see NOTE [ What is traced in a region ]
            run.saved()
        return packed

    def check(self, recording: Recording, number: int) -> None:
        """Raise if other operators have run than in the forward of that call.

        Raises:
            CheckpointError: They have.
        """
        if self._run is not None and self._run.difference is not None:
            self._run.check(recording.name(number))


def served(value: Served) -> Tensor | None:
    """Return the tensor that a slot holds, None if it was written in place since."""
    # All others may run operators to get it, which must stay unseen.
    return value.get() if type(value) is KeptValue else unseen(_got, value)


def _got(value: Served) -> Tensor | None:
    return value.get()


def _selection_of(call: Call) -> Selection:
    if call.selection is None:
        call.selection = Selection(None)
    return call.selection


def _value_in(held: HeldTensor, tensor: Tensor) -> KeptValue | None:
    """Return the value that a slot may hold for a tensor that shares its memory with an input held by the region."""
    if version_of(tensor) != held.version:
        return None  # the region has written to it, which is an error that the recompute finds
    if held.is_hooked:
        # Hooks around the region have it. To unpack it may be expensive for them (a region recomputes, a store copies)
        # or possible only once, so the recompute asks once, for all slots.
        return None
    return KeptValue(alias_unseen(tensor))
