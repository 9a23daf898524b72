"""Batch norms with the running statistics of mini-batches, however these are cut into microbatches.

    forward of a microbatch     normalises with the statistics of the microbatch, and records them
    commit                      merges the records and updates the running statistics, once
    evaluation                  as in torch: the running statistics; the records have no part in it
    recompute                   records nothing, since its forward has

The code that cuts the mini-batch knows when it has ended: a pipe calls `commit_statistics` on its model after each
forward, and `discard_statistics` when one has failed. So a short mini-batch is committed like any other. For code
without these calls, a number of microbatches can be given after which a module commits by itself.

Normalising is by microbatch, as in every pipeline: the output differs from one batch norm over the mini-batch.

Missing on purpose: recomputes that are not ours, like those of `torch.utils.checkpoint`; nothing identifies them, and
they are recorded as further microbatches. `torchremat.install` makes them ours.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy

from torchremat._compat.modules import AnyBatchNorm
from torchremat.ambient.global_state import EXCHANGING
from torchremat.ambient.hidden import hiding
from torchremat.errors import ScheduleError, UnsupportedError
from torchremat.regions.runtime import is_recomputing

_Kind = type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]
_CONVERTIBLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statistics:
    """The statistics of some rows, by feature; the variance is the unbiased one."""

    count: int
    mean: Tensor
    variance: Tensor

    def merged(self, other: _Statistics) -> _Statistics:
        """Return the statistics of both.

        The difference of two sums of squares would lose all digits if the mean is large against the deviation.

        Source: T. Chan, G. Golub, R. LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances", COMPSTAT 1982, equation 2.1.
        """
        count = self.count + other.count
        apart = other.mean - self.mean
        squares = self.variance * (self.count - 1) + other.variance * (other.count - 1)
        squares += apart * apart * (self.count * other.count / count)
        return _Statistics(count=count, mean=self.mean + apart * (other.count / count), variance=squares / (count - 1))


class DeferredBatchNorm(AnyBatchNorm):
    """A batch norm that updates its running statistics once in a mini-batch of several microbatches.

    The update equals that of one batch norm over the whole mini-batch: the running variance gets the unbiased one, as
    in torch, and `momentum=None` means the average over all mini-batches. Inputs have 2 dimensions or more, features
    second. Its `state_dict` equals that of a batch norm.

    Args:
        num_features: As for `nn.BatchNorm2d`.
        eps: As for `nn.BatchNorm2d`.
        momentum: As for `nn.BatchNorm2d`.
        affine: As for `nn.BatchNorm2d`.
        chunks: After how many microbatches the module commits by itself; None if only `commit` does. In a pipe, which
            calls `commit`, both work.
        device: As for `nn.BatchNorm2d`.
        dtype: As for `nn.BatchNorm2d`.

    Raises:
        ScheduleError: `chunks` is neither a positive integer nor None.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    chunks: int | None
    _kind: _Kind | None = None  # the class that it was converted from
    _noted: tuple[_Statistics, ...] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        chunks: int | None = 1,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, True, device, dtype)
        self.chunks = _check_chunks(chunks)

    @property
    def microbatches(self) -> int:
        """How many microbatches have run since the last commit."""
        return len(self._noted)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input normalised, by its own statistics in training and by the running ones in evaluation."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        # The kernel writes the microbatch's own statistics in place of the running ones, since a momentum of 1 leaves
        # nothing of the old values.
        mean, variance = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
        output = functional.batch_norm(input, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        if input.numel() and not is_recomputing():
            self._note(input, mean, variance)
        return output

    def commit(self) -> None:
        """Update the running statistics by the microbatches since the last commit, if any."""
        if not self._noted:
            return
        # An enclosing region's recompute does not run this. And a recompute in another thread may have replaced these
        # buffers by others.
        with torch.no_grad(), hiding(), EXCHANGING:
            whole = reduce(_Statistics.merged, self._noted)
            self.discard()
            self.num_batches_tracked.add_(1)
            factor = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            _move(self.running_mean, whole.mean, factor)
            _move(self.running_var, whole.variance, factor)

    def discard(self) -> None:
        """Forget the microbatches since the last commit."""
        self._noted = ()

    def reset_running_stats(self) -> None:
        """Reset the running statistics to those of a new module."""
        super().reset_running_stats()
        self.discard()

    def extra_repr(self) -> str:
        """Return the text of a batch norm, and `chunks`."""
        return f"{super().extra_repr()}, chunks={self.chunks}"

    def _note(self, input: Tensor, mean: Tensor, variance: Tensor) -> None:
        if mean.dtype not in (torch.float32, torch.float64):
            with torch.no_grad(), hiding():
                variance, mean = torch.var_mean(input.float(), [dim for dim in range(input.dim()) if dim != 1])
        count = input.numel() // self.num_features
        self._noted += (_Statistics(count=count, mean=mean, variance=variance),)
        if self.microbatches == self.chunks:
            self.commit()

    def _check_input_dim(self, input: Tensor) -> None:
        if self._kind is not None:
            self._kind._check_input_dim(self, input)  # pyright: ignore[reportArgumentType]: all it reads is the input
        elif input.dim() < 2:
            raise UnsupportedError(
                f"DeferredBatchNorm: expected an input of rows, {self.num_features} features and any more dimensions, "
                f"got one of shape {tuple(input.shape)}."
            )


def _move(running: Tensor, towards: Tensor, factor: float) -> None:
    # Like torch's kernels, which do not move the version for this write: a region between its forward and its recompute
    # would take it for a change of a buffer that it has read.
    running.data.copy_((1 - factor) * running.to(towards.dtype) + factor * towards)


def commit_statistics(module: nn.Module) -> None:
    """Let every `DeferredBatchNorm` in a module update its running statistics: the mini-batch has ended."""
    for one in module.modules():
        if isinstance(one, DeferredBatchNorm):
            one.commit()


def discard_statistics(module: nn.Module) -> None:
    """Let every `DeferredBatchNorm` in a module forget the microbatches since its last commit."""
    for one in module.modules():
        if isinstance(one, DeferredBatchNorm):
            one.discard()


def convert_deferred_batch_norm(module: nn.Module, chunks: int | None = 1) -> nn.Module:
    """Return the module with a `DeferredBatchNorm` in place of each batch norm that has running statistics.

    Inner modules are replaced in place; a module that is a batch norm itself is left as it is and another one returned.
    The new modules have the same parameters, buffers and hooks. Modules that are deferred already, by as many chunks,
    stay, and so do batch norms without running statistics.

    Args:
        module: The module.
        chunks: See `DeferredBatchNorm`.

    Raises:
        ScheduleError: `chunks` is neither a positive integer nor None.
        UnsupportedError: Batch norms with running statistics have other classes than `nn.BatchNorm1d` to `3d`, are
            wrapped, or do not know their number of features yet; all are listed, and nothing is changed.
    """
    chunks = _check_chunks(chunks)
    problems = [f"`{name or 'the module'}`: {why}" for name, one in module.named_modules() if (why := _problem(one))]
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise UnsupportedError(f"convert_deferred_batch_norm: {len(problems)} modules cannot be converted:{listed}")
    return _convert(module, chunks, {})


def _problem(module: nn.Module) -> str:
    """Return why a module cannot be converted, or an empty string."""
    if not _is_tracking(module) or isinstance(module, DeferredBatchNorm):
        return ""
    kind = type(module).__name__
    if isinstance(module, nn.SyncBatchNorm):
        return (
            f"{kind} takes its statistics from all processes; deferred, it would take them from one. Give the model "
            "to the pipe with plain batch norms, or with track_running_stats=False"
        )
    if is_lazy(cast("Tensor", module.running_mean)):
        return f"{kind} does not know its number of features yet; run the model once first"
    if type(module) not in _CONVERTIBLE:
        return f"{kind} is a class of its own, whose forward would be lost"
    if "forward" in vars(module):
        return f"this {kind} has its own forward, or is wrapped; convert first, then wrap"
    return ""


def _is_tracking(module: nn.Module) -> bool:
    return isinstance(module, AnyBatchNorm) and module._buffers.get("running_mean") is not None


def _convert(module: nn.Module, chunks: int | None, made: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in made:
        return made[module]
    new = module
    if isinstance(module, DeferredBatchNorm):
        if module.chunks != chunks:
            new = _defer(module, chunks, module._kind)
    elif _is_tracking(module):
        new = _defer(module, chunks, cast("_Kind", type(module)))
    else:
        for name, child in dict(module._modules).items():
            changed = None if child is None else _convert(child, chunks, made)
            if changed is not child:
                module.add_module(name, changed)
    made[module] = new
    return new


def _defer(norm: nn.Module, chunks: int | None, kind: _Kind | None) -> DeferredBatchNorm:
    made = DeferredBatchNorm.__new__(DeferredBatchNorm)
    # The tables of parameters, buffers and hooks are its own, their contents are shared.
    made.__dict__.update({name: copy.copy(one) if isinstance(one, dict) else one for name, one in vars(norm).items()})
    made.chunks = chunks
    made._kind = kind
    return made


def _check_chunks(chunks: int | None) -> int | None:
    if chunks is not None and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise ScheduleError(f"DeferredBatchNorm: chunks={chunks!r}: expected a positive integer, or None.")
    return chunks
