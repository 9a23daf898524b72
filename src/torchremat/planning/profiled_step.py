"""A step that was profiled, with the search for plans of it; and the check of a request before any of this work."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from torch import nn

from torchremat.errors import DeviceWarning, UnsupportedError, warn
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import run_traced, subject_of
from torchremat.planning.bounds.plain_step import PlainStep, Unseen, plain_step
from torchremat.planning.budgets import Relative, bytes_of, check_budget
from torchremat.planning.devices.device import device_of
from torchremat.planning.devices.fakes import placed, torch_device
from torchremat.planning.devices.machines import has_room
from torchremat.planning.forecasts import PlainSource
from torchremat.planning.layout import bare
from torchremat.planning.peers.agreement import profiled_together
from torchremat.planning.peers.peers import peers_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.searches.search import Search
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.simulator.prediction import Candidate
from torchremat.planning.store_profiles.sizes import weighed

T = TypeVar("T")

# Predictions are exact for most models, and off by some hundred bytes where kernels choose workspace by alignment,
# whatever the size of the model. This many bytes of a budget are left free for that.
ROOM_BYTES = 4096

# The reported share of the search when the plan is found, and only the lowest peak is still sought.
SOLVING_SHARE = 0.75


class ProfiledStep:
    """A step that was profiled, with the search over it: the figures that plans and frontiers are made from.

    Args:
        model: The model.
        step: See `Planner`.
        options: The options.

    Attributes:
        model: The model.
        options: The options.
        profile: See `Planner`.
        solver: See `Planner`.
        subject: See `Planner`.
        parameters: Shapes of the parameters, by name.
    """

    def __init__(self, model: nn.Module, step: Step, options: PlanOptions) -> None:
        self._began_s, self._profiled_s = time.perf_counter(), 0.0
        self.model, self.options = model, options
        search_budget = SearchBudget(observer=options.progress or None)
        self._machine, profiled, self.subject = placed(model, step, options.optimizer, options.device, options.on)
        self._peers = peers_of(model)
        if options.stores and self._peers.are_several:
            raise UnsupportedError(
                "stores are measured by each process for itself, and processes that train one model need one plan: "
                "leave out stores."
            )
        search_budget.tell("profiling", None)
        agreed = profiled_together(self._peers, profiled, self.subject, self._machine)
        pair, self._leader = agreed.pair, agreed.largest
        if self._machine.notice:
            warn(self._machine.notice, DeviceWarning)
        self.profile: Profile = pair.blocks
        store_profiles = weighed(model, self.subject, pair, options.stores)
        self.solver = Search(pair, options, store_profiles, search_budget=search_budget)
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._plain: tuple[int, PlainSource] | None = None
        self._profiled_s = self.spent_seconds

    def begin(self) -> None:
        """Count the seconds of another plan from now on."""
        self._began_s = time.perf_counter()

    @property
    def spent_seconds(self) -> float:
        """Seconds spent on making the planner, and on the current plan so far."""
        return self._profiled_s + time.perf_counter() - self._began_s

    @property
    def fixed_bytes(self) -> int:
        """Live bytes before every step except the first: they include the optimizer's state."""
        state = self.profile.optimizer.state_bytes if self.profile.optimizer is not None else 0
        return self.profile.before.total_bytes + state

    @property
    def optimizer_peak_bytes(self) -> int | None:
        """The peak of `optimizer.step()`, or None without an optimizer."""
        optimizer = self.profile.optimizer
        return None if optimizer is None else self.profile.before.total_bytes + optimizer.peak_bytes

    def peak_of(self, candidate: Candidate) -> int:
        """Return the predicted peak of a training step under a tree, in absolute bytes."""
        return max(self.fixed_bytes + candidate.prediction.peak_bytes, self.optimizer_peak_bytes or 0)

    @property
    def floor_bytes(self) -> int:
        """The smallest budget for which a plan exists, with a little room for errors of the prediction."""
        lowest_bytes = self.peak_of(self.solver.floor)
        is_plain = self.peak_of(self.solver.plain) <= lowest_bytes  # which needs no room
        return lowest_bytes if is_plain else self.budget_for(lowest_bytes)

    def budget_for(self, peak_bytes: int) -> int:
        """Return the smallest budget for which a plan with a predicted peak is made."""
        return peak_bytes + ROOM_BYTES

    def plain_peak(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, measured if it fits, else predicted."""
        if self._plain is None:
            self.solver.search_budget.tell("profiling", None)
            risen = self._measured_plain()
            if risen is None:
                self._plain = self.peak_of(self.solver.plain), "predicted"
            else:
                self._plain = max(self.fixed_bytes + risen, self.optimizer_peak_bytes or 0), "measured"
        return self._plain

    def _measured_plain(self) -> int | None:
        needed_bytes = self.solver.plain.prediction.peak_bytes
        if not self._machine.is_here or not self._peers.everywhere(lambda: has_room(self._machine, needed_bytes)):
            return None
        device = self.profile.device
        try:
            with bare(self.model):
                before = self.profile.before
                return max(
                    self._peers.all(lambda: run_traced(self.subject, device, before_bytes=0).peak_beyond(before))
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def for_all(self, made: Callable[[], T]) -> T:
        """Return in each process that trains the model the result made by the process with the largest step."""
        if self._peers.are_several:
            _ = self.plain_step  # which all processes have to run, as it reduces gradients
        return self._peers.at(self._leader, made)

    @property
    def device(self) -> str:
        """The device whose bytes count, by name."""
        return self._machine.name

    def bytes_of_relative(self, budget: Relative, reserved_bytes: int = 0) -> int:
        """Return a relative budget in bytes; reserved bytes come on top of the smallest."""

        def smallest() -> int:
            with heap_set_aside(), self.solver.search_budget.running(1 - SOLVING_SHARE):
                return self.floor_bytes + reserved_bytes

        plain_bytes, _ = self.known_plain()
        return budget.bytes(plain_bytes=plain_bytes, before_bytes=self.fixed_bytes, smallest=smallest)

    def bytes_of(self, budget: int | str) -> int:
        """Return an absolute budget in bytes.

        Raises:
            BudgetError: It is no size, or more than the device has.
        """
        return bytes_of(budget, self.device, self._machine.capacity_bytes())

    def known_plain(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, predicted if it was not measured yet."""
        return self._plain or (self.peak_of(self.solver.plain), "predicted")

    @cached_property
    def plain_step(self) -> PlainStep | Unseen:
        """The operators of a plain step, which certificates are made from."""
        with bare(self.model):
            return plain_step(
                self.subject,
                self._machine,
                self.solver.cost_unit,
                profile=self.profile,
                peak_bytes=self.solver.plain.prediction.peak_bytes,
                peers=self._peers,
            )


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
