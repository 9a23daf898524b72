"""One real step with the regions of a model and one without them, compared."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.sharding import unreduced_gradients
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.runs import Subject, run_counted, run_plain, run_traced, subject_of
from torchremat.measuring.step import run_backward
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.measuring.untouched import gradient_leaves
from torchremat.optimizing.partial_steps import steps_in_parts
from torchremat.optimizing.rehearsal import marking_rehearsals, noting_gradients
from torchremat.planning.bars import shown
from torchremat.planning.devices.machines import Here
from torchremat.planning.layout import applied_scopes, bare
from torchremat.planning.profiles.optimizers import measure_optimizer
from torchremat.planning.profiles.peers import peers_of
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.report import Report
from torchremat.planning.searches.progress import Observer, Progress, checked
from torchremat.planning.stepping import handles_on
from torchremat.regions.patches import is_wrapped
from torchremat.tensors.sizes import format_bytes

_TIMED_RUNS = 3
# The steps of `verify`: for results, bytes and seconds, each with the regions and without; and one for flops.
_STEPS = 2 * (2 + _TIMED_RUNS) + 1
# How often two plain steps are compared to find their difference, and the factor on it that the step with the regions
# may reach: the largest of a few differences is not the largest possible.
_NOISE_RUNS = 3
_NOISE_SHARE = 4.0
# A difference of two plain steps counts as rounding up to this share of the largest number in them. A step that differs
# by more is not repeatable.
_ROUNDING_SHARE = 0.01

N = TypeVar("N", int, float)


@without_our_frames
def verify(
    model: nn.Module,
    step: Step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    progress: Callable[[Progress], None] | Literal[False] | None = None,
) -> Report:
    """Run a step with the regions that are on the model and one without them, and compare.

    Model, gradients, buffers, generators and hooks are as before afterwards. All processes that train a model together
    (DistributedDataParallel, FSDP2) call this, and get one report: the most bytes of any, the differences of all.

    Args:
        model: The model, with a plan applied or modules wrapped.
        step: As for `plan`.
        optimizer: Its state counts among the bytes, as it is after the first step.
        device: The device whose bytes count; that of the first parameter if not given.
        progress: As for `plan`.

    Raises:
        StepError: The step returns no loss; or `model`, `step` or `optimizer` has a wrong type.
        UnsupportedError: The device does not exist, a profiler is active, or the optimizer cannot step on its own.
    """
    with shown(checked(progress) if progress else progress) as observer:
        return _agreed(peers_of(model).all(lambda: _verified(model, step, optimizer, device, observer or None)))


def _agreed(told: list[Report]) -> Report:
    """Return the report of all processes."""
    if len(told) == 1:
        return told[0]
    different = {
        line: None for rank, one in enumerate(told) for line in (f"process {rank}: {x}" for x in one.differences)
    }
    exact = [one.is_exact for one in told]
    plain = [one.plain_peak_bytes for one in told]
    plain_kept = [one.plain_kept_bytes for one in told]
    plain_s = [one.plain_seconds for one in told]
    return replace(
        told[0],
        is_exact=False if False in exact else None if None in exact else True,
        differences=tuple(different),
        noise=tuple(line for one in told for line in one.noise),
        peak_bytes=max(one.peak_bytes for one in told),
        resident_bytes=max(one.resident_bytes for one in told),
        slack_bytes=max(one.slack_bytes for one in told),
        plain_peak_bytes=_highest(plain),
        kept_bytes=max(one.kept_bytes for one in told),
        plain_kept_bytes=_highest(plain_kept),
        seconds=max(one.seconds for one in told),
        took_seconds=max(one.took_seconds for one in told),
        plain_seconds=_highest(plain_s),
    )


def _highest(told: list[N | None]) -> N | None:
    known = [one for one in told if one is not None]
    return max(known) if len(known) == len(told) else None


class _Steps:
    """Counts the steps that `verify` runs, and tells how far it is."""

    def __init__(self, observer: Observer | None) -> None:
        self.count = 0
        self._observer = observer
        self._began_s = time.perf_counter()
        self._tell()

    def ran(self, steps: int = 1) -> None:
        """Take note of steps that have run."""
        self.count += steps
        self._tell()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._began_s

    def _tell(self) -> None:
        if self._observer is not None:
            self._observer(Progress(phase="verifying", share=min(1.0, self.count / _STEPS), slowdown=None))


def _verified(
    model: nn.Module,
    step: Step,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device | str | None,
    observer: Observer | None,
) -> Report:
    steps = _Steps(observer)
    subject = subject_of(step, model, optimizer, needs_model=True)
    stepped = (optimizer, *(handles.optimizer() for handles in handles_on(model.modules())))
    with ExitStack() as stack:
        for parts in {own for one in stepped if one is not None and (own := steps_in_parts(one)) is not None}:
            stack.enter_context(parts.state_made())
        return _compared(model, subject, device, steps)


def _compared(model: nn.Module, subject: Subject, device: torch.device | str | None, steps: _Steps) -> Report:
    optimizer, place = subject.optimizer, subject.device(device)
    accelerator_of(place).warm(place)
    regions = sum(map(is_wrapped, model.modules()))
    state_bytes = 0 if optimizer is None else measure_optimizer(subject, optimizer, Here(place)).state_bytes
    with_regions = _run(subject, place, state_bytes)
    steps.ran(2)
    try:
        with bare(model):
            plain = _run(subject, place, state_bytes)
        steps.ran(2)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        plain = None
    seconds, plain_seconds = _seconds(subject, model, place, steps, plain_fits=plain is not None)
    differences = {} if plain is None else _differences(with_regions.outcome, plain.outcome)
    noise = _noise(subject, model, plain.outcome) if plain is not None and differences else {}
    steps.ran(_NOISE_RUNS if noise else 0)
    recomputed_flops = run_counted(subject, place).recomputed_flops
    steps.ran()
    beyond = {} if plain is None else _beyond(differences, noise, plain.outcome)
    return Report(
        is_exact=None if plain is None or (differences and not beyond) else not differences,
        differences=tuple(_told(beyond)),
        noise=tuple(_told(noise)),
        peak_bytes=with_regions.peak_bytes,
        plain_peak_bytes=None if plain is None else plain.peak_bytes,
        predicted_bytes=_predicted(model, with_regions.before_bytes),
        kept_bytes=with_regions.kept_bytes,
        plain_kept_bytes=None if plain is None else plain.kept_bytes,
        seconds=seconds,
        plain_seconds=plain_seconds,
        recomputed_flops=recomputed_flops,
        regions=regions,
        no_effect=_why_not(model, with_regions, plain, regions),
        resident_bytes=with_regions.resident_bytes,
        slack_bytes=with_regions.slack_bytes,
        took_seconds=steps.seconds,
        steps=steps.count,
        predicted_slowdown=next((s for scope in applied_scopes(model) if (s := scope.slowdown) is not None), None),
    )


@dataclass(frozen=True, kw_only=True)
class _VerifiedRun:
    outcome: dict[str, Tensor]
    before_bytes: int
    peak_bytes: int
    kept_bytes: int
    resident_bytes: int
    slack_bytes: int


def _run(subject: Subject, device: torch.device, state_bytes: int) -> _VerifiedRun:
    """Run the step twice: for its results, then for its bytes, with `state_bytes` of an optimizer added."""
    outcome = _outcome(subject)
    with subject.untouched():
        found = subject.before(device)
        before = found.total_bytes + state_bytes
    traced = run_traced(subject, device, before_bytes=before)
    return _VerifiedRun(
        outcome=outcome,
        before_bytes=before,
        peak_bytes=before + traced.peak_bytes,
        kept_bytes=traced.kept_bytes,
        resident_bytes=found.resident_bytes,
        slack_bytes=traced.slack_bytes,
    )


def _outcome(subject: Subject) -> dict[str, Tensor]:
    """Run the step and return its results, by name."""
    released: dict[int, Tensor] = {}

    def note(parameter: Tensor, gradient: Tensor) -> None:
        released[id(parameter)] = _copied(gradient)

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


def _seconds(
    subject: Subject, model: nn.Module, device: torch.device, steps: _Steps, *, plain_fits: bool
) -> tuple[float, float | None]:
    """Return the seconds of a step with the regions and of one without: each the median of some, run in turn.

    Only forward and backward count, as parts of the optimizer's step are undone here.
    """
    now = accelerator_of(device).seconds
    ours: list[float] = []
    plain: list[float] = []
    for _ in range(_TIMED_RUNS):
        with marking_rehearsals(lambda _: now(device)) as marks:
            seconds = run_plain(subject, device).seconds
        ours.append(seconds - sum(marks[1::2]) + sum(marks[::2]))
        steps.ran()
        if plain_fits:
            with bare(model):
                plain.append(run_plain(subject, device).seconds)
            steps.ran()
    return statistics.median(ours), statistics.median(plain) if plain else None


def _noise(subject: Subject, model: nn.Module, plain: dict[str, Tensor]) -> dict[str, float]:
    """Return the difference of plain steps from one another."""
    found: dict[str, float] = {}
    with bare(model):
        for _ in range(_NOISE_RUNS):
            for name, far in _differences(_outcome(subject), plain).items():
                found[name] = max(far, found.get(name, 0.0))
    return found


def _beyond(differences: dict[str, float], noise: dict[str, float], plain: dict[str, Tensor]) -> dict[str, float]:
    """Return the differences that exceed the noise of nondeterministic kernels."""
    found: dict[str, float] = {}
    for name, far in differences.items():
        rounding = noise.get(name, 0.0)
        largest = plain[name].abs().max().item() if name in plain and plain[name].numel() else 0.0
        if rounding > _ROUNDING_SHARE * largest or far > _NOISE_SHARE * rounding:
            found[name] = far
    return found


def _differences(ours: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, float]:
    """Return the differences of the results of two steps, by name; `inf` for a result that only one of them has."""
    found: dict[str, float] = {}
    for name, expected in plain.items():
        own = ours.get(name)
        if own is None or own.shape != expected.shape or own.dtype != expected.dtype:
            found[name] = math.inf
        elif not torch.equal(own, expected) and not _equal_with_nan(own, expected):
            wide = torch.complex128 if expected.is_complex() else torch.float64
            far = (own.to(wide) - expected.to(wide)).abs().max().item()
            found[name] = math.inf if math.isnan(far) else far
    return found | {name: math.inf for name in ours if name not in plain}


def _told(differences: dict[str, float]) -> Generator[str]:
    for name, far in differences.items():
        if math.isinf(far):
            yield f"{name} is missing in one of the two, is not finite in one, or has another shape"
        else:
            yield f"{name} differs by up to {far:.3g}"


def _equal_with_nan(found: Tensor, expected: Tensor) -> bool:
    return bool(torch.all((found == expected) | ((found != found) & (expected != expected))))


def _predicted(model: nn.Module, before_bytes: int) -> int | None:
    """The applied plan's prediction for a step that begins with `before_bytes`, with or without optimizer state."""
    rises = (scope.rise_bytes for scope in applied_scopes(model))
    return next((before_bytes + rise for rise in rises if rise is not None), None)


def _why_not(model: nn.Module, ours: _VerifiedRun, plain: _VerifiedRun | None, regions: int) -> str:
    if plain is None or ours.peak_bytes < plain.peak_bytes:
        return ""
    if not regions:
        return "no module of the model is wrapped; apply a plan, or use wrap"
    if applied_scopes(model) and not any(scope.choices for scope in applied_scopes(model)):
        return "the plan keeps everything: the plain step is within the budget"
    if not model.training:
        return "nothing was saved less; the model is in eval mode, does the step train it?"
    if ours.kept_bytes < plain.kept_bytes:
        return (
            f"the peak is elsewhere: the forward keeps {format_bytes(plain.kept_bytes - ours.kept_bytes)} less, "
            "but the peak of the step "
            "is not where these are held"
        )
    if any(scope.offload_schedule is not None for scope in applied_scopes(model)):
        return "tensors in the plan's stores stay on the measured device, or take as much there meanwhile"
    return "the wrapped modules save nothing between forward and backward that their inputs do not hold"
