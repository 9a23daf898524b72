"""Torch's knowledge of subclasses that wrap other tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor

from torchremat._compat.binding import private

is_wrapper_subclass = cast(
    "Callable[[Tensor], bool]",
    private("utils._python_dispatch.is_traceable_wrapper_subclass", needed_for="counting the bytes of tensors"),
)
