"""Compares the results of a step with the regions of a model and of one without them, bit for bit.

Where two plain steps differ, as with kernels that add atomically, a comparison says nothing. So before a difference is
put down to the regions, plain steps are compared with one another, and the steps run once more with kernels that torch
calls deterministic. These decide if plain steps do differ; where some have no such kernel, the difference of plain
steps is the measure. If they differ by more than rounding, none of both is: the step is not repeatable.
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
from torchremat.measuring.runs import StepObserver, Subject
from torchremat.measuring.untouched import frees_gradient, gradient_leaves
from torchremat.optimizing.rehearsal import noting_gradients
from torchremat.planning.layout import bare
from torchremat.planning.peers.peers import Peers
from torchremat.planning.training.report import StepComparison
from torchremat.tensors.copies import same_bits

# The results of a step by name, each a copy in host memory.
Outcome = dict[str, Tensor]

# How often two plain steps are compared to find their difference, and how often more before a result that they have in
# common is called unequal: threads that add to one number meet in few of the steps, one in four on the CPU.
_NOISE_RUNS = 3
_MORE_NOISE_RUNS = 12
# The factor on the difference of plain steps that the step with the regions may reach: the largest of a few differences
# is not the largest possible.
_NOISE_SHARE = 4.0
# A difference of two plain steps counts as rounding up to this share of the largest number in the result. Where the
# terms of a sum cancel, as in the gradient of a bias before a batch normalization, all that is left is rounding: it
# counts up to the other share of the largest number in any result. A step that differs by more is not repeatable.
_ROUNDING_SHARE = 0.01
_CANCELLED_SHARE = 1e-5


def outcome_of(subject: Subject) -> Outcome:
    """Run the step and return its results: the loss, the gradients of all leaves, the buffers."""
    return subject.train(_results(subject), looks=True)


def _results(subject: Subject) -> StepObserver[Outcome]:
    released: dict[int, Tensor] = {}

    def note(parameter: Tensor, gradient: Tensor) -> None:
        copied = _copied(gradient)
        # As if it were added to zeros, as others are then: where autograd makes -0.0, that is 0.0.
        released[id(parameter)] = copied.add_(0) if subject.accumulates else copied

    with noting_gradients(note):
        loss = yield
        yield
        outcome = {"the loss": loss.detach().clone()}
        names = {id(parameter): name for model in subject.models for name, parameter in model.named_parameters()}
        leaves = gradient_leaves(subject.models, subject.optimizer, subject.inputs)
        for place, leaf in enumerate(leaves):
            gradient = released.get(id(leaf)) if leaf.grad is None else _copied(leaf.grad)
            if gradient is None and subject.accumulates and frees_gradient(leaf):
                gradient = _copied(torch.zeros_like(leaf))  # none has come; others have begun as zeros
            if gradient is not None:
                outcome[f"the gradient of `{names.get(id(leaf), f'input {place}')}`"] = gradient
        for model in subject.models:
            for name, gradient in unreduced_gradients(model.modules()).items():
                outcome[f"the gradient of `{name}` that is not reduced"] = _copied(gradient)
            for name, buffer in model.named_buffers():
                if not buffer.is_meta:
                    outcome[f"the buffer `{name}`"] = _copied(buffer)
    return outcome


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; a dense one of a sparse or nested tensor, since those cannot be compared."""
    own = tensor.detach()
    if own.is_nested:
        own = torch.nested.to_padded_tensor(own, 0.0)
    return (own if own.layout is torch.strided else own.to_dense()).to("cpu", copy=True)


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


def explained(
    peers: Peers, subject: Subject, model: nn.Module, plain: Outcome, differences: dict[str, float]
) -> StepComparison:
    """Run more steps to find whether the regions cause differences, or a plain step differs from the next by itself.

    All processes call this, and run the same steps. `plain` are the results of a step without regions, `differences`
    those of the step with them from these: maybe none, where another process that trains the model found some.
    """
    noise: dict[str, float] = {}
    for _ in range(_NOISE_RUNS):
        peers.each(lambda: _add_noise(noise, subject, model, plain))
    decided = peers.each(lambda: _differing_deterministically(subject, model, plain))
    is_decided = peers.everywhere(lambda: decided is not None)
    is_noisy = not peers.everywhere(lambda: not noise)
    if is_noisy or not is_decided or peers.everywhere(lambda: not decided):
        for _ in range(_MORE_NOISE_RUNS):
            if (is_decided and is_noisy) or peers.everywhere(
                lambda: _beyond(differences, noise, plain).keys() <= noise.keys()
            ):
                break
            peers.each(lambda: _add_noise(noise, subject, model, plain))
            is_noisy = not peers.everywhere(lambda: not noise)
    told = tuple(_told(noise))
    if decided is not None and is_decided and is_noisy:
        return StepComparison(
            is_exact=not decided, differences=tuple(_told(decided)), noise=told, is_deterministic=True
        )
    if not noise:
        return StepComparison(is_exact=not differences, differences=tuple(_told(differences)))
    beyond = _beyond(differences, noise, plain)
    roundings = _roundings(plain)
    return StepComparison(
        is_exact=False if beyond else None,
        differences=tuple(_told(beyond)),
        noise=told,
        is_repeatable=all(far <= roundings.get(name, 0.0) for name, far in noise.items()),
    )


def _add_noise(noise: dict[str, float], subject: Subject, model: nn.Module, plain: Outcome) -> None:
    """Run another plain step, and add its differences from the first one to those of the others."""
    with bare(model):
        for name, far in differing(outcome_of(subject), plain).items():
            noise[name] = max(far, noise.get(name, 0.0))


def _differing_deterministically(subject: Subject, model: nn.Module, plain: Outcome) -> dict[str, float] | None:
    """Return the differences under deterministic kernels; None where these do not exist, or do not suffice.

    torch fills memory with NaN under them before a kernel writes there, so a step that reads what no kernel has written
    has NaN in both, and not in `plain`: they do not suffice for it either.
    """
    if has_compiled(model):  # it would be recompiled
        return None
    try:
        with deterministic_kernels():
            ours = outcome_of(subject)
            with bare(model):
                one, again = outcome_of(subject), outcome_of(subject)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) and "deterministic" not in str(error):
            raise
        let_go(error)
        return None
    is_filled = any(bool(value.isnan().any()) and not plain[name].isnan().any() for name, value in one.items())
    return None if is_filled or differing(again, one) else differing(ours, one)


def _roundings(plain: Outcome) -> dict[str, float]:
    """Return how far two plain steps may differ in each result by rounding alone."""
    largest = {name: one.abs().max().item() if one.numel() else 0.0 for name, one in plain.items()}
    least = _CANCELLED_SHARE * max((one for one in largest.values() if math.isfinite(one)), default=0.0)
    return {name: max(_ROUNDING_SHARE * one, least) for name, one in largest.items()}


def _beyond(differences: dict[str, float], noise: dict[str, float], plain: Outcome) -> dict[str, float]:
    """Return the differences that exceed the noise of nondeterministic kernels.

    Noise spreads from a kernel to all results that depend on its own, and one of these may be equal by chance in a few
    runs. It may differ by the share of its rounding by which others do. Where two plain steps differ by more than
    rounding, nothing is known of that result.
    """
    roundings = _roundings(plain)
    shares = [far / roundings[name] for name, far in noise.items() if roundings.get(name)]
    share = max((one for one in shares if one <= 1), default=0.0)
    found: dict[str, float] = {}
    for name, far in differences.items():
        rounding = roundings.get(name, 0.0)
        own = noise.get(name, share * rounding)
        if own <= rounding and far > _NOISE_SHARE * own:
            found[name] = far
    return found


def _told(differences: dict[str, float]) -> Generator[str]:
    for name, far in differences.items():
        if math.isinf(far):
            yield f"{name} is missing in one of the two, is not finite in one, or has another shape"
        else:
            yield f"{name} differs by up to {far:.3g}"
