"""Several processes: all run their step again, or none does."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import distributed, nn
from torch.distributed import ProcessGroup

from torchremat._compat.collectives import device_of
from torchremat._compat.sharding import has_fsdp, is_managed
from torchremat.errors import UnsupportedError


class AttemptOutcome(IntEnum):
    """How an attempt ended in one process; the largest of all processes counts."""

    DONE = 0
    FAILED = 1  # out of memory
    GIVEN_UP = 2  # out of memory, and must not be repeated
    RAISED = 3  # something else


def check_alone(model: nn.Module, group: ProcessGroup | None) -> None:
    """Refuse a guard in one of several processes that have not agreed on one.

    Raises:
        UnsupportedError: Several processes and no group; or the step of the model has its own collectives.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        if group is not None:
            raise UnsupportedError("group: torch.distributed is not initialized, so there is no process to agree with.")
        return
    if distributed.get_world_size() == 1:
        return
    if group is None:
        raise UnsupportedError(
            f"guard: this is one of {distributed.get_world_size()} processes. One that runs its step again would leave "
            "the others waiting in their collectives. Pass `group=torch.distributed.group.WORLD`, so that all run it "
            "again or none does; the step itself must then have no collectives (`no_sync()`), because a process that "
            "runs out of memory before one leaves the others in it."
        )
    if has_fsdp() and any(map(is_managed, model.modules())):
        raise UnsupportedError(
            "guard: the model is sharded with `fully_shard`, whose forward and backward are collectives. A process "
            "that runs out of memory between them leaves the others waiting, and no agreement can undo that. Give "
            "the model a budget instead: torchremat.fit."
        )


def check_no_sync(model: nn.Module) -> None:
    """Refuse a step in which DistributedDataParallel would reduce gradients.

    Raises:
        UnsupportedError: It is not within `no_sync()`.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.require_backward_grad_sync:
            raise UnsupportedError(
                "guard: DistributedDataParallel reduces gradients during backward, and a process that runs out of "
                "memory there leaves the others waiting. Call the guarded step within `model.no_sync()`, and reduce "
                "the gradients after it."
            )


def agreed(mine: AttemptOutcome, group: ProcessGroup | None) -> AttemptOutcome:
    """Return the worst outcome of all processes of a group; mine without a group."""
    if group is None or distributed.get_world_size(group) == 1:
        return mine
    worst = torch.tensor([int(mine)], device=device_of(group))
    distributed.all_reduce(worst, distributed.ReduceOp.MAX, group=group)
    return AttemptOutcome(int(worst.item()))
