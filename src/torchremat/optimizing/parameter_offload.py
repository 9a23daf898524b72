"""`offload_parameters`: the parameters of a model in a store, while their modules do not run.

    a module begins             its parameters come in; what nodes and regions save of them is a `SavedView`
    it ends                     they leave
    a node of the backward      what it has saved comes in
    a gradient is complete      the parameter leaves, with `release_gradients` after its part of the step
    the backward ends           what has come in without a gradient leaves
    `optimizer.step()`          parameters come in slice by slice, and leave           partial_steps.py
    any other read              it comes in, and leaves when another one is read, or when a module ends

Each of them brings the parameter back by the same rule, see NOTE [ A parameter that is not in memory ]. So when values
leave is a matter of bytes and seconds alone: too early costs another way through the store.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import current_graph_task, enter_backward
from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.streams import use_stream
from torchremat._compat.transforms import without_wrappers
from torchremat.frames import MODULE_CALL, running
from torchremat.measuring.optimizers import Optimizer
from torchremat.optimizing.module_runs import (
    ModuleHook,
    ModuleRun,
    ModuleRuns,
    ReturnOrder,
    check_around,
    check_model,
    set_hooks,
)
from torchremat.optimizing.parameter_uses import Leaving, ParameterUses, settle_all
from torchremat.optimizing.partial_steps import PartialSteps, partial_steps
from torchremat.optimizing.release import releases_of
from torchremat.stores.base import check_store, land, settle
from torchremat.stores.in_catalog import Kept
from torchremat.stores.parameter_moves import moving
from torchremat.stores.stored_parameters import (
    SavedView,
    bring_back,
    came_in,
    can_leave,
    handle_of,
    plainly,
    put_away,
    saved_view_of,
    went_out,
)
from torchremat.tensors.handles import Store

LEAST_PARAMETER_BYTES = 2**15  # smaller ones stay, and are a thousandth of a large model


class ParameterOffload:
    """The parameters of a model in a store; see `offload_parameters`, which makes it.

    A context manager: at its end, or with `remove()`, all parameters are in memory again.

    Attributes:
        store: The store.
    """

    def __init__(self, store: Store, min_bytes: int, steps: PartialSteps | None) -> None:
        self.store = store
        self._min_bytes = min_bytes
        self._steps = steps
        self._hooks: list[RemovableHandle] = []
        self._known: dict[int, ReferenceType[Tensor]] = {}
        self._runs = ModuleRuns()
        self._lock = threading.RLock()  # autograd runs a thread for each device
        self._uses = ParameterUses()
        self._back: dict[int, Tensor] = {}  # have come in, and did not leave when they were to
        self._backwards: set[int] = set()  # at whose end all of `_back` leaves
        self._leaving: list[Leaving] = []
        self._order = ReturnOrder()
        self._ahead: Tensor | None = None  # what comes ahead of its use

    def begin(self, parts: Iterable[tuple[nn.Module, bool]]) -> None:
        """Put parameters away, and follow the calls of their modules.

        Args:
            parts: The modules, each with whether the parameters of its children run with it.
        """
        for module, is_whole in parts:
            enter = ModuleHook(partial(self._enter, is_whole=is_whole))
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(ModuleHook(self._leave), always_call=True))
            with self._lock:
                self._put_away(module.parameters(is_whole))
        self._settle()

    def remove(self) -> None:
        """Bring all parameters back, and let them stay. May be called twice.

        Raises:
            StoreError: One cannot be brought back; the others are unchanged.
        """
        known = [one for own in self._known.values() if (one := own()) is not None]
        self._take(known)
        self._settle()
        for hook in self._hooks:
            hook.remove()
        for one in known:
            went_out(one)
        self._ahead = None
        for held in (self._hooks, self._known, self._back, self._uses):
            held.clear()
        if self._steps is not None and self in self._steps.keepers:
            self._steps.keepers.remove(self)
            self._steps.end()

    def __enter__(self) -> ParameterOffload:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<ParameterOffload of {len(self._known)} parameters to {self.store!r}>"

    # ---------------------------------------------------------------------------------------------------- in and out

    @contextmanager
    def in_memory(self, parameters: Sequence[Tensor]) -> Generator[None]:
        """Have its own parameters in memory in the block, and put them away after it; what is held stays for later.

        Raises:
            StoreError: One cannot be brought back; or the store is strict, and has no room. What it has not taken is
                in memory.
        """
        parameters = [one for one in parameters if self._knows(one)]
        self._take(parameters)
        try:
            yield
        finally:
            self._let_go(parameters)
        with self._lock:
            self._put_away(parameters)

    def _take(self, parameters: Sequence[Tensor]) -> None:
        with self._lock:  # from here on no other thread puts them away
            self._uses.claims.update(map(id, parameters))
        try:
            for one in parameters:
                bring_back(one)
                self._uses.on_this_stream(one)
        except BaseException:
            self._let_go(parameters)
            raise

    def _let_go(self, parameters: Sequence[Tensor]) -> None:
        with self._lock:
            self._uses.claims.subtract(map(id, parameters))

    @moving()
    def _put_away(self, parameters: Iterable[Tensor]) -> None:
        left: list[Leaving] = []
        try:
            for one in parameters:
                if one.nbytes >= self._min_bytes and can_leave(one):
                    self._watch(one)
                    stream = self._uses.stream_of(one)
                    with use_stream(stream):  # which has written it, and may reuse its memory
                        gone = [] if self._uses.forbid(one) else put_away(one, self.store, self)
                    left += [Leaving(handle, values, stream) for handle, values in gone]
                    if gone:
                        self._uses.forget(one)
                    else:
                        came_in(one)  # and stays for now
                        self._back[id(one)] = one
        finally:
            if left:
                before, self._leaving = self._leaving, left
                settle_all(before)

    def taken_back(self, parameter: Tensor) -> Tensor | None:
        """Return the values of a parameter that are on their way out, which then stay; None if they are gone."""
        handle, leaving = handle_of(parameter), self._leaving
        found = next((one for one in leaving if one.handle is handle), None)
        if found is None or not found.is_on_this_stream:
            return None
        settle(found.handle)  # while the store reads it, the parameter could not leave again
        self._leaving = [one for one in leaving if one is not found]
        return found.values

    def came_back(self, parameter: Tensor, *, is_read: bool) -> None:
        """Take note of a parameter that is in memory again, and begin to bring the one that followed it last time."""
        self._close_left()
        came_in(parameter)
        in_backward = current_graph_task() >= 0
        with self._lock:
            self._uses.on_this_stream(parameter)
            if is_read and self._runs.open:
                self._runs.open[-1].claim(parameter, self._uses.claims)
                self._runs.open[-1].parameters.append(parameter)
            elif is_read:
                self._put_away(self._uses.read(parameter, in_backward=in_backward))
            enter_backward(self._backwards, lambda _: self.end())
            following = self._order.after(parameter, in_backward=in_backward)
            handle = None if following is None else handle_of(following)
            # One at a time: recomputes read parameters in many orders, and what comes ahead stays until it is read.
            # What is on its way out is in memory, where `taken_back` finds it, and would be there twice.
            leaves = any(one.handle is handle for one in self._leaving)
            begins = not leaves and (self._ahead is None or handle_of(self._ahead) is None)
            self._ahead = following if begins else self._ahead
        if handle is not None and begins:
            with plainly():  # no inference tensors; hidden from a policy of the region that runs
                handle.prefetch()

    def end(self) -> None:
        """Put away what has come back, and wait until all is out."""
        self._close_left()
        self._give_rest()
        self._settle()

    def _give_rest(self) -> None:
        with self._lock:
            rest = [*self._back.values(), *self._uses.done_reading()]
            self._put_away({id(one): one for one in rest}.values())
            self._back.clear()  # the others leave when their modules have run

    @moving()
    def _settle(self) -> None:
        with self._lock:
            leaving, self._leaving = self._leaving, []
        settle_all(leaving)
        if leaving:
            land(self.store, all_of_it=True)

    def _knows(self, parameter: Tensor) -> bool:
        return (found := self._known.get(id(parameter))) is not None and found() is parameter

    def _watch(self, parameter: Tensor) -> None:
        if not self._knows(parameter):
            self._known[id(parameter)] = ref(parameter)
            self._uses.forget(parameter)
            if parameter.requires_grad:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._complete))

    # ------------------------------------------------------------------------------------------------------- forward

    @outside_graphs
    def _enter(self, module: nn.Module, *, is_whole: bool) -> None:
        """Bring the parameters of a module back, which begins to run."""
        check_around(module)
        frame = next((one for one in running() if one.f_code is MODULE_CALL), None)
        self._close_left(frame)
        hooks = set_hooks(self._pack, _unpack)
        run = ModuleRun(module, hooks, [], [], None if frame is None else id(frame))
        self._runs.open.append(run)
        # Their kernels for inference are not run where a tensor of a child overrides functions, as if it is away.
        is_fused = isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer) and not module.training
        for one in module.parameters(is_whole or is_fused):
            own = without_wrappers(one)  # `functional_call` under a transform
            if own.nbytes >= self._min_bytes:
                with self._lock:
                    run.claim(own, self._uses.claims)
                bring_back(own)
                if can_leave(own):
                    came_in(own)
                    run.parameters.append(own)
                    self._uses.on_this_stream(own)

    @outside_graphs
    def _leave(self, module: nn.Module) -> None:
        """Put away what came back for a module, which has run or has raised."""
        found = [number for number, run in enumerate(self._runs.open) if run.module is module]
        if found:  # not if another hook has raised before ours
            self._close(found[-1])
            if current_graph_task() < 0:
                self._give_rest()

    def _close_left(self, begins: FrameType | None = None) -> None:
        """End the calls that are over. See NOTE [ A call that is left without hooks ]."""
        while self._runs.open and self._runs.open[-1].is_over(begins):
            self._close(len(self._runs.open) - 1)
        self._runs.end_hooks(None)

    def _close(self, number: int) -> None:
        """End a call, and all calls inside of it."""
        while len(self._runs.open) > number:
            run = self._runs.open.pop()
            self._runs.end_hooks(run.hooks)
            with self._lock:
                run.end(self._uses.claims)
                # In a recompute, too: the nodes that need them next bring them back.
                self._put_away(run.parameters)
                if self._runs.open:  # a region with a policy around this call holds some until it ends
                    around = self._runs.open[-1].parameters
                    around += [one for one in run.parameters if type(one) is nn.Parameter]

    @outside_graphs
    def _pack(self, tensor: Tensor) -> SavedView | Kept:
        self._close_left()
        return saved_view_of(tensor) or Kept(tensor)

    # ------------------------------------------------------------------------------------------------------ backward

    @outside_graphs
    def _complete(self, parameter: Tensor) -> None:
        self._uses.on_this_stream(parameter)
        if not any(one.steps for one in releases_of(parameter)):  # else it leaves after its part of the step
            with self._lock:
                self._put_away([parameter])


@outside_graphs
def _unpack(saved: SavedView | Kept | Tensor) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved.get()


def offload_parameters(
    model: nn.Module,
    optimizer: Optimizer | None,
    store: Store,
    *,
    modules: Iterable[nn.Module] | None = None,
    min_bytes: int = LEAST_PARAMETER_BYTES,
) -> ParameterOffload:
    """Keep the parameters of a model in a store, and bring those of each module back while it runs.

    They are in memory in the forward of their module, in its backward until their gradients are complete, and in their
    part of the optimizer's step. Code that reads one at any other time finds its values: `state_dict()`, an average of
    the parameters, `copy.deepcopy`. The training loop stays as it is, and each step is bit for bit the plain one,
    unless the store is lossy. Gradients and state stay in memory, unless `release_gradients` and `offload_optimizer`
    are called as well.

    >>> import torch
    >>> from torchremat import Host
    >>> model = torch.nn.Sequential(torch.nn.Linear(8192, 1), torch.nn.Linear(1, 8192))
    >>> optimizer = torch.optim.SGD(model.parameters())
    >>> host = Host()
    >>> with offload_parameters(model, optimizer, host):
    ...     model(torch.ones(3, 8192)).sum().backward()
    ...     optimizer.step()
    ...     host.statistics.stored_bytes  # two weights and a bias of 8192 floats
    98304

    Args:
        model: The model, as it is called.
        optimizer: Steps on its parameters, slice by slice; a plain one, not one around others. None for a model that is
            not trained.
        store: Such as `Host()`, `Disk()` or `Tiers(...)`. `Compressed` with a lossy codec makes parameters lossy.
        modules: The parameters of each, and of all its children, come and go together. If not given, those that each
            module of the model has itself.
        min_bytes: Smaller parameters stay in memory.

    Raises:
        UnsupportedError: A parameter is of a class of its own, as those of FSDP2 are; a DistributedDataParallel has
            them; a module is compiled or a ScriptModule; the parameters are in a store already; the step of this
            optimizer cannot be made in parts; `store` is not a store.
        StoreError: The store is strict, and has no room.
    """
    check_store(store)
    given = None if modules is None else list(modules)
    check_model(model, given)
    steps = None if optimizer is None else partial_steps(optimizer)
    own = ParameterOffload(store, min_bytes, steps)
    try:
        if steps is not None:
            steps.check_closed("offload_parameters")
            steps.names |= {id(one): name for name, one in model.named_parameters()}
            steps.keepers.append(own)
        own.begin([(one, True) for one in given] if given is not None else [(one, False) for one in model.modules()])
    except BaseException:
        own.remove()
        raise
    return own
