"""The common class of torch's batch norms, which has no public name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torchremat._compat.binding import private

if TYPE_CHECKING:
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
