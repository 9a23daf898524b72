"""`context_fn`: one context manager around the forward of a region, another one around each of its recomputes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from torchremat.errors import UnsupportedError, warn
from torchremat.interop.torch_checkpoint.hooks import IntoHooks, hooks_around
from torchremat.interop.torch_checkpoint.selective import SelectiveForward
from torchremat.regions.calls import Body
from torchremat.regions.decisions import Policy

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

    def policy_within_hooks(self, respects: bool | None) -> Policy | None:
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
