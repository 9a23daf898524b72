"""Which thread frees the tensors that gloo has worked on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from torchremat._compat.binding import overridden, private
from torchremat._compat.tensors import holders_in_torch, tensors_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# NOTE [ Who frees what gloo has worked on ]
#
# gloo works in its own threads, and signals completion to the waiting caller before it releases the tensors. So a
# caller that goes on at once and drops a tensor may not be its last owner; then the tensor is freed a little later, in
# a thread whose frees the profiler does not see. How often that happens depends on how busy the machine is. While
# allocations are recorded
#
#   1. a call that waits for its collective returns only when gloo has released the tensors that it was given, and
#      their memory, which it holds by its own tensors: the thread that drops them later frees them;
#   2. memory that the call itself has allocated and that is not seen to be freed (gloo's own copy of the reduced
#      tensor) counts until the end of the call.
#
# An all-gather that is waited for later (an option of FSDP2) is waited for at once, which changes no byte: its tensors
# live as long. Other calls that return before the collective is done are left unchanged.

_GATHERS = ("all_gather_single", "_allgather_base")
_CALLS = (*_GATHERS, "reduce_scatter_single", "_reduce_scatter_base", "allreduce")
_PATIENCE_S = 10.0  # for a tensor that other code has begun to hold meanwhile
_POLL_S = 1e-4  # asleep, so that the threads of gloo get a core


@contextmanager
def settled_collectives(around: Callable[[], AbstractContextManager[None]]) -> Generator[None]:
    """While the block runs, let the collectives of FSDP2 over gloo return only when gloo holds nothing any more.

    See NOTE [ Who frees what gloo has worked on ].

    Args:
        around: Entered around each call of a collective.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        yield
        return
    kind = cast("type[ProcessGroup]", distributed.ProcessGroup)
    methods = [name for name in vars(kind) if name in _CALLS]
    settled = {name: _settled(getattr(kind, name), around, waits=name in _GATHERS) for name in methods}
    with overridden([kind], **settled):
        yield


def _settled(
    call: Callable[..., Any], around: Callable[[], AbstractContextManager[None]], *, waits: bool
) -> Callable[..., Any]:
    def settled(group: ProcessGroup, *args: Any) -> Any:
        tensors = list(_tensors_in(args))
        is_later = getattr(args[-1], "asyncOp", True)
        if (is_later and not waits) or any(one.device.type != "cpu" for one in tensors):
            return call(group, *args)
        with around():
            before = _holders(tensors)
            call(group, *args).wait()
            deadline = time.monotonic() + _PATIENCE_S
            while _holders(tensors) != before and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        return _done() if is_later else None  # like a backend that has waited itself

    return settled


def _holders(tensors: Iterable[Tensor]) -> list[int]:
    """Return the reference counts of each tensor and of its memory."""
    return [count for one in tensors for count in (holders_in_torch(one), tensors_in([one.untyped_storage()]))]


def _done() -> object:
    """Return a finished call."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    make = private("_C._distributed_c10d._create_work_from_future", needed_for="measuring all-gathers")
    return cast("Callable[[object], object]", make)(future)


def _tensors_in(args: Iterable[Any]) -> Generator[Tensor]:
    for one in args:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list):
            yield from _tensors_in(cast("list[Any]", one))


def device_of(group: ProcessGroup) -> torch.device:
    """Return the kind of device whose tensors a group's collectives take."""
    backend = torch.distributed.get_backend(group)
    return torch.device({"nccl": "cuda", "xccl": "xpu"}.get(backend, "cpu"))
