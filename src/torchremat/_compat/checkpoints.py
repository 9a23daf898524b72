"""Private state of torch's own checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils import checkpoint as _checkpoint

from torchremat._compat.binding import private

_bind = partial(private, needed_for="torchremat.interop.torch_checkpoint")

# Whether the running backward was called by `.backward()` without `inputs`.
is_plain_backward: Callable[[], bool] = _bind("autograd._is_checkpoint_valid")
_bind("utils.checkpoint._enable_checkpoint_early_stop")
_bind("utils.checkpoint._checkpoint_debug_enabled")


def switched(*, early_stop: bool, debug: bool) -> tuple[bool, bool]:
    """Return both options, or what `set_checkpoint_early_stop` and `set_checkpoint_debug_enabled` have set instead."""
    names = vars(_checkpoint)
    stops, debugs = names["_enable_checkpoint_early_stop"], names["_checkpoint_debug_enabled"]
    return early_stop if stops is None else bool(stops), debug if debugs is None else bool(debugs)


def is_hook_of_torch_checkpoint(pack: object) -> bool:
    """Return whether `torch.utils.checkpoint` set a pack hook, in its forward or its recompute."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Return whether a module was put around another by torch.distributed's `checkpoint_wrapper`."""
    found = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return found is not None and isinstance(module, found.CheckpointWrapper)
