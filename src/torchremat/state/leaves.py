"""The version, the flag and the hooks of tensors; parameters that FSDP2 has sharded, and writes of optimizers.

See NOTE [ What FSDP2 does to a parameter ] in `_compat`. A region may lie inside the hooks of a sharded module (`wrap`)
or around them (`checkpoint(block, x)`). Inside, the recompute finds the parameter gathered by the hook on the gradient;
around, it may also run the hooks that gather it.

    state                       between forward and recompute             the recompute
    sharded parameter           written in place, or replaced             raises MutationError if it reads it
    gathered parameter          freed, inside the hooks                   raises UnsupportedError

Missing on purpose: FSDP1, whose flat parameters are written under the names of their views.

NOTE [ Optimizers that bump no version ]
A region detects by the version that a parameter was written since the forward. The fused kernels of optimizers move no
version, and the foreach kernels, which are the default on CUDA, move neither the version of a DTensor nor that of its
part. So from the first region with parameters on, a hook after every optimizer's step moves the versions. Plain
autograd, which would otherwise use the new values silently, rejects them from then on as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from torchremat._compat.dynamo import outside_graphs
from torchremat._compat.modules import WeakIdentityDict
from torchremat._compat.sharding import Shard, all_shards, is_dtensor
from torchremat.errors import UnsupportedError
from torchremat.state.containers import Dict
from torchremat.state.optimizer_steps import after_each_step
from torchremat.tensors.versioned import Versioned

flags_of = cast("Callable[[Tensor], tuple[int, bool]]", attrgetter("_version", "requires_grad"))
_hooks = cast("Callable[[Tensor], tuple[Any, Any]]", attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"))
_NO_HOOKS = (None, None)


def copied_hooks(tensors: list[Tensor]) -> list[tuple[Dict | None, Dict | None]] | None:
    """Return copies of the hooks of tensors, which a recompute must not add to; None if they have none."""
    found = [*map(_hooks, tensors)]
    if found.count(_NO_HOOKS) == len(found):
        return None
    return [
        (None if before is None else dict(before), None if after is None else dict(after)) for before, after in found
    ]


def put_hooks_back(tensors: list[Tensor], hooks: list[tuple[Dict | None, Dict | None]] | None) -> None:
    """Restore the hooks of tensors from the result of `copied_hooks`."""
    found = [*map(_hooks, tensors)]
    if hooks is None and all(one == _NO_HOOKS for one in found):
        return
    for now, had in zip(found, hooks or [_NO_HOOKS] * len(found), strict=True):
        for own, before in zip(now, had, strict=True):
            if own is not None and own != (before or {}):
                own.clear()
                own.update(before or {})


# By module and name. The module alone keeps alive the objects reached through a shard.
_shards: WeakIdentityDict[nn.Module, dict[str, Shard]] = WeakIdentityDict()


class WatchedShard(NamedTuple):
    """A sharded parameter as a forward saw it.

    Attributes:
        module: A module that uses it.
        name: Its name there.
        shard: Leads to the parameter as it is now.
        sharded: The parameter that the optimizer writes.
        local: This process's part of it, which may be written on its own.
        gathered: The gathered parameter, if the forward ran inside the hooks.
    """

    module: nn.Module
    name: str
    shard: Shard
    sharded: Versioned
    local: Versioned | None
    gathered: Tensor | None

    def version_now(self) -> int | None:
        """Return the parameter's current version if it was written or replaced since, else None."""
        sharded, local = self.shard.sharded, self.local
        if sharded is None or sharded is not self.sharded.tensor:
            return 0 if sharded is None else sharded._version
        if self.sharded.is_written:
            return self.sharded.now
        # FSDP replaces the part by a padded one, which does not change its values.
        if local is not None and local.tensor is self.shard.local and local.is_written:
            return self.sharded.version + local.now - local.version
        return None

    def read_as(self) -> list[Tensor]:
        """Return the tensors that an operator receives when it reads the parameter."""
        found = (self.sharded.tensor, self.shard.sharded, self.shard.local, self.shard.whole, self.gathered)
        return [one for one in found if one is not None]

    def check_gathered(self) -> None:
        """Raise an UnsupportedError if the forward saw the gathered parameter and a recompute would not."""
        if self.gathered is not None and self.module._parameters.get(self.name) is not self.gathered:
            raise UnsupportedError(
                f"the parameter `{self.shard.name or self.name}` is sharded now, by FSDP, and the forward saw it whole."
                " A region inside the forward of a sharded module can be recomputed when the gradient of that module's "
                "output has arrived, and not ahead of it. Make the region around the sharded module's call instead, "
                "`checkpoint(block, x)`, or call the sharded module's `unshard()` before."
            )


def watch(module: nn.Module) -> list[WatchedShard]:
    """Return the sharded parameters that a managed module has of its own, as they are now."""
    shards = _shards.get(module)
    if shards is None:
        shards = _find(module)
    watched: list[WatchedShard] = []
    for name, shard in shards.items():
        sharded, local = shard.sharded, shard.local
        if sharded is None:
            continue
        seen = module._parameters.get(name)
        gathered = seen if seen is not sharded and shard.is_in_forward else None
        part = None if local is None else Versioned(local)
        watched.append(WatchedShard(module, name, shard, Versioned(sharded), part, gathered))
    return watched


def _find(wanted: nn.Module) -> dict[str, Shard]:
    for module, name, shard in all_shards():
        _shards.setdefault(module, {})[name] = shard
    return _shards.setdefault(wanted, {})


@functools.cache
def listen_to_optimizers() -> None:
    """Let every optimizer's step, from now on, move the versions of the parameters that it writes."""
    after_each_step(_stepped)  # See NOTE [ Optimizers that bump no version ]


@outside_graphs
def _stepped(optimizer: torch.optim.Optimizer) -> None:
    written = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and (group.get("fused") or is_dtensor(parameter))
    ]
    torch.autograd.graph.increment_version(written)
