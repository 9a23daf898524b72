"""A watched microbatch whose backward is split: the tensors that stay between its two passes, and both peaks.

As in a profile every unit is a region, in a session, so the run holds no more than any plan must. The tensors that stay
for the weights are read out of the session; gradients that wait for the weight pass are live in addition.

    marks    forward     input pass of each unit               weight pass
    read                 recomputed: tensors it created        peak above the bytes at its beginning
                         next one: which of them are freed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace

from torch import Tensor, nn

from torchremat._compat.pipelining import run_input_pass, run_weight_pass
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import Subject, subject_of
from torchremat.measuring.storages import address_of
from torchremat.planning.devices.machines import Here
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.watching import Watcher, every_unit
from torchremat.planning.searches.granularity import Mixtures
from torchremat.planning.simulator.points import Key, Lifetimes, Live, ProgramPoint
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.simulator.split_backward import InputPassSimulator, SplitPrediction, SplitUnitBytes, input_pass
from torchremat.regions.footprints import footprint_bytes, waiting_storages
from torchremat.regions.sessions import Session
from torchremat.regions.settings import Settings
from torchremat.regions.slots import Recomputable
from torchremat.stages.samples import Ends


class SplitBackward:
    """Predicts the bytes of both passes, for trees over the units of a profile or of a mixture of its granularities.

    Raises:
        VersionError: This torch has no such passes.
    """

    def __init__(self, module: nn.Module, step: Callable[[nn.Module], Ends], pair: ProfilePair) -> None:
        subject = subject_of(step, module, None, needs_model=True, accumulates=True)
        with heap_set_aside():
            runs = {id(one): _SplitRun(module, step, subject, one) for one in pair.all}
        self._mixtures = Mixtures([pair.each(lambda own: runs[id(own)].profile())], stays=True)
        self._weight_rise_bytes = max(run.weight_rise_bytes for run in runs.values())

    def predict(self, candidate: Candidate, ahead: bool = False) -> SplitPrediction:
        """Return the bytes of both passes under a tree.

        With `ahead`, microbatches may be recomputed before their gradient comes.
        """
        (own,), kept_bytes = self._mixtures.like(candidate.profile.units), candidate.prediction.kept_bytes

        def simulator() -> InputPassSimulator:
            options, offloads = candidate.profile.options, candidate.offloads
            return InputPassSimulator(own.units, own.sizes, own.order, own.lifetimes, candidate.tree, options, offloads)

        highest, between = input_pass(own, simulator(), kept_bytes=kept_bytes)
        if ahead:
            highest = max(highest, input_pass(own, simulator(), kept_bytes=kept_bytes, ahead=True)[0])
        return SplitPrediction(
            input_bytes=max(0, highest),
            between_bytes=max(0, between),
            weight_bytes=max(0, between + self._weight_rise_bytes),
        )


class _Unneeded:
    """Watches a session for tensors that weights needed after they were dropped."""

    def __init__(self) -> None:
        self.was_needed = False

    def recomputing(self, number: int) -> None:
        """See `Watch`."""

    def recomputed(self, number: int, region: Recomputable, *, is_whole: bool) -> None:
        """See `Watch`."""

    def dropped_too_early(self) -> None:
        """See `Watch`."""
        self.was_needed = True


class _SplitRun:
    """One microbatch with every unit of a profile as a region, its backward split."""

    def __init__(self, module: nn.Module, step: Callable[[nn.Module], Ends], subject: Subject, whole: Profile) -> None:
        self.whole = whole
        self.tree = every_unit(whole.units)
        if not self._watch(module, step, subject, drops=True):
            self._watch(module, step, subject, drops=False)

    def _watch(self, module: nn.Module, step: Callable[[nn.Module], Ends], subject: Subject, *, drops: bool) -> bool:
        """Run the microbatch as sessions of stages do, and return whether no weight needed a dropped tensor."""
        units, machine, watch = self.whole.units, Here(self.whole.device), _Unneeded()
        fixed = [*module.parameters(), *module.buffers()]
        with subject.untouched(), machine.record() as recorder, closing(Session(watch=watch)) as session:
            self.watcher = watcher = Watcher(units, recorder.mark, recorder.pointer_of, fixed)
            with installed(module, calls_of(units), self.tree, Settings(observer=watcher)):
                with session.active():
                    ends = step(module)
                self.forward = recorder.mark("forward")
                with session.active(), session.input_pass() if drops else nullcontext():
                    groups = run_input_pass(ends.roots, ends.grads, ends.inputs, ends.outputs, module)
                self.between = recorder.mark("between")
                self.left = [own.region is None or own.region() is None for own in watcher.watched]
                self.needs = [self._needs(unit, session) for unit in range(len(units.units))]
                self.outputs = self._numbers(ends.outputs)
                with session.active():
                    run_weight_pass(groups, module)
                self.ends = recorder.mark("end")
            del ends, groups
        self._trace = recorder.trace
        return not watch.was_needed

    def _needs(self, unit: int, session: Session) -> tuple[frozenset[int], int]:
        """Return the inputs of a unit that weights need, and the bytes of the unit's other tensors that they need."""
        own = self.watcher.watched[unit]
        region = None if own.region is None else own.region()
        if region is None:
            return frozenset(), 0
        waiting = {address_of(storage) for storage in waiting_storages(region, session)}
        inputs = {number for address, number in own.inputs.items() if address in waiting}
        return frozenset(inputs & self.whole.sizes[unit].saved), footprint_bytes(region, session)

    def _numbers(self, tensors: Sequence[Tensor]) -> set[int]:
        """Return the numbers in the trace of the storages of the stage's outputs."""
        known = {address: number for own in self.watcher.watched for address, number in own.outputs.items()}
        addresses = (address_of(tensor.untyped_storage()) for tensor in tensors)
        return {known[address] for address in addresses if address in known}

    @property
    def weight_rise_bytes(self) -> int:
        """The peak of the weight pass above the bytes live at its beginning."""
        live, begin, end = self._trace.live, self._position(self.between), self._position(self.ends)
        return int(live[begin : end + 1].max() - live[begin])

    def profile(self) -> Profile:
        """Return the profile of this backward, in which the stage's outputs live until its end."""
        watched, whole = self.watcher.watched, self.whole
        live = self.watcher.without_copies(self._trace).live
        order = [unit for unit in self.watcher.order if watched[unit].recompute < self.between]
        starts = [self._position(watched[unit].recompute) for unit in order] + [self._position(self.between)]
        stays = self._stays(order)
        sizes = tuple(
            SplitUnitBytes(
                **vars(size),
                needed=needed,
                needed_bytes=needed_bytes,
                stays_peak_bytes=stays.get(unit, 0),
                is_left=self.left[unit],
            )
            for unit, (size, (needed, needed_bytes)) in enumerate(zip(whole.sizes, self.needs, strict=True))
        )
        begin = self._position(self.forward)
        after: dict[Key, int] = {(ProgramPoint.END, 0): int(live[begin : starts[0] + 1].max() - live[begin])}
        at: dict[Key, int] = {}
        for unit, start, end in zip(order, starts, starts[1:], strict=False):
            middle = self._position(watched[unit].recomputed)
            at[ProgramPoint.RECOMPUTE, unit], at[ProgramPoint.BACKWARD, unit] = int(live[start]), int(live[middle])
            at[ProgramPoint.RELEASED, unit] = int(live[end])
            after[ProgramPoint.BACKWARD, unit] = int(live[middle : end + 1].max() - live[middle])
            after[ProgramPoint.RECOMPUTE, unit] = after[ProgramPoint.RELEASED, unit] = 0
        died = {storage: time for storage, time in whole.units.trace.died.items() if storage not in self.outputs}
        units = replace(whole.units, trace=replace(whole.units.trace, died=died))
        lifetimes = Lifetimes(units, sizes, whole.lifetimes.boundary)
        simulator = InputPassSimulator(units, sizes, tuple(order), lifetimes, self.tree)
        for _ in simulator.forward():
            pass
        extra = {
            state.key: at[state.key] - state.held_bytes for state in simulator.backward() if isinstance(state, Live)
        }
        return replace(
            whole,
            units=units,
            sizes=sizes,
            lifetimes=lifetimes,
            order=tuple(order),
            extra_bytes=whole.extra_bytes | extra,
            after_bytes=whole.after_bytes | after,
        )

    def _stays(self, order: Sequence[int]) -> dict[int, int]:
        """For each unit the peak of its backward if nothing is freed that its recompute has created."""
        live, watched, found = self._trace.live, self.watcher.watched, dict[int, int]()
        allocated_at = {freed: allocated for those in self._trace.intervals.values() for allocated, freed in those}
        ends = [self._position(watched[unit].recompute) for unit in order[1:]] + [self._position(self.between)]
        for unit, end in zip(order, ends, strict=True):
            begin, middle = self._position(watched[unit].recompute), self._position(watched[unit].recomputed)
            stays = live[middle : end + 1] - live[middle]
            for freed in range(middle, end):
                allocated = allocated_at.get(freed, -1)
                if begin <= allocated < middle:
                    stays[freed - middle + 1 :] += int(self._trace.delta_bytes[allocated])
            found[unit] = int(stays.max())
        return found

    def _position(self, mark: int) -> int:
        return self._trace.marks[mark].position
