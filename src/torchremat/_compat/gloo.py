"""Who frees what gloo has worked on: nobody knows when, but where it is waited for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from torchremat._compat.autograd import at_end_of_backward, current_graph_task
from torchremat._compat.binding import overridden
from torchremat._compat.collectives import InPlaceOf, finished, is_exchange, plain_tensors_in, wait_for
from torchremat._compat.modes import without_modes
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
# An all-gather that is waited for later (an option of FSDP2), and the functional collectives of DTensor, are waited for
# at once, which changes no byte: their tensors live as long. So is a future that is asked for in a backward, as by the
# communication hooks of DistributedDataParallel: what is chained to it runs at once, where it is seen, and what it was
# given is held until the backward ends, the longest that it may live. Other calls that return before the collective is
# done are left unchanged, and so are the backwards of functional collectives, which no Python code calls.

_GATHERS = ("all_gather_single", "_allgather_base")
_OPERATORS = {
    "_c10d_functional": (
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce", "all_reduce_coalesced"),
        *("all_to_all_single", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
    ),
    "_c10d_functional_autograd": ("all_gather_into_tensor", "all_to_all_single", "reduce_scatter_tensor"),
}
_PATIENCE_S = 0.2  # for a tensor that other code has begun to hold meanwhile, as regions do that keep what is received
_POLL_S = 1e-4  # asleep, so that the threads of gloo get a core


@contextmanager
def settled_collectives(around: Callable[[], AbstractContextManager[None]]) -> Generator[None]:
    """While the block runs, let collectives over gloo return only when gloo holds nothing any more.

    See NOTE [ Who frees what gloo has worked on ].

    Args:
        around: Entered around each call of a collective.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        yield
        return
    kind = cast("type[ProcessGroup]", distributed.ProcessGroup)
    methods = {name: call for name in vars(kind) if is_exchange(name, call := getattr(kind, name))}
    with ExitStack() as stack:
        later: _Later = WeakKeyDictionary()
        settled = {name: _settled(call, around, later, waits=name in _GATHERS) for name, call in methods.items()}
        stack.enter_context(overridden([kind], **settled))
        stack.enter_context(overridden([distributed.Work], get_future=_settled_future(later)))
        for namespace, names in _OPERATORS.items():
            packets: Any = getattr(torch.ops, namespace)
            own = {name: InPlaceOf(getattr(packets, name), partial(_settled_operator, around)) for name in names}
            stack.enter_context(overridden([packets], **own))
        yield


def _settled_operator(
    around: Callable[[], AbstractContextManager[None]], operator: Callable[..., Any], given: object, *args: Any
) -> Any:
    tensors = list(plain_tensors_in([given]))
    if any(type(one) is not Tensor or one.device.type != "cpu" for one in tensors):
        return operator(given, *args)
    with around():
        before = _holders(tensors)
        made = operator(given, *args)
        with without_modes():  # they see the wait of the model's own code
            wait_for(made)
        found = list(plain_tensors_in([made]))
        _await_holders([*tensors, *found], [*before, *(0, 1) * len(found)])
    return made


_Later: TypeAlias = "WeakKeyDictionary[Any, list[Tensor]]"  # what calls were given that nobody has waited for


def _settled_future(later: _Later) -> Callable[[Any], object]:
    get_future: Any = torch.distributed.Work.get_future
    held: list[list[Tensor]] = []

    def settled_future(work: Any) -> object:
        given = later.pop(work, None)
        if given is not None and current_graph_task() != -1:
            work.wait()
            held.append(given)
            at_end_of_backward(held.clear)
        return get_future(work)

    return settled_future


def _settled(
    call: Callable[..., Any], around: Callable[[], AbstractContextManager[None]], later: _Later, *, waits: bool
) -> Callable[..., Any]:
    def settled(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        tensors = list(plain_tensors_in(args))
        is_later = bool(kwargs) or getattr(args[-1] if args else None, "asyncOp", True)
        if any(one.device.type != "cpu" for one in tensors):
            return call(group, *args, **kwargs)
        if is_later and not waits:
            work = call(group, *args, **kwargs)
            later[work] = tensors
            return work
        with around():
            before = _holders(tensors)
            call(group, *args, **kwargs).wait()
            _await_holders(tensors, before)
        return finished([]) if is_later else None  # like a backend that has waited itself

    return settled


def _await_holders(tensors: list[Tensor], expected: list[int]) -> None:
    """Wait until these hold some tensors, or have not changed for long: other code has begun to hold one."""
    found: list[int] = []
    ends_s = 0.0
    while (now := _holders(tensors)) != expected:
        if now != found:
            found, ends_s = now, time.monotonic() + _PATIENCE_S
        elif time.monotonic() > ends_s:
            return
        time.sleep(_POLL_S)


def _holders(tensors: Iterable[Tensor]) -> list[int]:
    """Return the reference counts of each tensor and of its memory."""
    return [count for one in tensors for count in (holders_in_torch(one), tensors_in([one.untyped_storage()]))]
