"""From a profile and a budget to a plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import nn

from torchremat.errors import BudgetError, DeviceError, DeviceWarning, UnsupportedError, check_flags, warn
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import run_traced
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.planning.bounds.plain_step import PlainStep, Unseen, plain_step
from torchremat.planning.budgets import Relative, bytes_of, margin_of, relative_of
from torchremat.planning.descriptions import lines_of, made_plan, nothing_fits
from torchremat.planning.devices.calibration import device_here
from torchremat.planning.devices.device import Device
from torchremat.planning.devices.fakes import placed
from torchremat.planning.devices.machines import Here, has_room
from torchremat.planning.frontiers import POINTS, Frontier, check_points, frontier_of
from torchremat.planning.layout import bare
from torchremat.planning.plans import PlainSource, Plan
from torchremat.planning.profiles.agreement import profiled_together
from torchremat.planning.profiles.peers import peers_of
from torchremat.planning.profiles.reading import Profile
from torchremat.planning.profiles.store_sizes import check_stores, weighed
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.searches.candidates import Candidate
from torchremat.planning.searches.chains import Cost, check_cost
from torchremat.planning.searches.progress import Progress, checked
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.solving import Search
from torchremat.tensors.handles import Store

T = TypeVar("T")

# Predictions are exact for most models, and off by some hundred bytes where kernels choose workspace by alignment,
# whatever the size of the model. This many bytes of a budget are left free for that.
_ROOM_BYTES = 4096

# The reported share of the search when the plan is found, and only the lowest peak is still sought.
_SOLVING_SHARE = 0.75


class Planner:
    """Makes plans for one model and step, any number of them from one profile.

    Args:
        model: The model.
        step: Called as `step(model)`; returns the loss of a sample batch, the largest that will be trained on.
        optimizer: If given, its state and the peak of its step count.
        device: The device whose bytes count; that of the first parameter if not given. With `on="meta"` the device to
            plan for: a name (`"h100"`), a file that `save_device` has written, or a `Device`.
        cost: The quantity to minimise: predicted `"seconds"`, or `"flops"`, which are exact and repeatable.
        operators: Whether parts of a module may be kept: the outputs of some of its operators.
        stores: Stores where saved tensors may go instead of being recomputed; see `plan`.
        allow_lossy: Whether stores may lose digits.
        on: `"meta"` to run nothing: the step is profiled on tensors without data, possibly for an absent device. Model
            and batch may be real, on the meta device, or fakes.
        progress: Called with the progress of planning, here and later; an exception that it raises ends planning. By
            default progress is not shown here; `progress_bar` of `torchremat.reports.bars` makes an observer that shows
            a bar.

    Attributes:
        profile: Bytes and seconds of each unit of the step, the basis of plans; its fields may change without notice.
        solver: The search for trees of the profile; its fields may change too.
        subject: The step with everything that it touches.

    Raises:
        StepError: See `plan`; with `on="meta"` also where the step reads a value of a tensor.
        DeviceError: With `on="meta"`: the device is not known, or its description lacks something.
        PlanError: The model has wrapped modules already.
        UnsupportedError: One of the stores is no store, or is lossy and that is not allowed, or the stores are not
            here; with `on="meta"` modules are compiled; or another option is not valid.
    """

    @without_our_frames
    def __init__(
        self,
        model: nn.Module,
        step: Step,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | Path | Device | None = None,
        cost: Cost = "seconds",
        operators: bool = True,
        stores: Sequence[Store] = (),
        allow_lossy: bool = False,
        on: Literal["meta"] | None = None,
        progress: Callable[[Progress], None] | Literal[False] | None = None,
    ) -> None:
        self._began_s, self._profiled_s = time.perf_counter(), 0.0
        check_cost(cost)
        check_flags(operators=operators, allow_lossy=allow_lossy)
        search_budget = SearchBudget(observer=checked(progress))
        self._stores = check_stores(stores, allow_lossy=allow_lossy)
        if self._stores and on is not None:
            raise UnsupportedError(
                "stores are chosen by their speed, which has to be measured on the device: leave out stores or "
                f"on={on!r}."
            )
        self._machine, profiled, self.subject = placed(model, step, optimizer, device, on)
        self._peers = peers_of(model)
        if self._stores and self._peers.are_several:
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
        store_profiles = weighed(model, self.subject, pair, self._stores)
        self.solver = Search(pair, cost, store_profiles, operators=operators, search_budget=search_budget)
        self._model = model
        self._parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._plain: tuple[int, PlainSource] | None = None
        self._profiled_s = self.spent_seconds

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
        return peak_bytes + _ROOM_BYTES

    def save_device(self, path: str | Path) -> None:
        """Write a description of the planner's device, with the kernels of its step, for plans on other machines.

        One more step is run for it, with each operator measured. Its measurements are exact for operators of the same
        shapes; others are estimated from the fastest ones.

        Args:
            path: The JSON file; give it as `device` to `plan(..., on="meta")`.

        Raises:
            DeviceError: The planner itself plans for an absent device.
        """
        if not isinstance(self._machine, Here):
            raise DeviceError(
                f"{self.device} is not on this machine, so it cannot be measured. Make a planner where it is."
            )
        with bare(self._model), heap_set_aside():
            device_here(self.subject, self._machine.device).save(path)

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
            with bare(self._model):
                before = self.profile.before
                return max(
                    self._peers.all(lambda: run_traced(self.subject, device, before_bytes=0).peak_beyond(before))
                )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    @without_our_frames
    def plan(self, budget: int | str, *, margin: int | str = 0, tighten_bytes: int = 0) -> Plan:
        """Return the fastest plan found whose predicted peak is within the budget.

        Args:
            budget: Bytes as an int or like `"6GiB"`; a share of the plain step's peak like `"60%"`, or of its part
                beyond the live bytes before the step like `"40% of activations"`; or `"min"`, the smallest that works.
            margin: Bytes of the budget to leave free, for the allocator's overhead.
            tighten_bytes: Bytes by which the measured peak of an earlier plan was above this budget.

        Raises:
            BudgetError: The budget or the margin is no size, or no plan fits; the message says which budget works.
        """
        self._began_s = time.perf_counter()
        relative, margin_bytes = relative_of(budget), margin_of(margin)
        if relative is not None:
            self.plain_peak()
        return self.for_all(lambda: self._planned(budget, relative, margin_bytes, tighten_bytes))

    def _planned(self, budget: int | str, relative: Relative | None, margin_bytes: int, tighten_bytes: int) -> Plan:
        plain_bytes, source = self._known_plain()
        size = (
            self.bytes_of(budget)
            if relative is None
            else self.bytes_of_relative(relative, margin_bytes + tighten_bytes)
        )
        target = size - margin_bytes - tighten_bytes
        optimizer_peak = self.optimizer_peak_bytes or 0
        if self.peak_of(self.solver.plain) > target:
            target -= _ROOM_BYTES
        search_budget = self.solver.search_budget
        with heap_set_aside():
            with search_budget.running():
                with search_budget.part(0.0, _SOLVING_SHARE):
                    found = self.solver.solve(target - self.fixed_bytes) if target >= optimizer_peak else None
                with search_budget.part(_SOLVING_SHARE, 1.0):
                    _ = self.solver.floor  # which the plan and the error report
            if found is None:
                reserved_bytes = margin_bytes + tighten_bytes
                raise BudgetError(nothing_fits(self, size, str(budget), reserved_bytes, plain_bytes=plain_bytes))
            return self.plan_of(found, size, str(budget), plain=(plain_bytes, source), margin_bytes=margin_bytes)

    @without_our_frames
    def frontier(self, *, points: int = POINTS) -> Frontier:
        """Return peak and time of a step under the best plan for each budget; see `torchremat.frontier`."""
        check_points(points)
        self._began_s = time.perf_counter()
        return frontier_of(self, points)

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
            with heap_set_aside(), self.solver.search_budget.running(1 - _SOLVING_SHARE):
                return self.floor_bytes + reserved_bytes

        plain_bytes, _ = self._known_plain()
        return budget.bytes(plain_bytes=plain_bytes, before_bytes=self.fixed_bytes, smallest=smallest)

    def bytes_of(self, budget: int | str) -> int:
        """Return an absolute budget in bytes.

        Raises:
            BudgetError: It is no size, or more than the device has.
        """
        return bytes_of(budget, self.device, self._machine.capacity_bytes())

    def _known_plain(self) -> tuple[int, PlainSource]:
        return self._plain or (self.peak_of(self.solver.plain), "predicted")

    @cached_property
    def plain_step(self) -> PlainStep | Unseen:
        """The operators of a plain step, which certificates are made from."""
        with bare(self._model):
            return plain_step(
                self.subject,
                self._machine,
                self.solver.cost_unit,
                profile=self.profile,
                peak_bytes=self.solver.plain.prediction.peak_bytes,
                peers=self._peers,
            )

    def plan_of(
        self,
        found: Candidate,
        size: int,
        budget: str,
        *,
        plain: tuple[int, PlainSource] | None = None,
        margin_bytes: int = 0,
    ) -> Plan:
        """Return a candidate of the solver as a plan for a budget."""
        self.solver.search_budget.tell("certificate", None)
        return made_plan(
            self,
            found,
            size,
            budget,
            plain=plain or self._known_plain(),
            margin_bytes=margin_bytes,
            parameters=self._parameters,
            lines=lines_of(self._model),
            stores=self._stores,
        )
