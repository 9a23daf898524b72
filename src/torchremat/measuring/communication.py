"""Which processes models share, and the memory of data parallelism in addition to parameters and gradients.

DistributedDataParallel    buckets, as large as all gradients; gradients that are views of them count as gradients
FSDP2 (`fully_shard`)      gathered parameters, gradients on their way to being reduced, and copies of both. On the
                           CPU a profiled step shows them, see NOTE [ Who frees what gloo has worked on ]. On other
                           devices it is not known when sent gradients are freed: while one sharded module runs, the
                           largest one's may be live on top of the profiled step
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchremat._compat.collectives import Ranks, is_distributed, ranks_of
from torchremat._compat.data_parallel import (
    DataParallel,
    awaits_buckets,
    awaits_reduction,
    awaits_static_graph,
    hooks_of,
    is_data_parallel,
    is_joined,
    optimizer_in_backward,
)
from torchremat._compat.sharding import communicators, is_dtensor, is_sharded
from torchremat.errors import UnsupportedError
from torchremat.tensors.metadata import covers


def known_groups(models: Iterable[nn.Module], inputs: Iterable[Tensor]) -> set[Ranks]:
    """Return the groups of processes that a step communicates in, as far as they are known without running it.

    These are the group of each DistributedDataParallel, and the meshes of tensors that are DTensors.

    Args:
        models: The models of the step.
        inputs: Its other tensors.
    """
    if not is_distributed():
        return set()
    tensors, groups = list(inputs), list[Any]()
    for module in {one: None for model in models for one in model.modules()}:
        tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if is_data_parallel(module):
            groups.append(module.process_group)
    meshes = {cast("Any", one).device_mesh for one in tensors if is_dtensor(one)}
    groups += [group for mesh in meshes for group in mesh.get_all_groups()]
    return {ranks_of(group) for group in groups}


def communication_bytes(modules: Iterable[nn.Module], device: torch.device) -> int:
    """Return the bytes of DistributedDataParallel's buckets, which exist before a step.

    Args:
        modules: All modules, each once.
        device: One without an index stands for all of its type.
    """
    return sum(
        _trained_bytes(
            (one for one in module.parameters() if not module.gradient_as_bucket_view or one.grad is None), device
        )
        for module in modules
        if is_data_parallel(module)
    )


def bucket_views(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of parameters whose gradients are views of DistributedDataParallel's buckets."""
    viewing = (one for one in modules if is_data_parallel(one) and one.gradient_as_bucket_view)
    return {id(parameter) for module in viewing for parameter in module.parameters()}


def reduced_bytes(model: nn.Module, device: torch.device) -> int:
    """Return an upper bound on the bytes of FSDP2's gradients that a profile does not show."""
    if device.type == "cpu":
        return 0
    found = (_trained_bytes(_own(module), device) for module in model.modules() if is_sharded(module))
    return max(found, default=0)


def is_reduced_in_buckets(parameters: Iterable[Tensor]) -> bool:
    """Return whether a DistributedDataParallel, wherever it is, has one of these parameters."""
    return bool(_data_parallels_of(parameters))


def communication_hooks(models: Iterable[nn.Module]) -> list[object]:
    """Return what reduces gradients of models in a backward, with its state: hooks and other objects of the user's."""
    if not is_distributed():
        return []
    modules = [*{one: None for model in models for one in model.modules()}]
    return [*chain.from_iterable(map(hooks_of, filter(is_data_parallel, modules))), *communicators(modules)]


def has_first_buckets(models: Iterable[nn.Module]) -> bool:
    """Return whether a hook reduces gradients in buckets that are made anew after the next step, of other sizes."""
    if not is_distributed():
        return False
    found = filter(is_data_parallel, chain.from_iterable(model.modules() for model in models))
    return any(awaits_buckets(one) and hooks_of(one) for one in found)


def check_reductions(models: Iterable[nn.Module]) -> None:
    """Raise if a backward that is run to plan or to measure would change how a DistributedDataParallel trains later.

    One with a static graph counts the gradients of its first backward, also of one that begins in the module inside.
    After another backward it waits for them in vain, and reduces nothing. See NOTE [ What a reducer keeps ].

    Raises:
        UnsupportedError: It would, or optimizers step in it.
    """
    models = list(models)
    reducing = _data_parallels_of(one for model in models for one in model.parameters())
    if any(map(awaits_static_graph, reducing)):
        raise UnsupportedError(
            "DistributedDataParallel(static_graph=True) learns the graph in its first backward, and would take the one "
            "that is run here for it, and reduce no gradients later. Plan or measure after the first training step, or "
            "the model before it is put into it."
        )
    if any(map(awaits_reduction, reducing)):
        raise UnsupportedError(
            "DistributedDataParallel(find_unused_parameters=True) has run a backward under `no_sync()`, and has noted "
            "whose gradients are to be reduced later. The backward that is run here would end these notes, and not all "
            "would be reduced. Plan or measure after the backward that reduces, or before the first one that does not."
        )
    run = [one for model in models for one in model.modules() if is_data_parallel(one)] if is_distributed() else []
    trains = [name for one in run if (name := optimizer_in_backward(one)) is not None]
    if trains:
        raise UnsupportedError(
            f"DistributedDataParallel trains in its backward, by {trains[0]}. To plan or to measure it, a step is run "
            "several times, and each would train. Plan or measure the model before it is put into it."
        )
    if any(map(is_joined, run)):
        raise UnsupportedError(
            "DistributedDataParallel is in a `with Join(...)`, where a process without further inputs takes part in "
            "the reductions of the others, also in those of the runs that plan or measure, and would not undo them. "
            "Plan or measure before the block."
        )


def _data_parallels_of(parameters: Iterable[torch.Tensor]) -> list[DataParallel]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    own = set(map(id, parameters))
    # An instance refers to its class. The module inside of one does not know it.
    found = filter(is_data_parallel, gc.get_referrers(nn.parallel.DistributedDataParallel))
    return [module for module in found if any(id(one) in own for one in module.parameters())]


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    """Return a sharded module's parameters without the ones that sharded modules inside it own."""
    others = {
        id(one) for inner in module.modules() if inner is not module and is_sharded(inner) for one in inner.parameters()
    }
    return [one for one in module.parameters() if id(one) not in others]


def _trained_bytes(parameters: Iterable[nn.Parameter], device: torch.device) -> int:
    # A sharded parameter reports the size of the whole.
    return sum(
        one.numel() * one.element_size() for one in parameters if one.requires_grad and covers(device, one.device)
    )
