"""`context_fn`: one context manager around the forward of a region, another one around each of its recomputes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from torchremat.interop.torch_checkpoint.selective import SelectiveForward
from torchremat.regions.calls import Body

ContextFn = Callable[[], tuple[AbstractContextManager[object], AbstractContextManager[object]]]


class Contexts:
    """The two contexts of one region. The second one is entered again for every recompute, as torch does.

    Attributes:
        policy: The policy that they stand for, None if they are any contexts.
    """

    __slots__ = ("_forward", "_recompute", "policy")

    def __init__(self, context_fn: ContextFn) -> None:
        pair = context_fn()
        if not isinstance(pair, tuple | list) or len(pair) != 2:  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison]
            raise ValueError(
                "context_fn: a function that returns a pair of context managers is needed; it returned a "
                f"{type(pair).__name__}."
            )
        self._forward: AbstractContextManager[object] | None = pair[0]
        self._recompute = pair[1]
        # A policy is the region's business.
        self.policy = pair[0].policy if isinstance(pair[0], SelectiveForward) else None

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` in the context of the forward, the first time, or of a recompute."""
        if self._forward is None:
            # What ends a recompute early passes through as an exception; a context that swallows it is welcome to.
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
    """Run `function` in its contexts. It comes first, for whoever looks for its name."""
    return contexts.run(function, *args, **kwargs)
