"""Splits a profile into a form, which is independent of shapes, and figures, which depend on them.

    form       the calls, storages, live ranges, units, the order of backward: the same for every batch of a family
    figures    bytes and flops, in an order that the form fixes: one row of numbers for each shape

Missing on purpose: seconds. They are noisy, so no curve fits them; the seconds of the nearest shape are scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.points import OptionBytes, UnitBytes
from torchremat.planning.simulator.simulator import Options

Figures = NDArray[np.float64]

_Other = Callable[[int], int]

Sized = TypeVar("Sized", UnitBytes, OptionBytes)

# The fields that are figures.
_SIZED = {
    kind: [one.name for one in fields(kind) if one.name.endswith("_bytes") or one.name == "flops"]
    for kind in (UnitBytes, OptionBytes)
}
# Its bytes are over those of tensors that are partly gone by then.
_BELOW_0 = "late_peak_bytes"


@dataclass(frozen=True, kw_only=True)
class ProfileForm:
    """The parts of a profile that shapes may not change, for comparison.

    Attributes:
        blocks: Form of the calls, and of the units.
        leaves: Form of the calls inside units; None if they were not watched.
    """

    blocks: tuple[object, ...]
    leaves: tuple[object, ...] | None

    def fits(self, other: ProfileForm) -> bool:
        """Return whether two profiles have the same form, in the parts that both have."""
        return self.blocks == other.blocks and (None in (self.leaves, other.leaves) or self.leaves == other.leaves)


def form_of(pair: ProfilePair) -> ProfileForm:
    """Return the form of a profile."""
    blocks = _trace_form(pair.blocks.units.trace), _profile_form(pair.blocks)
    return ProfileForm(blocks=blocks, leaves=None if pair.leaves is None else _profile_form(pair.leaves))


def _trace_form(trace: Trace) -> tuple[object, ...]:
    calls = tuple(
        (
            (call.name, call.kind, call.number, call.parent, call.grad, call.entered, call.left),
            tuple((seen.identity, seen.version, seen.storage) for seen in (*call.inputs, *call.outputs)),
            (len(call.inputs), tuple(call.mutated), tuple(map(astuple, call.saved)), call.carried),
        )
        for call in trace.calls
    )
    lives = (tuple(trace.born.items()), tuple(sorted(trace.died.items())), trace.end)
    return calls, trace.fixed, lives, tuple(map(astuple, trace.step_saved)), tuple(trace.storage_bytes)


def _profile_form(profile: Profile) -> tuple[object, ...]:
    sizes = tuple((size.saved, size.left, size.captured, size.has_backward) for size in profile.sizes)
    units = profile.units
    trees = () if profile.runs is None else profile.runs.trees
    return units.units, units.roots, units.others, sizes, profile.order, tuple(profile.extra_bytes), trees


def figures_of(profile: Profile) -> Figures:
    """Return the figures of a profile."""
    return _noted(partial(_mapped, profile))


def with_figures(profile: Profile, figures: Figures) -> Profile:
    """Return a profile of the same form with other figures; its seconds are scaled like its flops.

    Fractional figures are rounded up. Figures that cannot be negative are at least 0.
    """
    return _mapped(profile, _read(figures))


def figures_of_options(options: Options) -> Figures:
    """Return the figures of options."""
    return _noted(partial(_mapped_options, options))


def with_option_figures(options: Options, figures: Figures, factor: float) -> Options:
    """Return options with other figures, as `with_figures` does, and with `factor` times their seconds."""
    return _mapped_options(options, _read(figures), factor)


def _noted(mapped: Callable[[_Other], object]) -> Figures:
    """Return the figures that are asked for, each of which stays."""
    found: list[int] = []

    def other(figure: int) -> int:
        found.append(figure)
        return figure

    mapped(other)
    return np.array(found, np.float64)


def _read(figures: Figures) -> _Other:
    numbers = iter(np.ceil(figures - 1e-3).astype(np.int64).tolist())
    return lambda _: next(numbers)


def _mapped(profile: Profile, other: _Other) -> Profile:
    """Return a profile with another figure in place of each, in an order that the form fixes."""

    def size(figure: int) -> int:
        return max(0, other(figure))

    units, old = profile.units, profile.units.trace
    flops = size(old.flops)
    factor = flops / old.flops if old.flops else 1.0
    trace = replace(
        old,
        flops=flops,
        storage_bytes={storage: size(own) for storage, own in old.storage_bytes.items()},
        calls=[replace(call, flops=size(call.flops), flops_saved=size(call.flops_saved)) for call in old.calls],
    )
    return replace(
        profile,
        backwards={},
        units=Units(trace=trace, roots=units.roots, units=units.units, others=units.others, opened=units.opened),
        sizes=tuple(_sized(own, other) for own in profile.sizes),
        costs=tuple(
            replace(cost.slower(factor), flops=size(cost.flops), flops_truncated=size(cost.flops_truncated))
            for cost in profile.costs
        ),
        options=_mapped_options(profile.options, other, factor),
        extra_bytes={key: other(own) for key, own in profile.extra_bytes.items()},
        after_bytes={key: size(profile.after_bytes[key]) for key in profile.extra_bytes},
        start_bytes=size(profile.start_bytes),
        before=replace(profile.before, input_bytes=size(profile.before.input_bytes)),
        seconds=profile.seconds * factor,
        forward_seconds=profile.forward_seconds * factor,
        runs=None if profile.runs is None else profile.runs.mapped(size, factor),
    )


def _mapped_options(options: Options, other: _Other, factor: float = 1.0) -> Options:
    return tuple(tuple(_sized(one.slower(factor), other) for one in own) for own in options)


def _sized(own: Sized, other: _Other) -> Sized:
    found = {name: other(getattr(own, name)) for name in _SIZED[type(own)]}
    return replace(own, **{name: size if name == _BELOW_0 else max(0, size) for name, size in found.items()})
