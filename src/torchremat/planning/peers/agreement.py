"""Merges the profiles of several processes into one: the most bytes of any, and the most seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from torch import nn

from torchremat.errors import StepError
from torchremat.measuring.before import BytesBefore
from torchremat.measuring.communication import reduced_bytes
from torchremat.measuring.runs import Subject
from torchremat.measuring.store_speeds import Bandwidth
from torchremat.planning.devices.machines import Machine
from torchremat.planning.exactness.replayability import Repeats
from torchremat.planning.parameter_bytes import ParameterBytes
from torchremat.planning.peers.peers import SAME_STEP, Peers
from torchremat.planning.profiles.optimizers import OptimizerBytes
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.profiling import profile_subject
from torchremat.planning.profiles.reading import Profile, UnitCosts
from torchremat.planning.profiles.step_seconds import SteppingSeconds
from torchremat.planning.simulator.offload_choices import Parcel
from torchremat.planning.simulator.points import Key, ProgramPoint, UnitBytes

T = TypeVar("T", UnitBytes, BytesBefore, OptimizerBytes, ParameterBytes, SteppingSeconds, Bandwidth, Parcel)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a profile that processes send each other."""

    order: tuple[int, ...]
    storage_bytes: tuple[int, ...]
    sizes: tuple[UnitBytes, ...]
    costs: tuple[UnitCosts, ...]
    extra_bytes: dict[Key, int]
    after_bytes: dict[Key, int]
    start_bytes: int
    seconds: float
    forward_seconds: float
    before: BytesBefore
    optimizer: OptimizerBytes | None


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """A profile with the figures of all processes.

    Attributes:
        pair: The profile.
        largest: The index of the process with the largest step. It plans for all, since a profile contains
            more than processes send each other: operators, and the allocator's events.
    """

    pair: ProfilePair
    largest: int


def profiled_together(
    peers: Peers,
    model: nn.Module,
    subject: Subject,
    machine: Machine,
    repeats: Repeats | None,
    options: str,
    *,
    leaves: bool = True,
    allows: Callable[[int], bool] | None = None,
) -> Agreed:
    """Return the profile of a step, with the figures of all processes that plan together.

    Args:
        peers: These processes; others join if the step shows that it communicates with them.
        model: See `profile_subject`.
        subject: See `profile_subject`.
        machine: See `profile_subject`.
        repeats: See `profile_subject`.
        options: The options of this process, in words.
        leaves: See `profile_subject`.
        allows: See `profile_subject`.

    Raises:
        StepError: See `profile_subject`; or the processes do not run the same step, or have different options.
    """
    advice = "Processes that communicate get one plan: give them the same options."
    peers.check_equal("the request", options, advice)
    found = profile_subject(model, subject, machine, leaves=leaves, allows=allows, peers=peers, repeats=repeats)
    peers.check_equal("the request", options, advice)
    pair = beside(found, reduced_bytes(model, machine.device))
    told = peers.all(lambda: (figures_of(pair.blocks), None if pair.leaves is None else figures_of(pair.leaves)))
    largest = max(range(len(told)), key=lambda place: sum(told[place][0].storage_bytes))
    return Agreed(pair=pair if len(told) == 1 else agreed_pair(pair, told), largest=largest)


def figures_of(profile: Profile) -> Figures:
    """Return the figures of a profile to send to other processes."""
    own = {one.name: getattr(profile, one.name) for one in fields(Figures) if one.name != "storage_bytes"}
    return Figures(storage_bytes=tuple(profile.units.trace.storage_bytes.values()), **own)


def beside(pair: ProfilePair, waiting_bytes: int) -> ProfilePair:
    """Return the profile of a step in whose backward `waiting_bytes` may be live in addition to the measured bytes."""
    return pair.each(lambda own: _beside(own, waiting_bytes))


def _beside(profile: Profile, waiting_bytes: int) -> Profile:
    if not waiting_bytes:
        return profile
    if profile.runs is not None and profile.runs.runner is not None:
        profile.runs.runner.waiting_bytes = waiting_bytes
    forward = (ProgramPoint.FORWARD, ProgramPoint.LEFT, ProgramPoint.END)
    extra = {key: size + waiting_bytes * (key[0] not in forward) for key, size in profile.extra_bytes.items()}
    return replace(profile, extra_bytes=extra)


def agreed_pair(pair: ProfilePair, told: Sequence[tuple[Figures, Figures | None]]) -> ProfilePair:
    """Return the profile of a process with the figures of all.

    Raises:
        StepError: Backward reaches the modules in another order than in the first process.
    """
    blocks = _agreed(pair.blocks, [one for one, _ in told])
    leaves = [one for _, one in told if one is not None]
    if pair.leaves is None or len(leaves) < len(told):
        return ProfilePair(blocks=blocks, leaves=None)
    return ProfilePair(blocks=blocks, leaves=_agreed(pair.leaves, leaves))


def _agreed(profile: Profile, told: Sequence[Figures]) -> Profile:
    first = told[0]
    for rank, one in enumerate(told):
        if (one.order, len(one.storage_bytes)) != (first.order, len(first.storage_bytes)):
            raise StepError(
                f"process {rank} passed other tensors between its modules than process 0, or came to them in backward "
                f"in another order: {len(one.storage_bytes)} tensors, and calls {one.order}, against "
                f"{len(first.storage_bytes)} and {first.order}. {SAME_STEP}"
            )
    storages = dict(enumerate(max(sizes) for sizes in zip(*(one.storage_bytes for one in told), strict=True)))
    sizes = tuple(most(of_unit) for of_unit in zip(*(one.sizes for one in told), strict=True))
    pairs = enumerate(zip(profile.sizes, sizes, strict=True))
    smaller = {unit for unit, (own, of_all) in pairs if own.inside_bytes < of_all.inside_bytes}
    trace = replace(profile.units.trace, storage_bytes=storages)
    units = replace(profile.units, trace=trace, unequal=profile.units.unequal | smaller)
    optimizers = [one.optimizer for one in told if one.optimizer is not None]
    return replace(
        profile,
        units=units,
        sizes=sizes,
        costs=tuple(
            _slowest(own, of_unit)
            for own, of_unit in zip(profile.costs, zip(*(one.costs for one in told), strict=True), strict=True)
        ),
        extra_bytes=_highest([one.extra_bytes for one in told]),
        after_bytes=_highest([one.after_bytes for one in told]),
        start_bytes=max(one.start_bytes for one in told),
        seconds=max(one.seconds for one in told),
        forward_seconds=max(one.forward_seconds for one in told),
        before=most([one.before for one in told]),
        optimizer=most(optimizers) if optimizers else None,
    )


def _highest(told: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    return {key: max(one.get(key, value) for one in told) for key, value in told[0].items()}


def most(told: Sequence[T]) -> T:
    """Return the highest number of each field; a field that is no number comes from the first process."""
    first = told[0]
    numbers = {one.name for one in fields(first) if type(getattr(first, one.name)) in (int, float)}
    return replace(first, **{name: max(getattr(one, name) for one in told) for name in numbers})


def _slowest(own: UnitCosts, told: Sequence[UnitCosts]) -> UnitCosts:
    """Return costs with the most of each field in seconds; flops come from this process's operators."""
    names = {one.name for one in fields(own) if not one.name.startswith("flops")}
    return replace(own, **{name: max(getattr(one, name) for one in told) for name in names})
