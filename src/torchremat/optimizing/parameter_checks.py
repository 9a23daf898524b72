"""Models whose parameters cannot wait in a store, with the reasons."""

from __future__ import annotations

import torch
from torch import nn

from torchremat._compat.data_parallel import data_parallel_around
from torchremat._compat.dynamo import is_compiled
from torchremat._compat.sharding import is_managed
from torchremat.errors import UnsupportedError
from torchremat.measuring.communication import is_reduced_in_buckets
from torchremat.optimizing.module_runs import keeps_in_store


def check_around(module: nn.Module) -> None:
    """Raise if a module that begins to run was sharded, or put into DistributedDataParallel, after the offload."""
    around = data_parallel_around()
    if is_managed(module) or (around is not None and any(module is one for one in around.modules())):
        raise UnsupportedError(
            f"a {type(module).__name__} was put into {'fully_shard' if around is None else 'DistributedDataParallel'} "
            "after torchremat.offload_parameters, which cannot move what is sharded or reduced. Call `remove()` of the "
            "offload before."
        )


def check_in_memory(module: nn.Module) -> None:
    """Raise if parameters of a module wait in a store: they count in plans of whole models only."""
    if keeps_in_store(module):
        raise UnsupportedError(
            "parameters of this stage wait in a store (torchremat.offload_parameters), and plans of stages count all "
            "of them as in memory. Plan and apply first, and call it then; or call `remove()`."
        )


def check_model(model: nn.Module, given: list[nn.Module] | None) -> None:
    """Raise if the parameters of a model, or of some modules of it, cannot wait in a store.

    Raises:
        UnsupportedError: See `offload_parameters`.
    """
    every = list(model.modules())
    unknown = [type(one).__name__ for one in given or () if all(one is not other for other in every)]
    if unknown:
        raise UnsupportedError(f"offload_parameters(modules=...): a {unknown[0]} is no module of the model.")
    for one in every:
        if is_compiled(one) or isinstance(one, torch.jit.ScriptModule):
            raise UnsupportedError(
                f"offload_parameters: a {type(one).__name__} is compiled, and its code reads parameters without asking "
                "for them. Use the plain module."
            )
    if keeps_in_store(model):
        raise UnsupportedError("offload_parameters: parameters of this model are in a store already.")
    parameters = list(model.named_parameters())
    if is_reduced_in_buckets(one for _, one in parameters):
        raise UnsupportedError(
            "offload_parameters: a DistributedDataParallel has these parameters, and reads them in C++. FSDP2 keeps a "
            "shard of each in every process."
        )
    for name, one in parameters:
        if type(one) is not nn.Parameter:
            raise UnsupportedError(
                f"offload_parameters: {name} is a {type(one).__name__}, whose memory belongs to its class. Only plain "
                "parameters can wait in a store."
            )
