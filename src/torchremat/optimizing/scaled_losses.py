"""Losses that a `GradScaler` has scaled, seen before the first parameter of their backward steps.

A scaler skips the step if one gradient is not finite, which is known when all are complete; a parameter that steps in
the backward steps on scaled gradients before that. Nothing in a backward tells a scaled loss: it is a product like any
other. So while gradients are released, `scale` of scalers marks the node of each loss that it returns, and a backward
that begins at such a node is known by it. It is the method that all scalers have: that of torch's class and of every
class derived from it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from weakref import finalize

import torch

from torchremat._compat.autograd import current_graph_task, enter_backward
from torchremat._compat.binding import Patch, subclasses_of
from torchremat.tensors.structure import tensors_in

_patches: dict[type, Patch] = {}  # of the `scale` of each class that has one
_watching: set[object] = set()
_tasks: set[int] = set()


def watch_scalers(owner: object) -> Callable[[], object]:
    """Mark losses that are scaled, until `owner` is gone or the result is called.

    The classes of scalers are as they were when nothing watches any more.
    """
    watch = object()
    _watching.add(watch)
    for kind in subclasses_of(torch.amp.GradScaler):
        if "scale" in vars(kind) and kind not in _patches:
            _patches[kind] = Patch(kind, "scale", _mark_losses(vars(kind)["scale"]))
    end = finalize(owner, _unwatch, watch)
    end.atexit = False
    return end


def _unwatch(watch: object) -> None:
    _watching.discard(watch)
    while _patches and not _watching:
        _, patch = _patches.popitem()
        if patch.problem() is None:
            patch.undo()


def is_scaled() -> bool:
    """Return whether the running backward is that of a scaled loss."""
    return bool(_tasks) and current_graph_task() in _tasks


def _mark_losses(scale: Callable[..., object]) -> Callable[..., object]:
    @wraps(scale)
    def marked(self: torch.amp.GradScaler, outputs: object) -> object:
        scaled = scale(self, outputs)
        if self.is_enabled() and _watching:
            for one in tensors_in(scaled):  # an iterator can be read once, and by the user
                if one.grad_fn is not None:
                    one.grad_fn.register_prehook(_begin)
        return scaled

    return marked


def _begin(_: object) -> None:
    enter_backward(_tasks)
