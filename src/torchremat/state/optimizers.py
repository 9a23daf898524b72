"""Optimizers that write parameters without a new version.

NOTE [ Optimizers that bump no version ]
A region detects by the version that a parameter was written since the forward. The fused kernels of optimizers move no
version, and the foreach kernels, which are the default on CUDA, move neither the version of a DTensor nor that of its
part. So from the first region with parameters on, a hook after every optimizer's step moves the versions. Plain
autograd, which would otherwise use the new values silently, rejects them from then on as well.
"""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchremat._compat.graphs import outside_graphs
from torchremat._compat.sharding import is_dtensor


@functools.cache
def listen_to_optimizers() -> None:
    """Let every optimizer's step, from now on, move the versions of the parameters that it writes."""
    register_optimizer_step_post_hook(_stepped)  # See NOTE [ Optimizers that bump no version ]


@outside_graphs
def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    written = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and (group.get("fused") or is_dtensor(parameter))
    ]
    torch.autograd.graph.increment_version(written)
