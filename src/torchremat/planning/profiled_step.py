"""A step that was profiled, with the search for plans of it; and the check of a request before any of this work."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeVar

from torch import nn
from torch.optim import Optimizer

from torchremat.errors import DeviceWarning, warn
from torchremat.measuring.before import BytesBefore
from torchremat.measuring.exhaustion import IfItFits
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.observers import observe_allocations
from torchremat.measuring.optimizers import parameters_of
from torchremat.measuring.runs import subject_of
from torchremat.planning.bounds.plain_step import ABOVE, TAKES_GRADIENTS, PlainStep, Unseen, plain_step
from torchremat.planning.budgets import bytes_of, check_budget
from torchremat.planning.devices.device import device_of
from torchremat.planning.devices.fakes import torch_device
from torchremat.planning.devices.machines import has_room
from torchremat.planning.layout import bare
from torchremat.planning.peers.agreement import most, profiled_together
from torchremat.planning.placed_step import PlacedStep
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.optimizers import measure_optimizer, state_made
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.run_profile import not_by_runs
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.results.plan_data import PlainSource
from torchremat.planning.searches.search import Search, TreeSearch
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.trials import RunSearch
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping
from torchremat.planning.store_profiles import weighed
from torchremat.tensors.parts import parts_of

T = TypeVar("T")

# Predictions are exact for most models, and off by some hundred bytes where kernels choose workspace by alignment,
# whatever the size of the model. This many bytes of a budget are left free for that.
ROOM_BYTES = 4096

# The reported share of the search when the plan is found, and only the lowest peak is still sought.
SOLVING_SHARE = 0.75


class ProfiledStep:
    """A step that was profiled in one way of stepping, with the search over it: the figures of plans and frontiers.

    Args:
        placed: The step where it runs.
        stepping: The way.
        first: The profile in the first way, which knows the plain step; None if this is the first.

    Attributes:
        placed: The step where it runs.
        stepping: The way in which the optimizer steps.
        parameters: The bytes of parameters that wait in a store.
        profile: See `Planner`.
        solver: See `Planner`.
        subject: See `Planner`.
        model: The model.
        options: The options.
    """

    def __init__(
        self,
        placed: PlacedStep,
        stepping: Stepping = PLAIN_STEPPING,
        first: ProfiledStep | None = None,
    ) -> None:
        self.placed, self.stepping = placed, stepping
        self.model, self.options, self.subject = placed.model, placed.options, placed.subject
        self._machine, self._peers = placed.machine, placed.peers
        self._first = first
        self._plain: tuple[int, PlainSource] | None = None
        search_budget = SearchBudget(observer=self.options.progress or None)
        search_budget.tell("profiling", None)
        with self._peers.together(), placed.profiling(), placed.stepping(stepping):
            agreed = profiled_together(
                self._peers,
                placed.profiled,
                self.subject,
                self._machine,
                placed.repeats,
                self.options.in_words,
                allows=placed.allows,
            )
            pair, self._leader = agreed.pair, agreed.largest if first is None else first._leader
            stores = self.options.stores
            if stores and pair.blocks.runs is not None:
                raise not_by_runs(
                    "Such a plan stores nothing: leave out `stores=`, and put `with torchremat.offload(store)` around "
                    "the step, also under the plan, which stores what both graphs save."
                )
            store_profiles = weighed(self.model, self.subject, pair, stores, self._peers)
            self.parameters = placed.parameter_bytes(stepping, pair.blocks.units.trace)
        if self._machine.notice:
            warn(self._machine.notice, DeviceWarning)
        self.profile: Profile = pair.blocks
        for own in pair.all:
            if own.runs is not None and own.runs.runner is not None:
                own.runs.runner.let(self._profiled_state)
        with placed.profiling():
            self.solver: TreeSearch = (
                Search(pair, self.options, store_profiles, search_budget=search_budget)
                if self.profile.runs is None
                else RunSearch(pair, self.options, search_budget=search_budget)
            )

    @contextmanager
    def _profiled_state(self) -> Generator[None]:
        with bare(self.model), self._machine.entered(), self.placed.stepping(self.stepping):
            yield

    @property
    def before(self) -> BytesBefore:
        """Live bytes before the first step."""
        before = self.profile.before
        return replace(before, parameter_bytes=before.parameter_bytes + self.parameters.held_bytes)

    @property
    def fixed_bytes(self) -> int:
        """Live bytes before every step except the first: they include the optimizer's state.

        Of parameters that wait in a store they include the most that are in memory at once.
        """
        state = self.profile.optimizer.state_bytes if self.profile.optimizer is not None else 0
        return self.before.total_bytes + state + self.parameters.room_bytes

    @property
    def optimizer_peak_bytes(self) -> int | None:
        """The peak of `optimizer.step()`, or None without an optimizer."""
        optimizer = self.profile.optimizer
        if optimizer is None:
            return None
        return self.before.total_bytes + optimizer.peak_bytes + self.parameters.step_room_bytes

    def peak_of(self, candidate: Candidate) -> int:
        """Return the predicted peak of a training step under a tree, in absolute bytes."""
        return max(self.fixed_bytes + candidate.prediction.peak_bytes, self.optimizer_peak_bytes or 0)

    @property
    def lowest_bytes(self) -> int:
        """The smallest budget for which a plan exists in this way, with a little room for errors of the prediction."""
        lowest_bytes = self.peak_of(self.solver.floor)
        is_plain = self.peak_of(self.solver.plain) <= lowest_bytes  # which needs no room
        return lowest_bytes if is_plain else self.budget_for(lowest_bytes)

    @property
    def smallest_bytes(self) -> int:
        """The budget `"min"`: the lowest, or a little more where the very lowest peak takes runs in runs."""
        return self.lowest_bytes + int(self.solver.spare_share * self.solver.floor.prediction.peak_bytes)

    def budget_for(self, peak_bytes: int) -> int:
        """Return the smallest budget for which a plan with a predicted peak is made."""
        return peak_bytes + ROOM_BYTES

    def best(self, limit_bytes: int) -> Solution | None:
        """Return the cheapest tree found under which a step stays within a limit, in absolute bytes, if any does."""
        if self.peak_of(self.solver.plain) > limit_bytes:
            limit_bytes -= ROOM_BYTES
        search_budget = self.solver.search_budget
        with heap_set_aside(), search_budget.running():
            with search_budget.part(0.0, SOLVING_SHARE):
                fits = limit_bytes >= (self.optimizer_peak_bytes or 0)
                found = self.solver.solve(limit_bytes - self.fixed_bytes) if fits else None
            with search_budget.part(SOLVING_SHARE, 1.0):
                _ = self.solver.floor  # which the plan and the error report
        return None if found is None else Solution(profiled=self, candidate=found)

    @cached_property
    def added_s(self) -> float:
        """Seconds that the way of stepping adds to a step."""
        return self.placed.added_s(self.stepping, self.profile.seconds - self.profile.forward_seconds)

    # ---------------------------------------------------------------------------------------------- the plain step

    @cached_property
    def released_bytes(self) -> int:
        """Bytes of the gradients that a plain step has in memory at its end, and a step in this way has not."""
        device, given = self.profile.device, self.options.optimizer
        if given is None or not self.stepping.releases or self.stepping.accumulates:
            return 0
        leaves = (one for one in parameters_of([given]) if one.requires_grad)
        sizes = [part.nbytes for one in leaves for part in parts_of(one) if part.device.type == device.type]
        return max(self._peers.all(lambda: sum(sizes)))

    @cached_property
    def waiting_bytes(self) -> int:
        """Bytes of the optimizer's state that wait in the store in this way."""
        if not self.stepping.stores:
            return 0
        return max(0, self.placed.stepping_seconds.state_bytes - self.profile.before.optimizer_bytes)

    @property
    def plain_fixed_bytes(self) -> int:
        """Live bytes before a plain step; of parameters that wait in any case, the most that are in memory at once."""
        first = self.plain_profile
        fixed_bytes = first.fixed_bytes + first.waiting_bytes
        if first.stepping.stores_parameters:
            fixed_bytes += first.parameters.away_bytes - first.parameters.room_bytes
        return fixed_bytes

    @property
    def _plain_optimizer_peak_bytes(self) -> int:
        given = self.options.optimizer
        if given is None or self.stepping == PLAIN_STEPPING:
            return self.optimizer_peak_bytes or 0
        least_bytes = self.plain_fixed_bytes + self.released_bytes
        return self._measured_optimizer_bytes(given) if self.placed.allows(least_bytes) else least_bytes

    def _measured_optimizer_bytes(self, given: Optimizer) -> int:
        with IfItFits():
            found = most(self._peers.all(lambda: measure_optimizer(self.subject, given, self._machine)))
            fixed_bytes = self.plain_fixed_bytes
            if self.placed.is_stored:
                fixed_bytes += self.parameters.step_room_bytes - self.parameters.room_bytes
            return fixed_bytes - found.state_bytes + found.peak_bytes
        return 0

    def plain_peak(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, measured if it fits, else predicted."""
        if self.plain_profile is not self:
            return self.plain_profile.plain_peak()
        if self._plain is None:
            self.solver.search_budget.tell("profiling", None)
            risen = self._measured_plain()
            if risen is None:
                self._plain = self._predicted_plain, "predicted"
            else:
                self._plain = max(self.plain_fixed_bytes + risen, self._plain_optimizer_peak_bytes), "measured"
        return self._plain

    @cached_property
    def _predicted_plain(self) -> int:
        # Of gradients that are released here, a plain step has no more than all, and none before its backward.
        plain, released_bytes = self.solver.plain.prediction, self.released_bytes
        rises = self._peers.all(lambda: max(plain.forward_bytes, plain.backward_bytes + released_bytes))
        return max(self.plain_fixed_bytes + max(rises), self._plain_optimizer_peak_bytes)

    def _measured_plain(self) -> int | None:
        needed_bytes = self.solver.plain.prediction.peak_bytes + self.released_bytes
        is_here = self._machine.is_here and not self.placed.is_stored
        if not is_here or not self._peers.everywhere(lambda: has_room(self._machine, needed_bytes)):
            return None
        device = self.profile.device
        with IfItFits(), bare(self.model), state_made(self.subject):
            before, subject = self.profile.before, self.subject
            return max(self._peers.all(lambda: subject.train(observe_allocations(subject, device)).peak_beyond(before)))
        return None

    def known_plain(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, predicted if it was not measured yet."""
        if self.plain_profile is not self:
            return self.plain_profile.known_plain()
        return self._plain or (self._predicted_plain, "predicted")

    @property
    def plain_profile(self) -> ProfiledStep:
        """The profile that shows the plain step: the one in the first way."""
        return self._first or self

    def for_all(self, made: Callable[[], T]) -> T:
        """Return in each process that trains the model the result made by the process with the largest step.

        What plans are described with is measured before, by all of them: steps reduce gradients.
        """
        if self._peers.are_several:
            _ = self.options.certify and self.plain_step
            _ = self.known_plain(), self.released_bytes, self.placed.stepping_seconds
        return self.by_one(made)

    def by_one(self, found: Callable[[], T]) -> T:
        """Return the same in each process, found by the one with the largest step, which runs nothing for it.

        What a step needs that takes gradients itself is found by running it, in all of them.
        """
        if self.profile.runs is not None:
            return self._peers.all(found)[self._leader]
        return self._peers.at(self._leader, found)

    @property
    def device(self) -> str:
        """The device whose bytes count, by name."""
        return self._machine.name

    def bytes_of(self, budget: int | str) -> int:
        """Return an absolute budget in bytes.

        Raises:
            BudgetError: It is no size, or more than the device has.
        """
        return bytes_of(budget, self.device, self._machine.capacity_bytes())

    @property
    def plain_step(self) -> PlainStep | Unseen:
        """The operators of a step without any recompute, which certificates are made from."""
        if self.profile.runs is not None:
            return Unseen(reason=TAKES_GRADIENTS)
        runs_nothing = "_plain_step" in vars(self) or self.profile.units.trace.loops
        allowed = runs_nothing or self.placed.allows(self.peak_of(self.solver.plain))
        return self._plain_step if allowed else Unseen(reason=ABOVE)

    @cached_property
    def _plain_step(self) -> PlainStep | Unseen:
        with bare(self.model):
            return plain_step(
                self.subject,
                self._machine,
                self.solver.cost_unit,
                profile=self.profile,
                peak_bytes=self.solver.plain.prediction.peak_bytes,
                peers=self._peers,
                stepping=partial(self.placed.stepping, self.stepping),
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Solution:
    """A tree, in the way of stepping that it was found for."""

    profiled: ProfiledStep
    candidate: Candidate

    @property
    def peak_bytes(self) -> int:
        """The predicted peak of a training step, in absolute bytes."""
        return self.profiled.peak_of(self.candidate)

    @property
    def cost(self) -> float:
        """The cost of the tree and of the way, in the unit of the planner's cost."""
        own = self.profiled
        return self.candidate.cost + (own.added_s if own.solver.cost_unit == "seconds" else 0.0)

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over those of a plain one."""
        made, plain_s = self.candidate.prediction, self.plain_seconds
        return 1 + (made.seconds + made.moving_s + self.profiled.added_s) / plain_s if plain_s else 1.0

    @property
    def plain_seconds(self) -> float:
        """Seconds of a plain step: in each way the same, so that ways can be compared."""
        first = self.profiled.plain_profile
        own = self.candidate.profile if first is self.profiled else first.profile
        return own.seconds + first.placed.waiting_s(own.seconds - own.forward_seconds)


def check_request(model: nn.Module, step: Step, options: PlanOptions, budget: int | str, *, margin: int | str) -> None:
    """Raise if no plan can exist for a budget, whatever the step does; see `plan` for the arguments.

    With any other `on` nothing is checked: `placed` refuses it.

    Raises:
        BudgetError: The budget or the margin is no size, the device has fewer bytes, or the margin leaves none.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        StepError: One of the arguments is no model, step or optimizer.
        UnsupportedError: The device does not exist.
    """
    if options.on == "meta":
        described = device_of(options.device)
        check_budget(budget, described.name, described.memory_bytes, margin=margin)
    elif options.on is None:
        subject = subject_of(step, model, options.optimizer, needs_model=True)
        check_budget(budget, subject.device(torch_device(options.device)), margin=margin)
