"""What processes exchange: in which groups, and collectives that have been done before."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from torchremat._compat.binding import overridden, private, subclasses_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# NOTE [ Who sees what is exchanged ]
#
# A step communicates by methods of process groups (`dist.all_reduce`, `isend`, object collectives, the hooks of FSDP),
# or by operators that take the name of a group (functional collectives, and with them all redistributions of DTensor).
# Python code calls both by name, in a forward, in a hook and in the backward of an autograd function alike. So both are
# replaced while a step is rehearsed, by functions that note the group; of a send or a receive the two processes, since
# the others of its group know nothing of it. A dispatch mode would see neither what DTensor does below it, nor, without
# the cost of a mode for each operator, what a backward exchanges.
#
# Nobody sees what compiled C++ calls by itself: the reducer of DistributedDataParallel, the backwards of functional
# collectives that have a forward here, and libraries with exchanges of their own.

Ranks = tuple[int, ...]
"""The processes of a group, by their ranks among all, in order."""

_EXCHANGES = (
    "_all",
    "_reduce",
    "all",
    "barrier",
    "broadcast",
    "gather",
    "monitored",
    "recv",
    "reduce",
    "scatter",
    "send",
)
_OF_TWO = ("recv", "send")
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem")


def is_distributed() -> bool:
    """Return whether this is one of several processes that torch.distributed connects."""
    found = sys.modules.get("torch.distributed")
    return found is not None and found.is_available() and found.is_initialized() and found.get_world_size() > 1


def ranks_of(group: ProcessGroup | None, other: int | None = None) -> Ranks:
    """Return the processes of a group, by their ranks among all; none of a group that only pretends to have some.

    Args:
        group: The group.
        other: If it is given, only this process of the group, and the one that runs this.
    """
    distributed = torch.distributed
    if distributed.get_backend(group) == "fake":
        return ()
    ranks = distributed.get_process_group_ranks(group)
    return tuple(sorted(ranks if other is None else {ranks[other], distributed.get_rank()}))


@contextmanager
def exchanges_noted(note: Callable[[Ranks], object]) -> Generator[None]:
    """While the block runs, call `note` with the processes of each group, or pair, that Python code communicates in.

    See NOTE [ Who sees what is exchanged ].
    """
    if not is_distributed():
        yield
        return
    known: dict[object, None] = {}  # so that the ranks of a group are looked up once

    def seen(group: object, other: int | None = None) -> None:
        if (group, other) not in known:
            known[group, other] = None
            note(ranks_of(cast("ProcessGroup", group), other))

    with ExitStack() as stack:
        for kind in subclasses_of(torch.distributed.ProcessGroup):
            calls = {name: call for name, call in vars(kind).items() if is_exchange(name, call)}
            own = {name: (_noting_two if name in _OF_TWO else _noting)(call, seen) for name, call in calls.items()}
            stack.enter_context(overridden([kind], **own))
        for namespace, names in _operators_of_groups().items():
            packets: Any = getattr(torch.ops, namespace)
            own = {name: InPlaceOf(getattr(packets, name), partial(_noting_groups, seen)) for name in names}
            stack.enter_context(overridden([packets], **own))
        yield


def is_exchange(name: str, call: object) -> bool:
    """Return whether an attribute of a process group is a method in which other processes take part."""
    return callable(call) and name.startswith(_EXCHANGES)


def _noting(call: Callable[..., Any], seen: Callable[[object], None]) -> Callable[..., Any]:
    def noting(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        seen(group)
        return call(group, *args, **kwargs)

    return noting


def _noting_two(call: Callable[..., Any], seen: Callable[[object, int], None]) -> Callable[..., Any]:
    def noting(group: ProcessGroup, tensors: list[Tensor], other: int, tag: int) -> Any:
        seen(group, other)
        return call(group, tensors, other, tag)

    return noting


class InPlaceOf:
    """Stands in for an operator and its overloads: a call of it is `call`, which is given the operator first."""

    def __init__(self, packet: Any, call: Callable[..., Any]) -> None:
        self._packet, self._call = packet, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._packet, *args, **kwargs)


def _noting_groups(seen: Callable[[object], None], operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for one in (*args, *kwargs.values()):
        group = _group_of(one)
        if group is not None:
            seen(group)
    return operator(*args, **kwargs)


def _group_of(argument: object) -> object | None:
    distributed = torch.distributed
    if isinstance(argument, distributed.ProcessGroup):
        return argument
    if isinstance(argument, torch.ScriptObject):
        try:
            return cast("Any", distributed.ProcessGroup).unbox(argument)
        except RuntimeError:  # an object of another class, such as the kind of a reduction
            return None
    if isinstance(argument, str):
        try:
            resolve = private("_C._distributed_c10d._resolve_process_group", needed_for="seeing who communicates")
            return cast("object", resolve(argument))
        except (RuntimeError, ValueError):  # another string: what to sum up by
            return None
    return None


@cache
def _operators_of_groups() -> dict[str, list[str]]:
    """Return the names of the operators that are given a group, by their namespaces."""
    schemas: Iterable[Any] = private("_C._jit_get_all_schemas", needed_for="seeing who communicates")()
    found: dict[str, list[str]] = {}
    for schema in schemas:
        namespace, _, name = schema.name.partition("::")
        takes = any(one.name == "group_name" or "ProcessGroup" in str(one.type) for one in schema.arguments)
        if takes and namespace in _NAMESPACES and hasattr(getattr(torch.ops, namespace), name):
            found.setdefault(namespace, []).append(name)
    return found


class KeyValueStore(Protocol):
    """A store of torch.distributed."""

    timeout: timedelta

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def delete_key(self, key: str) -> bool: ...


def store_of_all() -> KeyValueStore:
    """Return the store by which all processes found each other, with a connection of its own if it can have one."""
    get = private("distributed.distributed_c10d._get_default_store", needed_for="planning in several processes")
    store = cast("KeyValueStore", get())
    try:
        return cast("Any", store).clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def finished(received: list[Tensor]) -> Any:
    """Return a call that is finished, with what it has received."""
    devices = {one.device for one in received if one.device.type != "cpu"}
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
    future.set_result(received)
    make = private("_C._distributed_c10d._create_work_from_future", needed_for="collectives that do not run again")
    return cast("Callable[[object], object]", make)(future)


def answer_of(operator: Any, argument: object, received: list[Tensor]) -> object:
    """Return what a collective returns that has received these tensors before, as the argument `argument`."""
    returns = [finished(received).boxed() if _is_work(one) else argument for one in operator._schema.returns]
    return returns[0] if len(returns) == 1 else tuple(returns) or None


# gloo reduces and copies for these in `wait`, so a watcher of operators would see some that are none of the caller's,
# and that do not run if what was received is kept.
_LATE = ("c10d._reduce_scatter_base_.default", "c10d.reduce_scatter_tensor_coalesced_.default")


def entry_of_collective(operator: Any) -> Callable[..., Any]:
    """Return the function that runs a collective, all of it at once."""
    return partial(_run_at_once, operator) if str(operator) in _LATE else operator._op


def _run_at_once(operator: Any, *args: Any, **kwargs: Any) -> object:
    result = operator._op(*args, **kwargs)
    received = list(plain_tensors_in(args[:1]))
    if any(one.device.type != "cpu" for one in received):
        return result
    wait_for(result)
    return answer_of(operator, args[0], received)


def gives_work(schema: Any) -> bool:
    """Return whether an operator is a collective whose caller may wait for it later."""
    return any(map(_is_work, schema.returns))


def _is_work(value: Any) -> bool:
    return str(value.type).endswith("c10d.Work")


def holds_work(objects: Iterable[object]) -> bool:
    """Return whether some objects are exchanges that somebody may still wait for."""
    return is_distributed() and any(isinstance(one, torch.distributed.Work) for one in objects)


def wait_for(result: object) -> None:
    """Wait until what a collective has returned is complete; its caller may wait once more."""
    if isinstance(result, Tensor):
        torch.ops._c10d_functional.wait_tensor(result)
    elif isinstance(result, torch.ScriptObject):
        torch.distributed.Work.unbox(result).wait()
    elif isinstance(result, tuple):
        wait_for(cast("tuple[object, ...]", result)[-1])  # after the tensors that it was given, the work
    elif isinstance(result, list):
        for one in cast("list[object]", result):
            wait_for(one)


def plain_tensors_in(args: Iterable[Any]) -> Generator[Tensor]:
    """Yield the tensors among the arguments of a collective, and in lists of them."""
    for one in args:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, list):
            yield from plain_tensors_in(cast("list[Any]", one))


def device_of(group: ProcessGroup) -> torch.device:
    """Return the kind of device whose tensors a group's collectives take."""
    backend = torch.distributed.get_backend(group)
    return torch.device({"nccl": "cuda", "xccl": "xpu"}.get(backend, "cpu"))
