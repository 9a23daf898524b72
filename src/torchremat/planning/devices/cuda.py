"""Runs the operators that a function has on CUDA, on fakes that are on the CPU, where it would run others.

    function                        on CUDA                                       on the CPU
    scaled_dot_product_attention    a fused kernel, with dropout too              another one, and none with dropout
    rms_norm                        one operator                                  seven
    batch_norm                      cuDNN's                                       the native one
    dropout                         keeps a mask of bytes                         keeps one of floats
    softmax to float32              one operator                                  a cast and another
    autocast                        the same casts to fewer bits; sums, powers    these as they are
                                    and norms in float32

Functions that torch's own functions call are not seen, so `nn.MultiheadAttention` runs the CPU's attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from torchremat._compat.fakes import below_autograd
from torchremat._compat.modes import Args, Kwargs, Operation
from torchremat.ambient.global_state import acts

_ATEN = cast("Any", torch.ops.aten)  # its operators have no types
_HALVES = (torch.float16, torch.bfloat16)
# cuDNN normalises no larger batches; see `_select_batch_norm_backend` in torch's Normalization.cpp.
_MOST_TRAINED, _MOST_RUN, _LEAST_EPS = 880801, 65535, 1e-5


@acts
class OnCuda(TorchFunctionMode):
    """Runs functions with the operators that they have on CUDA."""

    def __torch_function__(self, func: Operation, types: object, args: Args = (), kwargs: Kwargs = None) -> object:
        named = dict(kwargs or {})
        if torch.is_autocast_enabled("cpu"):
            if func in _IN_FLOAT32:
                args, named = _in_float32(args), {key: _in_float32((one,))[0] for key, one in named.items()}
            elif func in _TO_FLOAT32 and args and getattr(args[0], "dtype", None) in _HALVES:
                named.setdefault("dtype", torch.float32)
        own = _FUNCTIONS.get(func)
        return func(*args, **named) if own is None else own(*args, **named)


# Functions that autocast computes in float32 on CUDA and not on the CPU, from cast inputs or by the argument `dtype`:
# see "CUDA Ops that can autocast to float32" in torch's docs, and AT_FORALL_FP32_SET_OPT_DTYPE in its autocast_mode.h.
_CAST = "exp expm1 log log10 log1p log2 pow reciprocal rsqrt norm"
_BY_DTYPE = "softmax log_softmax sum prod cumsum cumprod"


def _named(names: str, *owners: object) -> frozenset[object]:
    return frozenset(getattr(owner, name) for owner in owners for name in names.split())


_IN_FLOAT32 = (
    _named(_CAST, torch, Tensor)
    | _named("__pow__ __rpow__", Tensor)
    | _named("layer_norm group_norm softplus cosine_similarity", functional)
)
_TO_FLOAT32 = _named(_BY_DTYPE, torch, Tensor) | _named("softmax log_softmax", functional)


def _in_float32(values: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(one.float() if isinstance(one, Tensor) and one.dtype in _HALVES else one for one in values)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (one.to(dtype) for one in (query, key, value))
    alike = query.dim() == 4 and query.shape[-1] == value.shape[-1]
    shared = key.shape[-3] != query.shape[-3] if alike else False
    wide = alike and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    if wide and attn_mask is None and query.dtype in _HALVES and (enable_gqa or not shared):
        flash = _ATEN._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if wide and not shared and query.dtype in (torch.float32, *_HALVES):
        mask = None if attn_mask is None else _bias(attn_mask, query, key)
        needed = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
        efficient = _ATEN._scaled_dot_product_efficient_attention
        return efficient(query, key, value, mask, needed, dropout_p, is_causal, scale=scale)[0]
    # Without dropout, since the CPU would compute the whole matrix with it.
    attention = functional.scaled_dot_product_attention
    return attention(query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the bias that is added to the scores, in the shape that the kernel takes."""
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


class _RMSNorm(torch.autograd.Function):
    """`_fused_rms_norm`, which the CPU decomposes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        with below_autograd():
            output, deviation = _ATEN._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, deviation)
        ctx.shape = shape
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  as torch's own
        x, weight, deviation = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        with below_autograd():
            for_x, for_weight = _ATEN._fused_rms_norm_backward(gradient, x, ctx.shape, deviation, weight, wanted)
        return for_x, None, for_weight, None


def _rms_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    fused = weight is None or weight.dtype is input.dtype
    channels_last = any(
        input.dim() == rank and not input.is_contiguous() and input.is_contiguous(memory_format=layout)
        for rank, layout in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    if not fused or channels_last or input.is_complex():
        return functional.rms_norm(input, normalized_shape, weight, eps)
    return cast("Tensor", _RMSNorm.apply(input, list(normalized_shape), weight, eps))


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    known = training or (running_mean is not None and running_var is not None)
    fits = input.dim() >= 3 and input.shape[0] <= (_MOST_TRAINED if training else _MOST_RUN)
    kinds = input.dtype in (torch.float32, torch.float16) and weight is not None and weight.dtype is torch.float32
    if not (known and fits and kinds and bias is not None and eps >= _LEAST_EPS):
        return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    norm = _ATEN.cudnn_batch_norm
    return norm(input.contiguous(), weight, bias, running_mean, running_var, training, momentum, eps)[0]


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    if dim is not None and dtype is torch.float32 and input.dtype in _HALVES:
        return _ATEN._softmax(input, dim, True)
    return functional.softmax(input, dim, _stacklevel, dtype)


def _dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Tensor:
    if train is not None:
        training = train
    if not training or p == 0:
        return input
    if inplace:
        return input.mul_(torch.native_dropout(torch.ones_like(input), p, True)[0])
    return torch.native_dropout(input, p, True)[0]


_FUNCTIONS: dict[object, Callable[..., object]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.batch_norm: _batch_norm,
    functional.softmax: _softmax,
    functional.dropout: _dropout,
    torch.dropout: _dropout,
}
