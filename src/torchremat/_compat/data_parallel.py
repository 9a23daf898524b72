"""Private state of DistributedDataParallel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeGuard, cast

from torch import nn

from torchremat._compat.binding import private
from torchremat._compat.collectives import ranks_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# NOTE [ What a reducer keeps ]
#
# The reducer is in C++, and knows from one step to the next
#
#     the buckets      made anew, in the order in which the first backward has made gradients, by the second forward.
#                      Among more than two processes the place in a bucket decides in which order gloo and NCCL sum
#     who was used     with `find_unused_parameters`: the parameters with gradients of backwards under `no_sync()`,
#                      until the next one that reduces; without, it would not reduce these
#     the first graph  with `static_graph`
#
# None of it can be read or written. `_reset_state`, which torch has for other process groups, forgets all of it but the
# graph, and a backward that has failed. So after a run that is undone a reducer of more than two processes that had
# nothing to remember forgets; one with new buckets keeps them; and what it would forget in any case is refused.

_OPTIMIZERS_IN_HOOKS = ("optimizer_overlap_hooks", "ddp_zero_hook")


class _JoinConfig(Protocol):
    enable: bool


class _Reducer(Protocol):
    def _rebuild_buckets(self) -> bool: ...
    def _reset_state(self) -> None: ...


class DataParallel(Protocol):
    """A DistributedDataParallel."""

    reducer: _Reducer
    process_group: ProcessGroup
    gradient_as_bucket_view: bool
    find_unused_parameters: bool
    static_graph: bool
    require_forward_param_sync: bool
    _comm_hooks: list[tuple[object, object]]
    _has_rebuilt_buckets: bool
    _join_config: _JoinConfig

    def parameters(self) -> Iterable[nn.Parameter]: ...
    def _get_ddp_logging_data(self) -> dict[str, object]: ...


def is_data_parallel(module: object) -> TypeGuard[DataParallel]:
    """Return whether a module is a DistributedDataParallel."""
    found = sys.modules.get("torch.nn.parallel.distributed")
    return found is not None and isinstance(module, found.DistributedDataParallel)


def data_parallel_around() -> nn.Module | None:
    """Return the DistributedDataParallel whose forward is running, None if none is."""
    found = sys.modules.get("torch.nn.parallel.distributed")
    if found is None:
        return None
    active = private("nn.parallel.distributed.DistributedDataParallel._active_ddp_module", needed_for="checking plans")
    return cast("nn.Module | None", active)  # a variable, so read now


def awaits_static_graph(module: DataParallel) -> bool:
    """Return whether it learns a static graph in its next backward."""
    return not getattr(module, "_static_graph_delay_allreduce_enqueued", True)


def awaits_reduction(module: DataParallel) -> bool:
    """Return whether its last backward was under `no_sync()`, and it has to know which parameters that has used."""
    return module.find_unused_parameters and not module.require_forward_param_sync


def awaits_buckets(module: DataParallel) -> bool:
    """Return whether the forward after its next backward makes its buckets anew."""
    return not module._has_rebuilt_buckets and not module.find_unused_parameters


def is_joined(module: DataParallel) -> bool:
    """Return whether it is in a `with Join(...)`."""
    return module._join_config.enable


def hooks_of(module: DataParallel) -> list[tuple[object, object]]:
    """Return its communication hooks, each with its state."""
    return module._comm_hooks


def optimizer_in_backward(module: DataParallel) -> str | None:
    """Return the name of what steps optimizers of torch in its backward, None if nothing does."""
    for hook, _ in hooks_of(module):
        inner = cast("Callable[..., object]", hook.func if isinstance(hook, functools.partial) else hook)
        if inner.__module__.endswith(_OPTIMIZERS_IN_HOOKS):
            return f"its communication hook `{inner.__name__}`"
    own = any(hasattr(one, "_in_backward_optimizers") for one in module.parameters())
    return "`_apply_optimizer_in_backward`" if own else None


def forgetting(modules: Iterable[nn.Module]) -> list[Callable[[], None]]:
    """Return what makes reducers that have nothing to remember forget a run. See NOTE [ What a reducer keeps ]."""
    found: list[Callable[[], None]] = []
    for module in filter(is_data_parallel, modules):
        if len(ranks_of(module.process_group)) <= 2:
            continue  # a sum of two is the same in any order
        # What the next forward would do. New buckets of a process that had no more inputs are not noted in Python.
        if not module._has_rebuilt_buckets and module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        has_joined = "join_uneven_inputs" in module._get_ddp_logging_data()
        if not (module._has_rebuilt_buckets or module.static_graph or has_joined):
            found.append(module.reducer._reset_state)
    return found
