"""What is known of a stored tensor, and how it is made anew."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchremat.errors import MutationError
from torchremat.tensors.held import version_of
from torchremat.tensors.sizes import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a store has to know to give a tensor back, beside its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    size_bytes: int

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return fresh memory for it, on its own device or another."""
        return torch.empty(self.shape, dtype=self.dtype, device=self.device if device is None else device)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"a tensor of shape {tuple(self.shape)}, {dtype}, {format_bytes(self.size_bytes)}, from {self.device}"


def content_of(tensor: Tensor) -> Content:
    """Return what there is to know of a tensor."""
    return Content(shape=tensor.shape, dtype=tensor.dtype, device=tensor.device, size_bytes=tensor.nbytes)


def written_since(tensor: Tensor, *, version: int, now: int) -> MutationError:
    """Return the error for a tensor that was written in place after it was saved: autograd's own words.

    Args:
        tensor: The tensor, or an alias of it.
        version: The version at which it was saved.
        now: The version that it has now.
    """
    return MutationError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {now}; expected version {version} instead. Hint: enable "
        "anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True, check_nan=False)."
    )


def check_version(tensor: Tensor, version: int) -> None:
    """Raise if a tensor was written in place since it had a version.

    Raises:
        MutationError: It was.
    """
    now = version_of(tensor)
    if now != version:
        raise written_since(tensor, version=version, now=now)
