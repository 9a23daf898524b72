"""Torch's knowledge of subclasses that wrap other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import Tensor

from torchremat._compat.binding import private

is_wrapper_subclass = cast(
    "Callable[[Tensor], bool]",
    private("utils._python_dispatch.is_traceable_wrapper_subclass", needed_for="counting the bytes of tensors"),
)

no_torch_function = cast(
    "Any", private("_C._disabled_torch_function_impl", needed_for="releasing gradients in the backward")
)

T = TypeVar("T", bound=Tensor)


def shell_of(kind: type[T], tensor: Tensor) -> T:
    """Return a tensor of a class that looks like another one and has no memory."""
    make = cast("Callable[..., T]", private("Tensor._make_wrapper_subclass", needed_for="releasing gradients"))
    return make(kind, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device)
