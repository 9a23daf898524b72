"""The context managers of `torch.utils.checkpoint`: `context_fn`, `checkpoint` as a decorator, and `GraphExecGroup`.

Hooks see the tensors that autograd saves, and outputs kept by a policy are not among them: `save_on_cpu` around a
selective region leaves them where they are. With this option a pair of hooks is a store, and the policy keeps outputs
in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat.errors import MutationError, UnsupportedError, warn
from torchremat.interop.torch_checkpoint.selective import SelectiveForward
from torchremat.regions.calls import Body
from torchremat.regions.decisions import SAVE, AnyPolicy, Decision, OperatorContext, decision_of, describe, stored_in
from torchremat.regions.sessions import Session
from torchremat.stores.offloading import REGIONS
from torchremat.tensors.metadata import version_of

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack


@dataclass(frozen=True, slots=True)
class Hooks:
    """A pair of saved-tensor hooks, as a store."""

    pack: Pack
    unpack: Unpack

    def put(self, tensor: Tensor) -> _PackedByHooks:
        """Hand a tensor to the hooks."""
        return _PackedByHooks(self.pack(tensor), self.unpack, tensor.nbytes, ref(tensor), version_of(tensor))


@dataclass(frozen=True, slots=True)
class _PackedByHooks:
    """A tensor as packed by hooks.

    Attributes:
        stored_bytes: The tensor's bytes; the size of the packed object is unknown.
        given: The tensor that the hooks were given, as long as it is alive.
    """

    packed: object
    unpack: Unpack
    stored_bytes: int
    given: ReferenceType[Tensor]
    version: int

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            MutationError: The hooks kept the same memory that they were given, and it was written in place since.
        """
        with torch.no_grad():
            tensor = self.unpack(self.packed)
        given = self.given()
        if given is None or tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
            return tensor
        now = version_of(given)
        if now != self.version:
            raise MutationError(
                f"a tensor of shape {tuple(tensor.shape)} that a policy keeps was written in place: it was at version "
                f"{self.version} when the saved-tensor hooks around the region got it, and is at {now} now. They keep "
                "its memory; let them keep a copy, or make the operation out of place."
            )
        return tensor

    def prefetch(self) -> None:
        """No-op: hooks are asked once, and answer at once."""


class IntoHooks:
    """A policy that keeps in hooks the outputs that another policy keeps; outputs for a store still go to the store."""

    def __init__(self, policy: AnyPolicy, hooks: Hooks) -> None:
        self._policy = policy
        self._kept = stored_in(hooks)

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        """Return the decision on the output of `op`."""
        decision = decision_of(self._policy(ctx, op, *args, **kwargs), self._policy)
        return self._kept if decision is SAVE else decision

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._policy, name)  # the attributes that say how it wants to be asked

    def __repr__(self) -> str:
        return describe(self._policy)


def hooks_around() -> Hooks | None:
    """Return the user's saved-tensor hooks that are active in this thread; hooks of regions are skipped."""
    passed: list[tuple[Pack, Unpack]] = []
    try:
        while (top := top_saved_tensor_hooks(True)) is not None:
            if not str(getattr(top[1], "__module__", "")).startswith(REGIONS):
                return Hooks(*top)
            passed.append(top)
            pop_saved_tensor_hooks()
    finally:
        for pack, unpack in reversed(passed):
            push_saved_tensor_hooks(pack, unpack)
    return None


ContextFn = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


# The attribute that torch's own `checkpoint` sets on the context that torch makes of a policy, from 2.14 on.
_RESPECTS = "respect_saved_tensors_hooks"
_PASSED_BY = (
    "A saved_tensors_hooks context (e.g. save_on_cpu) is active around a selective activation checkpoint region. "
    "Tensors that SAC saves currently bypass these hooks, but a future release will route them through the hooks like "
    "any other saved tensor. Silence this warning and choose the behavior explicitly by passing "
    "respect_saved_tensors_hooks=True|False to torch.utils.checkpoint.checkpoint."
)


class Contexts:
    """The two contexts of one region. The second one is entered again for every recompute, as torch does."""

    __slots__ = ("_forward", "_recompute")

    def __init__(self, context_fn: ContextFn) -> None:
        pair = context_fn()
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise ValueError(
                "context_fn: expected a function that returns a pair of context managers, got one that returned a "
                f"{type(pair).__name__}."
            )
        self._forward: AbstractContextManager[object] | None = pair[0]
        self._recompute = pair[1]

    def policy_within_hooks(self, respects: bool | None) -> AnyPolicy | None:
        """Return the policy that the contexts stand for, which the region handles; None for any other contexts.

        Args:
            respects: Whether kept outputs go through the saved-tensor hooks around the region; None if not given.

        Raises:
            UnsupportedError: `respects` is True, and the contexts are torch's own.
        """
        forward = cast("Any", self._forward)
        if isinstance(forward, SelectiveForward):
            hooks = hooks_around() if respects is not False else None
            if hooks is None:
                return forward.policy
            if respects:
                return IntoHooks(forward.policy, hooks)
            warn(_PASSED_BY, FutureWarning)
            return forward.policy
        if hasattr(forward, _RESPECTS):
            if respects:
                raise UnsupportedError(
                    "respect_saved_tensors_hooks=True: torch's own contexts would take the hooks of this region for "
                    "the user's. Make them with torchremat.interop.torch_checkpoint."
                    "create_selective_checkpoint_contexts."
                )
            setattr(forward, _RESPECTS, False)
        return None

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` in the context of the forward, the first time, or of a recompute."""
        if self._forward is None:
            # The early stop of a recompute passes through as an exception; a context may swallow it.
            with self._recompute:
                return body(*args, **kwargs)
            return None
        context, self._forward = self._forward, None
        with context:
            return body(*args, **kwargs)
        # The context has swallowed an exception.
        raise RuntimeError(
            "torch.utils.checkpoint: the forward context provided by context_fn suppressed an exception raised during "
            "the checkpointed forward. This is not supported because checkpoint cannot return a value for a failed "
            "forward."
        )


def run_in_contexts(function: Callable[..., object], contexts: Contexts, /, *args: object, **kwargs: object) -> object:
    """Run `function` in its contexts. `function` comes first, for code that looks up its name."""
    return contexts.run(function, *args, **kwargs)


Checkpoint = Callable[..., Any]


class Decorated:
    """A function, or a method of a class, that is recomputed in backward wherever it is called."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, object], function: Callable[..., Any]) -> None:
        if not callable(function):
            raise TypeError(f"function: expected a callable, got {type(function).__name__}.")
        self.function = function
        self.options = dict(options)
        self._checkpoint = checkpoint
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's result."""
        function = self.function
        if not kwargs.keys().isdisjoint(self.options):
            # Here all keyword arguments belong to the function, whatever their names.
            function, kwargs = partial(function, **kwargs), {}
        return self._checkpoint(function, *args, **self.options, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Decorated:
        bind = getattr(self.function, "__get__", None)
        if instance is None or bind is None:
            return self
        return Decorated(self._checkpoint, self.options, bind(instance, owner))


class GraphExecGroup(torch_checkpoint.GraphExecGroup):
    """A region that several backward calls reach inside of one group is recomputed once.

    The contract is torch's: each saved tensor can be unpacked in one backward call of a group, a group that is entered
    again continues, and groups do not nest. `torchremat.session` requires less. Recomputed tensors that are never
    unpacked are dropped with the group.

    Both sides see the group: torch's own regions in the same model see it too.
    """

    def __init__(self) -> None:
        self._session = Session(1, unpacks_once=True)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            super().__enter__()
            stack.callback(super().__exit__)
            stack.enter_context(self._session.active())
            self._open = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        self._open.close()

    def __del__(self) -> None:
        self._session.close()
