"""Memory of data parallelism on a device, in addition to parameters and gradients.

DistributedDataParallel    buckets, as large as all gradients; none if the gradients are views of them
FSDP2 (`fully_shard`)      gathered parameters, gradients on their way to being reduced, and copies of both. On the
                           CPU a profiled step shows them, see NOTE [ Who frees what gloo has worked on ]. On other
                           devices it is not known when sent gradients are freed: while one sharded module runs, the
                           largest one's may be live on top of the profiled step
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable

import torch
from torch import nn

from torchremat._compat.sharding import awaits_static_graph, is_sharded
from torchremat.errors import UnsupportedError
from torchremat.tensors.metadata import covers


def communication_bytes(modules: Iterable[nn.Module], device: torch.device) -> int:
    """Return the bytes of DistributedDataParallel's buckets, which exist before a step.

    Args:
        modules: All modules, each once.
        device: One without an index stands for all of its type.
    """
    return sum(
        _trained_bytes(module.parameters(), device)
        for module in modules
        if is_data_parallel(module) and not module.gradient_as_bucket_view
    )


def reduced_bytes(model: nn.Module, device: torch.device) -> int:
    """Return an upper bound on the bytes of FSDP2's gradients that a profile does not show."""
    if device.type == "cpu":
        return 0
    found = (_trained_bytes(_own(module), device) for module in model.modules() if is_sharded(module))
    return max(found, default=0)


def is_data_parallel(module: nn.Module) -> bool:
    """Return whether a module is a DistributedDataParallel."""
    found = sys.modules.get("torch.nn.parallel.distributed")
    return found is not None and isinstance(module, found.DistributedDataParallel)


def is_reduced_in_buckets(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a DistributedDataParallel, wherever it is, has one of these parameters."""
    return bool(_data_parallels_of(parameters))


def check_static_graphs(models: Iterable[nn.Module]) -> None:
    """Raise if a backward that is run to plan or to measure would be taken for the first one of the training.

    DistributedDataParallel counts the gradients of its first backward if the graph is static, also of one that begins
    in the module inside. After another backward it waits for them in vain, and reduces nothing.

    Raises:
        UnsupportedError: A DistributedDataParallel with a static graph has the parameters, and no backward has run.
    """
    if any(map(awaits_static_graph, _data_parallels_of(one for model in models for one in model.parameters()))):
        raise UnsupportedError(
            "DistributedDataParallel(static_graph=True) learns the graph in its first backward, and would take the one "
            "that is run here for it, and reduce no gradients later. Plan or measure after the first training step, or "
            "the model before it is put into it."
        )


def _data_parallels_of(parameters: Iterable[torch.Tensor]) -> list[nn.Module]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    own = set(map(id, parameters))
    # An instance refers to its class. The module inside of one does not know it.
    instances = (one for one in gc.get_referrers(nn.parallel.DistributedDataParallel) if isinstance(one, nn.Module))
    found = [one for one in instances if is_data_parallel(one)]
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
