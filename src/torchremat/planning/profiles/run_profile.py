"""The profile of a step that takes gradients itself."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from torchremat.errors import UnsupportedError
from torchremat.measuring.runs import Subject
from torchremat.planning.devices.machines import Machine
from torchremat.planning.peers.peers import Peers
from torchremat.planning.profiles.optimizers import state_made
from torchremat.planning.profiles.reading import Profile, UnitCosts
from torchremat.planning.profiles.step_runs import StepRunner, StepRuns
from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.points import Lifetimes, UnitBytes
from torchremat.schedules.chain import KeepNode


def not_by_runs(why: str) -> UnsupportedError:
    """Return the error for a step that takes gradients itself, where it cannot be planned by running it."""
    return UnsupportedError(
        f"the step takes gradients itself (`torch.autograd.grad` in it), and is planned by running it under each plan. "
        f"{why}"
    )


@contextmanager
def as_profiled(subject: Subject, machine: Machine) -> Generator[None]:
    """Let a step run in the block as it has in its profile."""
    with machine.entered(), state_made(subject):
        yield


def profile_by_runs(
    model: nn.Module,
    subject: Subject,
    units: Units,
    machine: Machine,
    peers: Peers,
    beside: Profile | None = None,
) -> Profile:
    """Return the profile of a step that takes gradients itself: what a tree needs is what its run needs.

    Bytes and seconds of single units, for tables and for the order in which the search tries them, are the trace's.

    Args:
        model: The model.
        subject: The step.
        units: The units.
        machine: Where it runs.
        peers: The processes that run it together.
        beside: The profile of the same step over other units, if known.
    """
    plain_tree = tuple(map(KeepNode, range(len(units.units))))
    runner = StepRunner(model, subject, units, machine, peers)
    if beside is None or beside.runs is None:
        runs = StepRuns(plain_tree=plain_tree, runner=runner)
    else:
        runs = beside.runs.beside(plain_tree, runner)
    with subject.untouched():
        before = subject.before(machine.device)
    sizes = tuple(_size_of(units, unit) for unit in range(len(units.units)))
    forward_s, seconds = runs.seconds(plain_tree)
    made = Profile(
        units=units,
        sizes=sizes,
        lifetimes=Lifetimes(units, sizes),
        costs=(),
        order=(),
        extra_bytes={},
        after_bytes={},
        start_bytes=0,
        seconds=seconds,
        forward_seconds=forward_s,
        before=before,
        device=machine.device,
        optimizer=None if beside is None else beside.optimizer,
        overheads=machine.overheads(),
        generator_bytes=machine.generator_bytes,
        runs=runs,
    )
    scale = forward_s / made.nominal_forward_s if made.nominal_forward_s else 0.0
    costs = [_cost_of(units, unit, scale * nominal_s) for unit, (nominal_s, _) in enumerate(made.nominal_s)]
    return replace(made, costs=tuple(costs))


def _size_of(units: Units, unit: int) -> UnitBytes:
    """Return the bytes that a unit saves; those of its runs are not known alone."""
    trace, given = units.trace, {*units.units[unit].inputs}
    saved = {one for save in units.saves_in(unit) if save.dropped is None for one in save.storages if one >= 0}
    boundary = saved & (given | {*units.units[unit].outputs})
    return UnitBytes(
        saved=frozenset(boundary),
        left=frozenset(),
        captured=frozenset(),
        inside_bytes=sum(trace.storage_bytes[one] for one in saved - trace.fixed - boundary),
        **dict.fromkeys(_UNKNOWN, 0),
        has_backward=bool(saved),
    )


_UNKNOWN = (
    "drop_peak_bytes", "full_peak_bytes", "truncated_peak_bytes", "exit_bytes", "look_bytes", "state_bytes",
    "copied_bytes", "settle_bytes", "recast_bytes", "graph_bytes",
)  # fmt: skip


def _cost_of(units: Units, unit: int, seconds: float) -> UnitCosts:
    return UnitCosts(
        seconds=seconds,
        seconds_truncated=seconds,
        seconds_backward=2 * seconds,
        flops=units.flops(unit),
        flops_truncated=units.flops_truncated(unit),
    )
