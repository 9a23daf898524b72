"""Settings that decide by which kernel a number is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import torch

from torchremat._compat.binding import private

_AMBIENT = "restoring what surrounds a recompute"


class _GlobalState(Protocol):
    def check(self) -> bool: ...


# Autocast, default dtype, determinism and more, as they are in the thread that makes it; `check()` tells whether they
# still are, at a tenth of the price of asking for each.
GlobalState = cast("type[_GlobalState]", private("_C._dynamo.guards.GlobalStateGuard", needed_for=_AMBIENT))


class NumericFlag(NamedTuple):
    """A setting of the whole process, or of a thread, that decides by which kernel a number is computed."""

    read: Callable[[], object]
    write: Callable[[Any], None]


def _flag(name: str, setter: str | None = None) -> NumericFlag:
    getter = cast("Callable[[], object]", private(f"_C._get_{name}", needed_for=_AMBIENT))
    return NumericFlag(getter, cast("Callable[[Any], None]", private(f"_C._set_{setter or name}", needed_for=_AMBIENT)))


def _precision(backend: str, operation: str) -> NumericFlag:
    getter = cast("Callable[[str, str], object]", private("_C._get_fp32_precision_getter", needed_for=_AMBIENT))
    setter = cast("Callable[[str, str, Any], None]", private("_C._set_fp32_precision_setter", needed_for=_AMBIENT))
    return NumericFlag(partial(getter, backend, operation), partial(setter, backend, operation))


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value)


_BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)
_CUDA_FLAGS = (
    ("cudnn_enabled", None),
    ("cudnn_benchmark", None),
    ("cudnn_deterministic", None),
    ("cublas_allow_fp16_reduced_precision_reduction", None),
    ("cublas_allow_bf16_reduced_precision_reduction", None),
    ("cublas_allow_fp16_accumulation", None),
    ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    ("cudnn_sdp_enabled", "sdp_use_cudnn"),
    ("sdp_priority_order", None),
)

# Those that `GlobalState` knows of.
known_flags = (
    NumericFlag(torch.get_default_dtype, torch.set_default_dtype),
    NumericFlag(torch.are_deterministic_algorithms_enabled, _set_deterministic),
    NumericFlag(torch.is_deterministic_algorithms_warn_only_enabled, _set_warn_only),
)
# The others that this build of torch can make use of.
other_flags = (
    _flag("deterministic_fill_uninitialized_memory"),
    _flag("mkldnn_enabled"),
    _flag("mkldnn_deterministic"),
    _flag("flash_sdp_enabled", "sdp_use_flash"),
    _flag("math_sdp_enabled", "sdp_use_math"),
    _flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
    *(_precision(backend, operation) for backend in _BACKENDS for operation in ("matmul", "conv", "rnn")),
    *(_flag(name, setter) for name, setter in (_CUDA_FLAGS if torch.backends.cuda.is_built() else ())),
)
