"""The split of a profile into a form, which is independent of shapes, and figures, which depend on them.

    form       the calls, storages, live ranges, units, the order of backward: the same for every batch of a family
    figures    bytes and flops, in an order that the form fixes: one row of numbers for each shape

Missing on purpose: seconds. They are noisy, so no curve fits them; the seconds of the nearest shape are scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from torchremat.planning.profiles.profiling import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.units import Units
from torchremat.planning.simulator.simulator import Options

Figures = NDArray[np.float64]

# All byte counts of `UnitBytes`.
_SIZES = (
    "inside_bytes",
    "drop_peak_bytes",
    "full_peak_bytes",
    "truncated_peak_bytes",
    "exit_bytes",
    "look_bytes",
    "state_bytes",
    "copied_bytes",
    "settle_bytes",
    "recast_bytes",
    "graph_bytes",
)
# The byte and flop counts of `OptionBytes` that are at least 0; `late_peak_bytes` follows them.
_OPTION_SIZES = (
    "kept_bytes",
    "forward_peak_bytes",
    "early_peak_bytes",
    "recompute_peak_bytes",
    "ahead_peak_bytes",
    "flops",
)


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
    sizes = tuple((size.saved, size.left, size.has_backward) for size in profile.sizes)
    units = profile.units
    return units.units, units.roots, units.others, sizes, profile.order, tuple(profile.extra_bytes)


def figures_of(profile: Profile) -> Figures:
    """Return the figures of a profile."""
    return np.fromiter(_figures(profile), np.float64)


def _figures(profile: Profile) -> Iterator[int]:
    trace = profile.units.trace
    yield trace.flops
    yield from trace.storage_bytes.values()
    for call in trace.calls:
        yield call.flops
        yield call.flops_saved
    for size in profile.sizes:
        for name in _SIZES:
            yield cast(int, getattr(size, name))
    for cost in profile.costs:
        yield cost.flops
        yield cost.flops_truncated
    yield from option_figures(profile.options)
    yield from profile.extra_bytes.values()
    yield from (profile.after_bytes[key] for key in profile.extra_bytes)
    yield profile.start_bytes
    yield profile.before.input_bytes


def option_figures(options: Options) -> Iterator[int]:
    """Yield the figures of options."""
    names = (*_OPTION_SIZES, "late_peak_bytes")
    return (cast(int, getattr(option, name)) for own in options for option in own for name in names)


def with_option_figures(options: Options, numbers: Iterator[int], factor: float) -> Options:
    """Return options with other figures, and with `factor` times their seconds."""
    return tuple(
        tuple(
            replace(
                one.slower(factor),
                **{name: max(0, next(numbers)) for name in _OPTION_SIZES},
                late_peak_bytes=next(numbers),  # over what is partly gone by then: below 0
            )
            for one in own
        )
        for own in options
    )


def rounded_up(figures: Figures) -> Iterator[int]:
    """Yield figures as whole numbers."""
    return iter(np.ceil(figures - 1e-3).astype(np.int64).tolist())


def with_figures(profile: Profile, figures: Figures) -> Profile:
    """Return a profile of the same form with other figures; its seconds are scaled like its flops.

    Fractional figures are rounded up. Figures that cannot be negative are at least 0.
    """
    numbers = rounded_up(figures)

    def size() -> int:
        return max(0, next(numbers))

    old = profile.units.trace
    flops = size()
    factor = flops / old.flops if old.flops else 1.0
    storage_bytes = {storage: size() for storage in old.storage_bytes}
    calls = [replace(call, flops=size(), flops_saved=size()) for call in old.calls]
    trace = replace(old, flops=flops, storage_bytes=storage_bytes, calls=calls)
    sizes = tuple(replace(one, **{name: size() for name in _SIZES}) for one in profile.sizes)
    costs = tuple(replace(cost.slower(factor), flops=size(), flops_truncated=size()) for cost in profile.costs)
    options = with_option_figures(profile.options, numbers, factor)
    units = profile.units
    return replace(
        profile,
        options=options,
        backwards={},
        units=Units(trace=trace, roots=units.roots, units=units.units, others=units.others, opened=units.opened),
        sizes=sizes,
        costs=costs,
        extra_bytes={key: next(numbers) for key in profile.extra_bytes},
        after_bytes={key: size() for key in profile.extra_bytes},
        start_bytes=size(),
        before=replace(profile.before, input_bytes=size()),
        seconds=profile.seconds * factor,
        forward_seconds=profile.forward_seconds * factor,
    )
