"""Compares the results of a step with the regions of a model and of one without them, bit for bit.

Where two plain steps differ, as with kernels that add atomically, a comparison says nothing. The steps run once more
then, with kernels that torch calls deterministic; where some have no such kernel, the difference of plain steps is the
measure.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import torch
from torch import Tensor, nn

from torchremat._compat.flags import deterministic_kernels
from torchremat._compat.sharding import unreduced_gradients
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.measuring.modules import has_compiled
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import run_backward
from torchremat.measuring.untouched import gradient_leaves
from torchremat.optimizing.rehearsal import noting_gradients
from torchremat.planning.layout import bare
from torchremat.planning.report import StepComparison
from torchremat.tensors.copies import same_bits

# The results of a step by name, each a copy in host memory.
Outcome = dict[str, Tensor]

# How often two plain steps are compared to find their difference, and the factor on it that the step with the regions
# may reach: the largest of a few differences is not the largest possible.
NOISE_RUNS = 3
_NOISE_SHARE = 4.0
# A difference of two plain steps counts as rounding up to this share of the largest number in them. A step that differs
# by more is not repeatable.
_ROUNDING_SHARE = 0.01


def outcome_of(subject: Subject) -> Outcome:
    """Run the step and return its results: the loss, the gradients of all leaves, the buffers."""
    released: dict[int, Tensor] = {}

    def note(parameter: Tensor, gradient: Tensor) -> None:
        # As if it were added to zeros, as others are: where autograd makes -0.0, that is 0.0.
        released[id(parameter)] = _copied(gradient).add_(0)

    with subject.untouched(looks=True), noting_gradients(note):
        loss = subject.forward()
        run_backward(loss)
        outcome = {"the loss": loss.detach().clone()}
        names = {id(parameter): name for model in subject.models for name, parameter in model.named_parameters()}
        leaves = gradient_leaves(subject.models, subject.optimizer, subject.inputs)
        for place, leaf in enumerate(leaves):
            gradient = released.get(id(leaf)) if leaf.grad is None else _copied(leaf.grad)
            if gradient is not None:
                outcome[f"the gradient of `{names.get(id(leaf), f'input {place}')}`"] = gradient
        for model in subject.models:
            for name, gradient in unreduced_gradients(model.modules()).items():
                outcome[f"the gradient of `{name}` that is not reduced"] = _copied(gradient)
            for name, buffer in model.named_buffers():
                outcome[f"the buffer `{name}`"] = _copied(buffer)
    return outcome


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; a dense one of a sparse tensor, since those cannot be compared."""
    copied = tensor.detach().to("cpu", copy=True)
    return copied if copied.layout is torch.strided else copied.to_dense()


def differing(ours: Outcome, plain: Outcome) -> dict[str, float]:
    """Return the differences of the results of two steps, by name; `inf` for a result that only one of them has."""
    found: dict[str, float] = {}
    for name, expected in plain.items():
        own = ours.get(name)
        if own is None or own.shape != expected.shape or own.dtype != expected.dtype:
            found[name] = math.inf
        elif not same_bits(own, expected):
            wide = torch.complex128 if expected.is_complex() else torch.float64
            far = (own.to(wide) - expected.to(wide)).abs().max().item()
            found[name] = math.inf if math.isnan(far) else far
    return found | {name: math.inf for name in ours if name not in plain}


def explained(subject: Subject, model: nn.Module, plain: Outcome, differences: dict[str, float]) -> StepComparison:
    """Run more steps to find whether the regions cause differences, or kernels that are not deterministic.

    `plain` are the results of a step without regions, `differences` those of the step with them from these: maybe
    none, where another process that trains the model found some.
    """
    noise = _noise(subject, model, plain)
    if not noise:
        return StepComparison(is_exact=not differences, differences=tuple(_told(differences)))
    told = tuple(_told(noise))
    decided = _differing_deterministically(subject, model)
    if decided is not None:
        return StepComparison(
            is_exact=not decided, differences=tuple(_told(decided)), noise=told, is_deterministic=True
        )
    beyond = _beyond(differences, noise, plain)
    return StepComparison(is_exact=False if beyond else None, differences=tuple(_told(beyond)), noise=told)


def _noise(subject: Subject, model: nn.Module, plain: Outcome) -> dict[str, float]:
    """Return the difference of plain steps from one another."""
    found: dict[str, float] = {}
    with bare(model):
        for _ in range(NOISE_RUNS):
            for name, far in differing(outcome_of(subject), plain).items():
                found[name] = max(far, found.get(name, 0.0))
    return found


def _differing_deterministically(subject: Subject, model: nn.Module) -> dict[str, float] | None:
    """Return the differences under deterministic kernels; None where these do not exist, or do not suffice."""
    if has_compiled(model):  # it would be recompiled
        return None
    try:
        with deterministic_kernels():
            ours = outcome_of(subject)
            with bare(model):
                plain, again = outcome_of(subject), outcome_of(subject)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and "deterministic" not in str(error):
            raise
        let_go(error)
        return None
    return None if differing(again, plain) else differing(ours, plain)


def _beyond(differences: dict[str, float], noise: dict[str, float], plain: Outcome) -> dict[str, float]:
    """Return the differences that exceed the noise of nondeterministic kernels.

    Noise spreads from a kernel to all results that depend on its own, and one of these may be equal by chance in a few
    runs. It may differ by the share of its largest number by which others do.
    """
    largest = {name: one.abs().max().item() if one.numel() else 0.0 for name, one in plain.items()}
    shares = [far / largest[name] for name, far in noise.items() if largest.get(name)]
    share = max((one for one in shares if one <= _ROUNDING_SHARE), default=0.0)
    found: dict[str, float] = {}
    for name, far in differences.items():
        size = largest.get(name, 0.0)
        rounding = noise.get(name, share * size)
        if rounding > _ROUNDING_SHARE * size or far > _NOISE_SHARE * rounding:
            found[name] = far
    return found


def _told(differences: dict[str, float]) -> Generator[str]:
    for name, far in differences.items():
        if math.isinf(far):
            yield f"{name} is missing in one of the two, is not finite in one, or has another shape"
        else:
            yield f"{name} differs by up to {far:.3g}"
