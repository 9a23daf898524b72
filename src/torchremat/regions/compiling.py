"""Regions in compiled functions: torch's own checkpoint operator takes the place of the region.

    where the call is traced                     result
    in a graph                                   `tag_activation_checkpoint`: the compiler recomputes
    in a graph, options it cannot honour         the graph breaks, and our own region runs
    the function breaks the graph                the same
    a module with a plan, or in one              UnsupportedError

NOTE [ Backends that run the graph ]
Inductor and the `aot_` backends make a backward graph that repeats the tagged operations, with the random numbers and
without the writes to buffers. Any other backend may run the graph as it was traced, and then torch's operator is its
eager checkpoint without the handling of random numbers. For these backends, a context restores the generators for the
recompute, and another context refuses writes to tensors from before the region: they would be written twice.

Missing on purpose: runs of sibling calls and budgets in a graph. The compiler has its own heuristic
(`torch._functorch.config.activation_memory_budget`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchremat._compat.accelerators import devices_in_use
from torchremat._compat.dynamo import only_in_graphs, uses_partitioner
from torchremat._compat.modes import Args, DispatchMode, Kwargs, is_traced_with_fakes
from torchremat.ambient.generators import generator_states, restore
from torchremat.errors import UnsupportedError
from torchremat.regions.selective.op_info import STATISTICS, op_info_of
from torchremat.regions.settings import Settings
from torchremat.tensors.structure import tensors_in

R = TypeVar("R")


@only_in_graphs
def call_in_graph(
    function: Callable[..., R],
    settings: Settings,
    eager: Callable[[tuple[object, ...], dict[str, object]], R],
    args: Args,
    kwargs: dict[str, object],
) -> R:
    """Return `function(*args, **kwargs)` as a checkpoint of the traced graph, or the result of `eager`.

    Args:
        function: The code to recompute.
        settings: Options; those that torch's operator cannot honour are left to `eager`.
        eager: Runs it as our own region and is kept out of graphs.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    if torch.compiler.is_dynamo_compiling():
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if (
            settings.preserve_rng
            and settings.early_stop
            and not settings.debug
            and settings.observer is None
            and settings.policy is None
            and not settings.guard
            and settings.check in ("metadata", "none")
        ):

            def body(*args: object) -> R:
                return function(*args, **kwargs)

            # By the name in torch's module: dynamo takes whatever it finds there, ours included, for torch's operator.
            check = "default" if settings.check == "metadata" else "none"
            if uses_partitioner():
                return cast("R", torch_checkpoint.checkpoint(body, *args, use_reentrant=False, determinism_check=check))
            # See NOTE [ Backends that run the graph ]
            return cast(
                "R",
                torch_checkpoint.checkpoint(
                    body, *args, use_reentrant=False, determinism_check=check, context_fn=_contexts_of_graph
                ),
            )
    return eager(args, kwargs)


def _contexts_of_graph() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
    if is_traced_with_fakes():
        return create_selective_checkpoint_contexts(_recompute_all)
    return _RefusesWrites(), _DrawsAgain()


def _recompute_all(*_: object, **__: object) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class _DrawsAgain(AbstractContextManager[None]):
    """Restores the generators for a recompute."""

    def __init__(self) -> None:
        self.states = generator_states(devices_in_use())
        self.stack = ExitStack()

    def __enter__(self) -> None:
        restore(self.states, self.stack)

    def __exit__(self, *_: object) -> None:
        self.stack.close()


class _RefusesWrites(DispatchMode):
    """Refuses operations that write to a tensor from before the region."""

    def __init__(self) -> None:
        super().__init__()
        self.made: WeakSet[object] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        """Run an operation."""
        for tensor in _written(func, args, kwargs or {}):
            if tensor.untyped_storage() not in self.made:
                raise UnsupportedError(
                    f"a region in a compiled function writes to a tensor that was there before ({func}; a buffer?), "
                    "and this backend may run the region twice. Compile with backend='inductor' or 'aot_eager', or "
                    "call the region outside of the compiled function."
                )
        output = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in tensors_in((args, kwargs or {}))}
        for one in tensors_in(output):
            if id(one.untyped_storage()) not in given:
                self.made.add(one.untyped_storage())
        return output


def _written(func: Any, args: Args, kwargs: Mapping[str, object]) -> list[Tensor]:
    given = {**{one.name: value for one, value in zip(func._schema.arguments, args, strict=False)}, **kwargs}
    trains = any(given.get(name) for name in ("training", "train", "use_input_stats"))
    names = [name for _, name in op_info_of(func).writes if trains or name not in STATISTICS]
    return tensors_in([given.get(name) for name in names])
