"""Settings that decide which kernel computes a number."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol, cast

import torch

from torchremat._compat.binding import private

_bind = partial(private, needed_for="restoring what surrounds a recompute")

# torch calls products of cuBLAS deterministic with one of two values of this variable, which it reads at each product.
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


class _GlobalState(Protocol):
    def check(self) -> bool: ...


# Autocast, default dtype, determinism and more, in the thread that makes it; `check()` tells whether they are
# unchanged, at a tenth of the price of reading each.
GlobalState: type[_GlobalState] = _bind("_C._dynamo.guards.GlobalStateGuard")


class NumericFlag(NamedTuple):
    """A setting of the whole process, or of a thread, that decides which kernel computes a number."""

    read: Callable[[], object]
    write: Callable[[Any], None]


def _flag(name: str, setter: str | None = None) -> NumericFlag:
    getter: Callable[[], object] = _bind(f"_C._get_{name}")
    write: Callable[..., None] = _bind(f"_C._set_{setter or name}")

    def spread(value: object) -> None:
        # Two values are one flag for torch if the second qualifies the first: whether sums may be split.
        _ = write(*value) if isinstance(value, tuple) else write(value)

    return NumericFlag(getter, spread)


_get_precision: Callable[[str, str], str] = _bind("_C._get_fp32_precision_getter")
_set_precision: Callable[[str, str, str], None] = _bind("_C._set_fp32_precision_setter")


def _set_deterministic(value: bool) -> None:
    torch.use_deterministic_algorithms(value, warn_only=torch.is_deterministic_algorithms_warn_only_enabled())


def _set_warn_only(value: bool) -> None:
    torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled(), warn_only=value)


_BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)
# Programs set these whether or not a device exists.
_SET_ANYWHERE = (("cudnn_enabled", None), ("cudnn_benchmark", None), ("cudnn_deterministic", None))
_CUDA_FLAGS = (
    *_SET_ANYWHERE,
    ("cublas_allow_fp16_reduced_precision_reduction", None),
    ("cublas_allow_bf16_reduced_precision_reduction", None),
    ("cublas_allow_fp16_accumulation", None),
    ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    ("cudnn_sdp_enabled", "sdp_use_cudnn"),
    ("sdp_priority_order", None),
)

# The flags that `GlobalState` covers.
known_flags = (
    NumericFlag(torch.get_default_dtype, torch.set_default_dtype),
    NumericFlag(torch.are_deterministic_algorithms_enabled, _set_deterministic),
    NumericFlag(torch.is_deterministic_algorithms_warn_only_enabled, _set_warn_only),
    _flag("torch_function_state"),
)


# The reads below are functions of C: all flags are read around each forward and each recompute.


def _name(space: dict[str, Any], name: str) -> NumericFlag:
    def write(value: object) -> None:
        if value is None:
            space.pop(name, None)
        else:
            space[name] = value

    return NumericFlag(partial(space.get, name), write)


def _flush_denormals(product: float) -> None:
    torch.set_flush_denormal(product == 0.0)


# torch cannot be asked for it: a denormal number on the way makes this product 0. To compare one would flush it too.
_DENORMAL = NumericFlag(partial(prod, (1e-160, 1e-160, 1e160)), _flush_denormals)
_FAST_PATH = NumericFlag(
    partial(cast("dict[str, Any]", vars(torch.backends.mha)).get, "_is_fastpath_enabled"),
    torch.backends.mha.set_fastpath_enabled,
)
# The order in which a product of three tensors and more is computed. An assignment binds the name in the module that
# users see; until then the name has the value in the one beneath.
_EINSUM = tuple(
    _name(vars(module), name)
    for module in (torch.backends.opt_einsum, _bind("backends.opt_einsum.m"))
    for name in ("enabled", "strategy")
)
# The other flags that this build of torch supports.
other_flags = (
    _DENORMAL,
    _FAST_PATH,
    *_EINSUM,
    _flag("nnpack_enabled"),
    _flag("deterministic_fill_uninitialized_memory"),
    _flag("mkldnn_enabled"),
    _flag("mkldnn_deterministic"),
    _flag("flash_sdp_enabled", "sdp_use_flash"),
    _flag("math_sdp_enabled", "sdp_use_math"),
    _flag("overrideable_sdp_enabled", "sdp_use_overrideable"),
    _flag("math_sdp_allow_fp16_bf16_reduction"),
    *(_flag(name, setter) for name, setter in (_CUDA_FLAGS if torch.backends.cuda.is_built() else _SET_ANYWHERE)),
)


# NOTE [ Precisions that are inherited ]
# An operation of a backend whose precision is "none" has the precision of its backend, which in turn has that of all
# backends, and a read returns this inherited value. Writing back the value that was read pins the operation to it, so
# that a later setting of the backend has no effect on it. So parents are written first, and an operation only if it has
# not followed. The old way to set it (`set_float32_matmul_precision`) sets operations as well as a separate word, and
# torch raises where that word and they disagree; so it comes before all of them.
_PARENTS = (("generic", "all"), *((backend, "all") for backend in _BACKENDS))
_OPERATIONS = tuple((backend, operation) for backend in _BACKENDS for operation in ("matmul", "conv", "rnn"))


# The reads of each operation, for code that only checks whether they are unchanged.
precision_reads = tuple(partial(_get_precision, *one) for one in _OPERATIONS)


class Precisions:
    """The precision of float32 matrix multiplication, as it is now."""

    __slots__ = ("_old", "_operations", "_parents")

    def __init__(self) -> None:
        self._operations = [_get_precision(*one) for one in _OPERATIONS]
        self._parents = [_get_precision(*one) for one in _PARENTS]
        self._old = _old_precision()

    def are_here(self) -> bool:
        """Return whether the precisions are unchanged."""
        return [_get_precision(*one) for one in _OPERATIONS] == self._operations

    def are_those_of(self, other: Precisions) -> bool:
        """Return whether both are the same for each operation."""
        return self._operations == other._operations

    def write(self) -> None:
        """Restore the precisions."""
        # See NOTE [ Precisions that are inherited ]
        if self._old is not None and self._old != _old_precision():
            torch.set_float32_matmul_precision(self._old)
        wanted = (*zip(_PARENTS, self._parents, strict=True), *zip(_OPERATIONS, self._operations, strict=True))
        for (backend, operation), value in wanted:
            for candidate in ("none", value):
                if _get_precision(backend, operation) != value:
                    _set_precision(backend, operation, candidate)


def _old_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set in the new way, for which no word of the old way exists
        return None


@contextmanager
def deterministic_kernels(*, warn_only: bool = False) -> Generator[None]:
    """Let torch run deterministic kernels in a block.

    Args:
        warn_only: Whether torch warns of a kernel that is not deterministic, and runs it, rather than raise a
            RuntimeError. Attention on CUDA stays as it is then.
    """
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS)
    os.environ.setdefault(_CUBLAS, ":4096:8")
    try:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
        if workspace is None:
            del os.environ[_CUBLAS]
