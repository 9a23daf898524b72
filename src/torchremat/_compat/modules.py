"""The class of batch norms, state that torch keeps about modules outside of them, a dict for notes about modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.nn.utils import parametrize

from torchremat._compat.binding import private

if TYPE_CHECKING:
    from weakref import WeakKeyDictionary as WeakIdentityDict

    import torch
    from torch import Tensor

    class AnyBatchNorm(nn.Module):
        """Torch's `_BatchNorm`."""

        num_features: int
        eps: float
        momentum: float | None
        weight: nn.Parameter | None
        bias: nn.Parameter | None

        def __init__(
            self,
            num_features: int,
            eps: float,
            momentum: float | None,
            affine: bool,
            track_running_stats: bool,
            device: torch.device | str | None,
            dtype: torch.dtype | None,
        ) -> None: ...
        def forward(self, input: Tensor) -> Tensor: ...
        def reset_running_stats(self) -> None: ...

else:
    AnyBatchNorm = private("nn.modules.batchnorm._BatchNorm", needed_for="DeferredBatchNorm")
    # A module may have an `==` of its own, which compares its parameters. A dict with plain keys compares by identity
    # first, and one with weak keys does not.
    WeakIdentityDict = private("utils.weak.WeakIdKeyDictionary", needed_for="keeping notes about modules")


_NAMES = (
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_with_kwargs",
    "_global_forward_hooks_always_called", "_global_backward_hooks", "_global_backward_pre_hooks",
)  # fmt: skip

# The tables of the hooks that every module has.
hooks_of_all_modules = [
    cast("dict[Any, Any]", private(f"nn.modules.module.{name}", needed_for="hooks of all modules in regions"))
    for name in _NAMES
]

# Where `torch.nn.utils.parametrize.cached` keeps its computed weights, and whether it does.
cached_weights = parametrize.__dict__, ("_cache", "_cache_enabled")


__all__ = ["AnyBatchNorm", "WeakIdentityDict", "cached_weights", "hooks_of_all_modules"]
