"""A region: a piece of forward whose saved tensors are dropped and recomputed.

`# See Rule n` marks the lines that obey NOTE [ Rules of a region ]. The mechanism in four sentences. While a call runs
in a region, every tensor that autograd saves is replaced by a `Slot`, a number that knows its region. The region keeps
everything needed to run its calls again, and only the slots, which autograd owns, keep the region. When a backward asks
the first slot for its tensor, all calls run again and the n-th tensor saved then is the n-th one saved before. The
recomputed graph itself is thrown away: gradients flow through the first one.

    forward    call 0 ─────── call 1 ──────       each `s` is a Slot; region ◄── every slot
               s0  s1  s2     s3  s4              region ──► inputs, functions, generator states
    backward                            s4 asked: run call 0, call 1 up to the save of s4, all five are here

NOTE [ A recompute in parts ]
A plan may cut the saves of a region into parts, at `Settings.cuts`. A recompute then fills the part of the save that
is asked for, and all later saves that wait: it runs from the beginning as ever, and drops what belongs to earlier
parts. When backward comes to such a part, another recompute fills it, and ends at its last save. So never more than
one part is there at a time, for one more forward of what lies before each cut.

    saves         s0  s1  s2 │ s3  s4        a cut at 3
    recompute                  ██  ██        s4 is asked for: runs to the end
    recompute     ██  ██  ██                 s2 is asked for: runs up to the save of s2

The inputs stay until the last part: inside another region, the slots of that one keep them (`Now.is_partial`).
All parts come at once where they would stay (`Session.keeps`), ahead of the gradient, and where code needs the output.

NOTE [ Modules that wait to be made ]
A `Lazy*` layer makes its parameters in its first forward and becomes another class, which cannot be undone. That call
is a plain one: autograd keeps its saved tensors, once, and every later call is recomputed.

Missing on purpose: any list of live regions. Autograd owns the slots, so everything it would free is freed (Rule 12).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.autograd import (
    at_end_of_backward,
    current_graph_task,
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
)
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modes import count_dispatch_modes, except_traced, is_traced_since, left_alone, modes_now
from torchremat._compat.transforms import check_transform_inside
from torchremat.errors import CheckpointError
from torchremat.regions.calls import Body, Call, CallArguments
from torchremat.regions.decisions import check_met
from torchremat.regions.derivatives import Arrivals, Differentiable, nodes_of
from torchremat.regions.diagnosis.differences import DivergedError
from torchremat.regions.diagnosis.message import explain, log_of
from torchremat.regions.hooks import noted, told, unpack
from torchremat.regions.recompute import RegionRecompute
from torchremat.regions.rules import first_filled
from torchremat.regions.selective.forward import Choosing, served
from torchremat.regions.selective.mode import SeenBy
from torchremat.regions.sessions import UNPACKED_ONCE, Session, active_session, open_sessions
from torchremat.regions.settings import Settings
from torchremat.regions.slots import LOST, Key, ServedSlot, Slot, alive, slot_of, waits
from torchremat.regions.threads import thread
from torchremat.regions.values import Fingerprints
from torchremat.stores.stored_parameters import parameters_in_memory
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import metadata_of
from torchremat.tensors.structure import split_call

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack

# `threading.RLock` is a function that calls it.
_Lock = type(threading.RLock())

Choose = Callable[[Call, list[Tensor]], Choosing]
"""Makes the watcher of a call's operators, given the tensors among its arguments."""


class Region(Differentiable):
    """Calls that are recomputed together, in the order in which they ran."""

    __slots__ = ("__weakref__", "around")

    # How a recomputed tensor loses its graph: torch.func needs another function.
    detached: Callable[[Tensor], Tensor] = staticmethod(Tensor.detach)

    def __init__(self, settings: Settings, label: object = None) -> None:
        # With `check="values"`; none in a recompute: the region that recomputes compares new tensors with earlier ones.
        compares = settings.check == "values" and not thread.now.recomputing and settings.turns.is_next()
        super().__init__(label, Fingerprints() if compares else None)
        self.settings = settings
        self.slots = []
        self.owners, self.stays_for, self._asked = {}, None, None
        self.arrivals = None
        self._lock = _Lock()
        self.around: ReferenceType[object] | None = None  # the region in whose forward it is called
        if open_sessions and (session := active_session()) is not None and not thread.now.recomputing:
            session.created(self)

    # --------------------------------------------------------------------------------------------------- forward

    def call(
        self,
        body: Body,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        roots: Sequence[object],
        *,
        last: bool = True,
        given: CallArguments | None = None,
        choose: Choose | None = None,
    ) -> object:
        """Run `body` as the next call of the region and return its result.

        Args:
            body: The code that runs, now and in every recompute.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            roots: The objects from which everything that the call can reach is found: the user's function, or a module.
            last: Whether no further call will join, so that outputs need not be remembered.
            given: The arguments taken apart, if the caller has done it.
            choose: Watches its operators for a policy; found by the settings if not given.
        """
        settings = self.settings
        if choose is None and (settings.policy is not None or thread.now.selecting is not None):
            with SeenBy(None) as around:
                choose = partial(Choosing, self, settings, around)
                return Region.call(self, body, args, kwargs, roots, last=last, given=given, choose=choose)
        number, first_slot, first_held = len(self.calls), len(self.slots), len(self.held)
        if given is None:
            found, objects = [], []  # `list[Tensor]()` takes twenty times as long
            template = split_call(args, kwargs, found, objects)
            given = CallArguments(template, found, [], self.take(found, last=last), objects=objects)
        self.held += given.held
        tensors, call, observer = given.tensors, Call(body, given.template, given.sources, ref(self)), settings.observer
        if observer is not None:
            observer.holds(self, number, [call.sources.index(one) for one in range(first_held, len(self.held))])
            observer.looks(self)
        call.look(given, roots, guard=settings.guard, preserve_rng=settings.preserve_rng)
        if call.world.waits:
            return body(*args, **kwargs)  # See NOTE [ Modules that wait to be made ]
        pack, back, run, choosing = self._pack, unpack, body, None
        if observer is not None or choose is not None or settings.debug or self.fingerprints is not None:
            pack, back, run, choosing = self._watched(call, number, tensors, choose)
        arrivals = (self.arrivals or Arrivals(self)).begins(tensors, call.sources) if self.derives else None
        del tensors, given
        self.calls.append(call)
        now = thread.now
        self.around = now.calls[-1].region if now.calls else None
        shared, inner = now.share(), now.inner
        now.inner = None  # outputs kept by an outer region are not for inner ones
        now.calls.append(call)
        try:
            self.began = modes_now()
            push_saved_tensor_hooks(pack, back)  # See Rule 1
            try:
                output = run(*args, **kwargs)
            finally:
                pop_saved_tensor_hooks()
            if observer is not None:
                observer.settles(self)
            call.settle()
            self.has_run(call)
            if choosing is not None:
                choosing.settle()
            if observer is not None:
                observer.ended(self, number, output)
        except BaseException as error:
            self.cut(number, first_slot)  # the partial graph is dropped; the next call, if any, takes this one's place
            check_transform_inside(error)
            raise
        finally:
            now.calls.pop()
            now.inner = inner
            if shared:
                now.unshare()
        if not last:
            self.made(output, number)
        if arrivals is not None and (self.slots or not last):
            self.arrivals = arrivals.ended(number, nodes_of(output))
        return output

    def cut(self, calls: int, saves: int) -> None:
        """Forget all but the first calls and saved tensors, and let the slots of the others refuse."""
        for slot in alive(self.slots[saves:]):
            slot.lose()
        del self.slots[saves:]
        super().cut(calls, saves)

    def _watched(
        self, call: Call, number: int, tensors: list[Tensor], choose: Choose | None
    ) -> tuple[Pack, Unpack, Body, Choosing | None]:
        """Return the hooks and the body of a call whose saves or operators something else sees, and what chooses."""
        observer, body = self.settings.observer, call.body
        own, run = self._pack, body
        pack, back = own if self.fingerprints is None else self._pack_with_values, unpack
        if observer is not None:
            observer.began(self, number, tensors)
            pack = partial(noted, partial(observer.saved, self, number), pack)
            back = partial(told, observer.asked)
        if self.settings.debug:
            call.log = log_of(self, call)
            pack = partial(noted, call.log.save, pack)
            run = partial(call.log.run, body, body)
        if pack is not own:
            pack = except_traced(pack)
        choosing = None if choose is None else choose(call, tensors)
        if choosing is not None:
            pack, run = choosing.hook(pack, computes=pack is not own), partial(choosing.run, run)
        return pack, back, run, choosing

    @outside_graphs  # compiled code calls it, and dynamo would trace it from there
    def _pack(self, tensor: Tensor) -> object:
        if count_dispatch_modes() and is_traced_since(self.began):
            return left_alone(tensor)  # See NOTE [ What is traced in a region ]
        slots, index = self.slots, len(self.slots)
        slot = slot_of(self, index, tensor) if parameters_in_memory else Slot(self, index)
        slots.append(ref(slot))
        try:
            self.metadata.append((tensor.shape, tensor.dtype, tensor.device, tensor.stride()))  # as `metadata_of`
        except RuntimeError:
            self.metadata.append(metadata_of(tensor))
        if not tensor.requires_grad and tensor.is_floating_point() and tensor._version == 0 and not holding.now:
            self.fresh.add(index)
        return slot

    def _pack_with_values(self, tensor: Tensor) -> object:
        assert self.fingerprints is not None
        slot = self._pack(tensor)
        self.fingerprints.add(tensor, is_fresh=len(self.slots) - 1 in self.fresh)
        return slot

    def unpack(self, slot: Slot, *, alone: bool = False) -> Tensor:
        """Return the tensor of a slot, recomputing the region if necessary; `alone` packs nothing of a derivative."""
        if not alone and self.arrivals is not None and torch.is_grad_enabled():
            return self.arrivals.asked(partial(self.unpack, slot, alone=True))
        if slot.index == LOST:
            raise CheckpointError(
                "autograd asked for a tensor that a region saved in a forward which raised, or which planning or a "
                "report ran without a backward; run that forward again before its backward."
            )
        if slot.value is not None:
            if self.is_running:
                self._note_backward()
            tensor = served(slot.value)
            own = cast("ServedSlot", slot)
            if tensor is not None:
                if open_sessions and self.is_done_with(slot):
                    own.release()
                return tensor
            own.recompute()
        if self.stays_for is not None:
            return slot.take(self.stays_for, keep=True)
        session = active_session() if open_sessions else None
        task = current_graph_task()
        key = task if session is None else session
        if key == -1:
            # Outside any backward nothing is kept. See Rule 7
            return self._recompute(None, slot.index).found(self)
        with self._lock:
            if not slot.has(key):
                if session is not None and session.refuses(self, self.was_asked(slot.index)):
                    raise CheckpointError(f"{self._name_at(slot.index)}: {UNPACKED_ONCE}")
                self._recompute_for(key, slot.index)
                if slot.task == key and not thread.now.recomputing:
                    return slot.tensor  # see `unpack` in hooks.py; most regions are asked for the first time here
            return slot.take(key, keep=self.is_needed_again(slot, session, task))

    @property
    def pack(self) -> Pack:
        """The hook for what the running call saves."""
        return self._pack if self.fingerprints is None else self._pack_with_values

    def _recompute_for(self, key: Key, index: int, *, returns: bool = False) -> RegionRecompute:
        session, cuts = key if isinstance(key, Session) else None, self.settings.cuts
        filled = self.owners.get(key)
        if filled is not None and index >= filled and (session is None or not session.dropped_too_early()):
            return self._recompute(key, index)
        first = first_filled(index, cuts) if cuts and not (session is not None and session.keeps()) else 0
        try:
            if session is not None:
                session.recomputing(self)
            part = range(first, filled or len(self.slots)) if first or filled else None
            done = self._recompute(key, part, returns=returns)
        except BaseException:
            self.forget(key)
            raise
        self.owners[key] = first
        if session is not None:
            session.owns(self, is_whole=not first and filled is None)
        elif filled is None:
            at_end_of_backward(partial(_forget, ref(self), key))
        return done

    def recompute_for(self, key: Key) -> bool:
        """Recompute ahead of any gradient for a session or the running backward; return whether it was necessary.

        See Rule 9.
        """
        with self._lock:
            if self.owners.get(key) == 0 or not any(waits(one()) for one in self.slots):
                return False
            self._recompute_for(key, 0)
            return True

    def repeat(self) -> None:
        """Run the calls to their end once more, outside of any backward, and keep no tensor.

        Raises:
            DivergedError: They save other tensors than in the forward.
            MutationError: An input or parameter was changed in place since the forward.
        """
        self._recompute(None, -1, explains=False)  # no saved tensor has this number

    def advance(self, key: Key | None) -> object:
        """Run the calls to their end once more and return the output of the last, without its graph.

        Args:
            key: The owner of the saved tensors, which then wait in their slots; None to keep none of them.

        Raises:
            CheckpointError: The recompute differs from the forward.
            MutationError: An input or parameter was changed in place since the forward.
        """
        # A thread that holds the lock may wait for the caller.
        if key is None or not self._lock.acquire(blocking=False):
            return self._recompute(None, -1, returns=True).output
        try:
            if key in self.owners:
                return self._recompute(None, -1, returns=True).output
            return self._recompute_for(key, -1, returns=True).output
        finally:
            self._lock.release()

    def abandon(self) -> None:
        """Release everything that is needed to run again, since no backward will run.

        Otherwise the region would leak if its context, or an object among its arguments, refers to an output of the
        region, and so to the graph that refers to the region.
        """
        with self._lock:
            for slot in alive(self.slots):
                slot.lose()
            self.slots.clear()
            self.clear()

    def _note_backward(self) -> None:
        """Record that a backward runs inside the region's own forward (Rule 6).

        The backward will run again in the recompute, whose graph then has to return its saved tensors, including the
        inputs of this region, which are saved in the region around it.
        """
        region: Region | None = self
        while region is not None and region.is_running and not region.runs_backward:
            region.runs_backward = True
            region = cast("Region | None", region.around() if region.around is not None else None)

    def _recompute(
        self, key: Key | None, only: int | range | None, *, explains: bool = True, returns: bool = False
    ) -> RegionRecompute:
        settings = self.settings
        if self.calls[-1].slots < 0:
            self._note_backward()
        elif settings.policy is not None:
            check_met(settings.policy)
        # A log changes the behaviour of compiled code, so it is on again if it was on in the forward.
        log = log_of(self, self.calls[-1]) if settings.debug else None
        recompute = RegionRecompute(self, settings, key, only, self.detached, returns=returns)
        observer = settings.observer
        if observer is not None:
            observer.recomputing(self)
        try:
            recompute.run(log, observer)
        except DivergedError as found:
            if not explains:
                raise
            raise CheckpointError(explain(self, found.call, found.difference, log)) from None
        finally:
            recompute.end()
        if observer is not None:
            observer.recomputed(self)
        return recompute

    def _name_at(self, index: int) -> str:
        return self.name(self.call_of(index))


def _forget(region: ReferenceType[Region], key: Key) -> None:
    if (alive := region()) is not None:
        alive.forget(key)
