"""One real step with the regions of a model and one without them, compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of
from torchremat.errors import check_flags
from torchremat.measuring.communication import known_groups
from torchremat.measuring.exhaustion import IfItFits
from torchremat.measuring.observers import observe_allocations, observe_clock, observe_storages
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.optimizing.partial_steps import steps_in_parts
from torchremat.optimizing.rehearsal import marking_rehearsals
from torchremat.planning.bars import shown
from torchremat.planning.devices.machines import Here
from torchremat.planning.layout import applied_scopes, bare
from torchremat.planning.peers.peers import Group, Peers, check_group, peers_of
from torchremat.planning.profiles.optimizers import measure_optimizer
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.searches.search_budget import Observer, Progress, checked
from torchremat.planning.stepping import handles_on
from torchremat.planning.training.outcomes import Outcome, differing, explained, outcome_of
from torchremat.planning.training.report import Report, StepComparison
from torchremat.regions.patches import is_wrapped
from torchremat.tensors.sizes import format_bytes

_TIMED_RUNS = 3
# The steps of `verify`: for results, bytes and seconds, each with the regions and without; and one for flops.
_STEPS = 2 * (2 + _TIMED_RUNS) + 1

N = TypeVar("N", int, float)


@without_our_frames
def verify(
    model: nn.Module,
    step: Step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    accumulates: bool = False,
    group: Group = "step",
    progress: Callable[[Progress], None] | Literal[False] | None = None,
) -> Report:
    """Run a step with the regions that are on the model and one without them, and compare.

    Model, gradients, buffers, generators and hooks are as before afterwards. All processes that communicate in the step
    call this, and get one report: the most bytes of any, the differences of all.

    Args:
        model: The model, with a plan applied or modules wrapped.
        step: As for `plan`.
        optimizer: Its state counts among the bytes, as it is after the first step.
        device: The device whose bytes count; that of the first parameter if not given.
        accumulates: As for `plan`. With a plan on the model a step begins with gradients only if the plan counts them.
        group: As for `plan`.
        progress: As for `plan`.

    Raises:
        StepError: The step returns no loss; or `model`, `step` or `optimizer` has a wrong type.
        UnsupportedError: The device does not exist, a profiler is active, or the optimizer cannot step on its own.
    """
    with shown(checked(progress) if progress else progress) as observer:
        check_flags(accumulates=accumulates)
        subject = subject_of(step, model, optimizer, needs_model=True, accumulates=accumulates or None)
        check_group(group)
        peers = peers_of(known_groups((model, *subject.models), subject.inputs), group, "verify")
        with peers.together(), _state_made(model, optimizer):
            if not accumulates:
                subject = replace(subject, accumulates=_begins(peers, model, subject, device))
            ran = peers.meet(lambda: _BothRun(model, subject, subject.device(device), observer or None))
            # Steps communicate, so if the results differ in one process, all of them run the steps that explain it.
            is_unclear = any(peers.all(lambda: bool(ran.differences)))
            found = ran.compared(peers, is_unclear=is_unclear)
            return _agreed(peers.all(lambda: ran.report(found)))


def _begins(peers: Peers, model: nn.Module, subject: Subject, device: torch.device | str | None) -> bool | None:
    """Return which leaves begin the step with a gradient, as `subject_of` takes it: those that the plan has counted."""
    planned = {scope.gradient_bytes for scope in applied_scopes(model)}
    seen_bytes = max(peers.all(lambda: subject.before(subject.device(device)).gradient_bytes if any(planned) else 0))
    # It has counted those that were there, which may be there now, or all.
    return None if not planned or (seen_bytes and seen_bytes in planned) else any(planned)


@contextmanager
def _state_made(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Generator[None]:
    """Let the optimizers that step parameter by parameter have their state in a block."""
    stepped = (optimizer, *(handles.optimizer() for handles in handles_on(model.modules())))
    with ExitStack() as stack:
        for steps in {own for one in stepped if one is not None and (own := steps_in_parts(one)) is not None}:
            stack.enter_context(steps.state_made())
        yield


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
        is_deterministic=any(one.is_deterministic for one in told),
        is_repeatable=all(one.is_repeatable for one in told),
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


class _BothRun:
    """The step, run with the regions of a model and without them; `plain` is None if that does not fit."""

    def __init__(self, model: nn.Module, subject: Subject, device: torch.device, observer: Observer | None) -> None:
        self._model, self._subject, self._device, self._observer = model, subject, device, observer
        self._began_s, self._steps = time.perf_counter(), 0
        self._ran(0)
        accelerator_of(device).warm(device)
        optimizer = subject.optimizer
        state_bytes = 0 if optimizer is None else measure_optimizer(subject, optimizer, Here(device)).state_bytes
        self._ours = _run(subject, device, state_bytes)
        self._ran(2)
        self._plain: _VerifiedRun | None = None
        with IfItFits():
            with bare(model):
                self._plain = _run(subject, device, state_bytes)
            self._ran(2)
        self._seconds, self._plain_seconds = self._timed()
        self._recomputed_flops = subject.train(observe_storages(subject, device)).recomputed_flops
        self._ran(1)
        self.differences = {} if self._plain is None else differing(self._ours.outcome, self._plain.outcome)

    def _ran(self, steps: int) -> None:
        """Take note of steps that have run, and tell how far it is."""
        self._steps += steps
        if self._observer is not None:
            self._observer(Progress(phase="verifying", share=min(1.0, self._steps / _STEPS), slowdown=None))

    def _timed(self) -> tuple[float, float | None]:
        """Return the seconds of a step with the regions and of one without: each the median of some, run in turn.

        Only forward and backward count, as what the optimizer steps meanwhile is undone here.
        """
        device, now = self._device, accelerator_of(self._device).seconds
        ours, plain = list[float](), list[float]()
        for _ in range(_TIMED_RUNS):
            with marking_rehearsals(lambda _: now(device)) as marks:
                seconds = self._subject.train(observe_clock(device)).seconds
            ours.append(seconds - sum(marks[1::2]) + sum(marks[::2]))
            self._ran(1)
            if self._plain is not None:
                with bare(self._model):
                    plain.append(self._subject.train(observe_clock(device)).seconds)
                self._ran(1)
        return statistics.median(ours), statistics.median(plain) if plain else None

    def compared(self, peers: Peers, *, is_unclear: bool) -> StepComparison:
        """Return whether the results are equal; runs more steps if those of some process differ."""
        if self._plain is None or not is_unclear:
            return StepComparison(is_exact=None if self._plain is None else True)
        before = self._subject.runs
        found = explained(peers, self._subject, self._model, self._plain.outcome, self.differences)
        self._ran(self._subject.runs - before)
        return found

    def report(self, found: StepComparison) -> Report:
        """Return the report, with how the results compare."""
        model, ours, plain = self._model, self._ours, self._plain
        regions = sum(map(is_wrapped, model.modules()))
        return Report(
            **vars(found),
            peak_bytes=ours.peak_bytes,
            plain_peak_bytes=None if plain is None else plain.peak_bytes,
            predicted_bytes=_predicted(model, ours.before_bytes),
            kept_bytes=ours.kept_bytes,
            plain_kept_bytes=None if plain is None else plain.kept_bytes,
            seconds=self._seconds,
            plain_seconds=self._plain_seconds,
            recomputed_flops=self._recomputed_flops,
            regions=regions,
            no_effect=_why_not(model, ours, plain, regions),
            resident_bytes=ours.resident_bytes,
            slack_bytes=ours.slack_bytes,
            took_seconds=time.perf_counter() - self._began_s,
            steps=self._steps,
            predicted_slowdown=next((s for scope in applied_scopes(model) if (s := scope.slowdown) is not None), None),
        )


@dataclass(frozen=True, kw_only=True)
class _VerifiedRun:
    outcome: Outcome
    before_bytes: int
    peak_bytes: int
    kept_bytes: int
    resident_bytes: int
    slack_bytes: int


def _run(subject: Subject, device: torch.device, state_bytes: int) -> _VerifiedRun:
    """Run the step twice: for its results, then for its bytes, with `state_bytes` of an optimizer added."""
    outcome = outcome_of(subject)
    traced = subject.train(observe_allocations(subject, device))
    before = traced.before.total_bytes + state_bytes
    return _VerifiedRun(
        outcome=outcome,
        before_bytes=before,
        peak_bytes=before + traced.peak_bytes,
        kept_bytes=traced.kept_bytes,
        resident_bytes=traced.before.resident_bytes,
        slack_bytes=traced.trace.slack_bytes,
    )


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
