"""A watched microbatch among several in one backward: the weight gradients that autograd holds.

One backward runs all microbatches, and autograd sums the gradients of a weight before it adds the sum to `.grad`. A new
gradient has this fate:

    microbatch     the new gradient                                              live for its weight
    first          stays                                                         this one, from then on
    second         is added, out of place if the first one is a view, and freed  a sum, all the time
    others         is added and freed                                            a sum, all the time
    last           is added to the sum and this to `.grad`, and both are freed   a sum, until then

A microbatch by itself adds it to `.grad` and frees it. So the events of a single microbatch equal the events of each of
these except for the rows above, and a profile of the changed events has the peaks of these.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch import Tensor, nn

from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.traces import AllocationRecorder, AllocationTrace, TraceMark
from torchremat.planning.devices.machines import Here
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.profiles.watched_step import watch
from torchremat.planning.profiles.watching import every_unit
from torchremat.planning.searches.granularity import Mixtures
from torchremat.planning.searches.microbatches import SumsPrediction
from torchremat.planning.searches.options import options_like
from torchremat.planning.simulator.prediction import Candidate, predict
from torchremat.regions.selective.kept import memory_of


@dataclass(frozen=True, kw_only=True)
class _BackwardPlace:
    """The place of a microbatch's backward in their order; of two the second is the last."""

    is_first: bool = False
    is_second: bool = False
    is_last: bool = False


class Sums:
    """Predicts the backwards of microbatches, for trees over the units of a profile or of a mixture of it."""

    def __init__(self, module: nn.Module, step: Step, pair: ProfilePair, microbatches: int) -> None:
        subject = subject_of(step, module, None, needs_model=True, accumulates=True)
        with heap_set_aside():
            runs = {id(one): _SumsRun(module, subject, one) for one in pair.all}
        are_two = microbatches == 2
        places = (
            _BackwardPlace(is_first=True),
            _BackwardPlace(is_second=True, is_last=are_two),
            _BackwardPlace(is_second=are_two, is_last=True),
        )
        self._mixtures = Mixtures(pair.each(lambda own, at=place: runs[id(own)].profile(at)) for place in places)

    def predict(self, candidate: Candidate) -> SumsPrediction:
        """Return the peaks of the backwards under a tree."""
        own = self._mixtures.like(candidate.profile.units)
        first, second, last = (predict(one, candidate.tree).backward_bytes for one in own)
        return SumsPrediction(first_bytes=first, second_bytes=second, last_bytes=last)


@dataclass(frozen=True, kw_only=True)
class _WeightGradient:
    """A gradient of a weight.

    Attributes:
        mark: When it is complete.
        pointer: Its address; None if it exposes none.
        size_bytes: Of the weight.
        is_view: Whether it is a view of another tensor, so that autograd does not add to it in place.
    """

    mark: int
    pointer: int | None
    size_bytes: int
    is_view: bool


class _SumsRun:
    """A watched step in which gradients of weights are noted."""

    def __init__(self, module: nn.Module, subject: Subject, whole: Profile) -> None:
        self._whole = whole
        self._parameters = [one for one in module.parameters() if one.requires_grad]
        self._made: list[_WeightGradient] = []
        units, here = whole.units, Here(whole.device)
        self._step = subject.train(watch(module, subject, units, every_unit(units), here, noting=self._note_gradients))
        self._intervals = self._step.run.trace.intervals

    @contextmanager
    def _note_gradients(self, recorder: AllocationRecorder) -> Generator[None]:
        with ExitStack() as stack:
            for parameter in self._parameters:
                stack.callback(parameter.register_hook(partial(self._note, recorder, parameter.nbytes)).remove)
            yield

    def _note(self, recorder: AllocationRecorder, size_bytes: int, gradient: Tensor) -> None:
        memory = memory_of(gradient)
        pointer = None if memory is None else recorder.pointer_of(memory)
        mark = recorder.mark("gradient")
        self._made.append(
            _WeightGradient(mark=mark, pointer=pointer, size_bytes=size_bytes, is_view=gradient._is_view())
        )

    def profile(self, place: _BackwardPlace) -> Profile:
        """Return the profile of a backward in its place."""
        found = self._step.profile(self._trace(place))
        read = replace(
            self._whole,
            sizes=found.sizes,
            lifetimes=found.lifetimes,
            extra_bytes=found.extra_bytes,
            after_bytes=found.after_bytes,
            backwards=found.backwards,
        )
        return replace(read, options=options_like(self._whole.options, read))

    def _trace(self, place: _BackwardPlace) -> AllocationTrace:
        """Return the events of a backward in its place."""
        trace = self._step.run.trace
        delta = trace.delta_bytes.copy()
        more: list[tuple[int, int]] = []  # the mark and the bytes of each
        for made in self._made:
            freed = self._find_free(made)
            if place.is_first and freed is not None:
                delta[freed] = 0
            elif place.is_first:
                more.append((made.mark, made.size_bytes))
            if place.is_second and made.is_view:
                more += [(made.mark, made.size_bytes), (made.mark, -made.size_bytes)]
            if place.is_last:
                more.append((made.mark, -made.size_bytes))
        return _with_events(replace(trace, delta_bytes=delta), more)

    def _find_free(self, made: _WeightGradient) -> int | None:
        """Return the event that frees a gradient; None if there is none."""
        trace = self._step.run.trace
        position = trace.marks[made.mark].position
        for allocated, freed in self._intervals.get(made.pointer or 0, ()):
            if allocated < position <= freed < len(trace.delta_bytes):
                return freed
        return None


def _with_events(trace: AllocationTrace, events: list[tuple[int, int]]) -> AllocationTrace:
    """Return a trace with more events, each given by its mark and its bytes; they have no address."""
    ids = np.array([mark for mark, _ in events], np.int64)
    at = np.array([trace.marks[mark].position for mark in ids], np.int64)

    def before(mark: TraceMark) -> int:
        return int(((at < mark.position) | ((at == mark.position) & (ids < mark.id))).sum())

    return replace(
        trace,
        time_ns=np.insert(trace.time_ns, at, [trace.marks[mark].time_ns for mark in ids]),
        ptr=np.insert(trace.ptr, at, -1 - np.arange(len(events))),
        delta_bytes=np.insert(trace.delta_bytes, at, [size for _, size in events]),
        marks=tuple(mark._replace(position=mark.position + before(mark)) for mark in trace.marks),
    )
