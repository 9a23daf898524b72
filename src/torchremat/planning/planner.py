"""From a profile and a budget to a plan."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import nn

from torchremat.errors import BudgetError
from torchremat.measuring.communication import reduced_bytes
from torchremat.measuring.exhaustion import is_out_of_memory
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.runs import run_traced, subject_of
from torchremat.planning.agreement import Figures, agreed_grains, beside, figures_of
from torchremat.planning.budgets import bytes_of, check_budget, free_on, margin_of, percentage_of
from torchremat.planning.certificates import claim_of
from torchremat.planning.chains import Cost
from torchremat.planning.frontiers import MOST_POINTS, Frontier, check_points, frontier_of
from torchremat.planning.layout import HeldOperators, bare, calls_of
from torchremat.planning.memory import Walk
from torchremat.planning.moments import Live, Moment
from torchremat.planning.peers import peers_of
from torchremat.planning.plans import PlainSource, Plan, PlannedUnit, Point
from torchremat.planning.prediction import chosen_options, over_bytes
from torchremat.planning.profiling import Grains, profile_subject
from torchremat.planning.pulls import PlainStep, Unseen, plain_step
from torchremat.planning.reading import Profile
from torchremat.planning.shapes import InputSizes
from torchremat.planning.solving import Candidate, Search
from torchremat.planning.tracing import Step, trace
from torchremat.planning.units import find_units
from torchremat.schedules.chain import Tree
from torchremat.tensors.sizes import format_bytes

_COSTS = ("seconds", "flops")

# Predictions are exact for most models, and off by some hundred bytes where kernels choose workspace by alignment.
# So much of a budget is left free for that: bytes, or this share if it is more.
_ROOM_BYTES = 4096
_ROOM_SHARE = 4096


class Planner:
    """Makes plans for one model and step, any number of them from one profile.

    Args:
        model: The model.
        step: Called as `step(model)`; returns the loss of a sample batch, the largest that will be trained on.
        optimizer: If given, its state and the peak of its step count.
        device: Whose bytes count; that of the first parameter if not given.
        cost: What to minimise: predicted `"seconds"`, or `"flops"`, which are exact and repeatable.
        operators: Whether parts of a module may be kept: the outputs of some of its operators.

    Raises:
        StepError: See `profile`.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        device: torch.device | str | None = None,
        cost: Cost = "seconds",
        operators: bool = True,
    ) -> None:
        if cost not in _COSTS:
            raise BudgetError(f"cost={cost!r}: allowed are 'seconds' and 'flops'.")
        self._subject = subject_of(step, model, optimizer, needs_model=True)
        self._peers = peers_of(model)
        grains = self._agreed(model, self._subject.device(device))
        self.profile: Profile = grains.coarse
        self.solver = Search(grains, cost, operators=operators)
        self._model = model
        self._parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._plain: tuple[int, PlainSource] | None = None

    def _agreed(self, model: nn.Module, device: torch.device) -> Grains:
        """Return the profile, with the figures of all processes that train the model."""
        found: list[Grains] = []
        if self._peers.are_several:
            # Before any backward: a process that has stopped takes no part in its reductions, and others would wait.
            self._peers.all(lambda: self._check_forward(model))

        def figures() -> tuple[Figures, Figures | None]:
            found.append(beside(profile_subject(model, self._subject, device), reduced_bytes(model, device)))
            fine = found[0].fine
            return figures_of(found[0].coarse), None if fine is None else figures_of(fine)

        told = self._peers.all(figures)
        return found[0] if len(told) == 1 else agreed_grains(found[0], told)

    def _check_forward(self, model: nn.Module) -> None:
        """Run the forward alone, and raise what is wrong with it."""
        with self._subject.untouched():
            find_units(trace(model, self._subject.step))

    @property
    def fixed_bytes(self) -> int:
        """What lies in memory before every step but the first: the optimizer's state is there as well."""
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
        """The smallest budget for which there is a plan, with a little room for what a prediction can be off."""
        return self.budget_for(self.peak_of(self.solver.floor))

    def budget_for(self, peak_bytes: int) -> int:
        """Return the smallest budget for which a plan with a predicted peak is made."""
        return peak_bytes + max(_ROOM_BYTES, peak_bytes // (_ROOM_SHARE - 1) + 1)

    def plain_peak(self) -> tuple[int, PlainSource]:
        """Return the peak of a plain training step, measured if it fits, else predicted."""
        if self._plain is None:
            measured = self._peers.all(self._measured_plain)
            fitting = [one for one in measured if one is not None]
            if len(fitting) == len(measured):
                self._plain = max(fitting)
            else:
                self._plain = self.peak_of(self.solver.plain), "predicted"
        return self._plain

    def _measured_plain(self) -> tuple[int, PlainSource] | None:
        free = free_on(self.profile.device)
        if free is not None and free < self.solver.plain.prediction.peak_bytes:
            return None
        try:
            with bare(self._model):
                traced = run_traced(self._subject, self.profile.device, before_bytes=0)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return max(self.fixed_bytes + traced.peak_bytes, self.optimizer_peak_bytes or 0), "measured"

    def plan(self, budget: int | str, *, margin: int | str = 0, tighten_bytes: int = 0) -> Plan:
        """Return the fastest plan found whose predicted peak is within the budget.

        Args:
            budget: Bytes as an int or like `"6GiB"`, or a percentage of the plain step's peak like `"60%"`.
            margin: Bytes of the budget to leave free, for what an allocator needs beside the tensors.
            tighten_bytes: Bytes by which an earlier plan for this budget was too high when it was measured.

        Raises:
            BudgetError: The budget is no size, or no plan fits; the message has the smallest budget that works.
        """
        percent = percentage_of(budget)
        if percent is not None:
            self.plain_peak()
        return self._peers.first(lambda: self._planned(budget, percent, margin, tighten_bytes))

    def _planned(self, budget: int | str, percent: float | None, margin: int | str, tighten_bytes: int) -> Plan:
        plain_bytes, source = self._known_plain()
        size = int(plain_bytes * percent / 100) if percent is not None else bytes_of(budget, self.profile.device)
        margin_bytes = margin_of(margin)
        target = size - margin_bytes - tighten_bytes
        optimizer_peak = self.optimizer_peak_bytes or 0
        if self.peak_of(self.solver.plain) > target:
            target -= max(_ROOM_BYTES, size // _ROOM_SHARE)
        with heap_set_aside():
            found = self.solver.solve(target - self.fixed_bytes) if target >= optimizer_peak else None
            if found is None:
                raise BudgetError(self._nothing_fits(size, str(budget), margin_bytes + tighten_bytes))
            return self.plan_of(found, size, str(budget), plain=(plain_bytes, source), margin_bytes=margin_bytes)

    def frontier(self, *, points: int = MOST_POINTS) -> Frontier:
        """Return what a step takes under the best plan for each budget; see `torchremat.frontier`."""
        check_points(points)
        return frontier_of(self, points)

    def _known_plain(self) -> tuple[int, PlainSource]:
        return self._plain or (self.peak_of(self.solver.plain), "predicted")

    def _nothing_fits(self, size: int, budget: str, reserved_bytes: int) -> str:
        floor = self.solver.floor
        reserved = f", of which {format_bytes(reserved_bytes)} are set aside" if reserved_bytes else ""
        optimizer_peak = self.optimizer_peak_bytes or 0
        if optimizer_peak > self.fixed_bytes + floor.prediction.peak_bytes:
            return (
                f"the budget is {format_bytes(size)} ({budget}){reserved}, but optimizer.step() alone peaks at "
                f"{format_bytes(optimizer_peak)}, "
                f"which no recomputation lowers. Smallest budget that works: {optimizer_peak + reserved_bytes} "
                "bytes. An optimizer with "
                "foreach=False or fused=True needs less."
            )
        slowdown = 1 + floor.prediction.seconds / self.profile.seconds
        return (
            f"no plan fits the budget of {format_bytes(size)} ({budget}){reserved}. Smallest budget that works: "
            f"{self.floor_bytes + reserved_bytes} bytes ({format_bytes(self.floor_bytes + reserved_bytes)}), at "
            f"{slowdown:.2f} x the plain time. "
            f"{format_bytes(self.fixed_bytes)} of it lie there before a step; a smaller batch lowers the rest."
        )

    @cached_property
    def plain_step(self) -> PlainStep | Unseen:
        """The operators of a plain step, which certificates are made from."""
        with bare(self._model):
            return plain_step(
                self._subject,
                self.profile.device,
                self.solver.cost_unit,
                forward_seconds=self.profile.forward_seconds,
                peak_bytes=self.solver.plain.prediction.peak_bytes,
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
        plain = plain or self._known_plain()
        own, before = found.profile, self.profile.before
        state = own.optimizer.state_bytes if own.optimizer is not None else 0
        return Plan(
            budget_bytes=size,
            budget=budget,
            device=str(own.device),
            cost=self.solver.cost_unit,
            tree=found.tree,
            held=held_of(own, found.tree),
            units=tuple(planned_unit(own, unit) for unit in range(len(own.units.units))),
            calls=calls_of(own.units),
            peak_bytes=self.peak_of(found),
            step_peak_bytes=self.fixed_bytes + found.prediction.peak_bytes,
            optimizer_peak_bytes=self.optimizer_peak_bytes,
            optimizer_state_bytes=state,
            before_bytes={
                "parameters": before.parameter_bytes,
                "gradients": before.gradient_bytes,
                "buffers": before.buffer_bytes,
                "optimizer": before.optimizer_bytes + state,
                "inputs": before.input_bytes,
                **({"communication": before.communication_bytes} if before.communication_bytes else {}),
            },
            kept_bytes=found.prediction.kept_bytes,
            where=found.prediction.where,
            plain_peak_bytes=plain[0],
            plain_source=plain[1],
            plain_seconds=own.seconds,
            recompute_seconds=found.prediction.seconds,
            recomputed_flops=found.prediction.flops,
            recomputed_calls=found.prediction.calls,
            flops=own.units.trace.flops,
            floor_bytes=self.floor_bytes,
            parameters=self._parameters,
            inputs=input_sizes(own),
            curve=curve_of(own, found.tree, self.fixed_bytes),
            plain_curve=curve_of(self.profile, self.solver.plain.tree, self.fixed_bytes),
            _claim=claim_of(
                own,
                found.tree,
                found.prediction,
                unit=self.solver.cost_unit,
                step=self.plain_step,
                limit_bytes=size - margin_bytes - self.fixed_bytes,
            ),
        )


def plan(
    model: nn.Module,
    step: Step,
    *,
    budget: int | str,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    cost: Cost = "seconds",
    margin: int | str = 0,
    operators: bool = True,
) -> Plan:
    """Return the fastest plan found under which a training step stays within a budget; nothing is applied.

    The step is profiled for this (a few runs of it); afterwards model, gradients, buffers, generators and hooks are as
    they were. For several budgets of one model make one `Planner`.

    Args:
        model: The model.
        step: Called as `step(model)`; runs the forward on a sample batch and returns the loss.
        budget: Peak bytes of a whole training step: an int, `"6GiB"`, `"800MB"`, or `"60%"` of the plain step's peak.
        optimizer: If given, its state and the peak of its step count.
        device: Whose bytes count; that of the first parameter if not given.
        cost: What to minimise, `"seconds"` or `"flops"`.
        margin: Bytes of the budget to leave free, for what an allocator needs beside the tensors.
        operators: Whether parts of a module may be kept: the outputs of some of its operators, where that is faster
            than to keep or recompute all of it.

    Raises:
        BudgetError: The budget is no size, or no plan fits it.
        StepError: The step returns no loss, or calls other modules each time.
        UnsupportedError: A profiler is active, or the device has no allocation events.
    """
    check_budget(budget, subject_of(step, model, optimizer, needs_model=True).device(device))
    planner = Planner(model, step, optimizer=optimizer, device=device, cost=cost, operators=operators)
    return planner.plan(budget, margin=margin)


def frontier(
    model: nn.Module,
    step: Step,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | str | None = None,
    cost: Cost = "seconds",
    points: int = MOST_POINTS,
) -> Frontier:
    """Return what a step takes under the best plan for each budget, from the plain step to the lowest peak.

    Profiles once, as `plan` does; model, gradients, buffers, generators and hooks are as they were.

    Args:
        model: The model.
        step: As for `plan`.
        optimizer: As for `plan`.
        device: As for `plan`.
        cost: What to minimise, `"seconds"` or `"flops"`.
        points: For how many budgets plans are sought, evenly spread, at least 2; those that are no better than another
            in peak or time are left out.

    Raises:
        BudgetError: `points` is below 2.
        StepError: See `plan`.
        UnsupportedError: See `plan`.
    """
    check_points(points)
    return Planner(model, step, optimizer=optimizer, device=device, cost=cost).frontier(points=points)


def planned_unit(own: Profile, unit: int) -> PlannedUnit:
    """Return what a plan tells about a unit."""
    found, size, trace = own.units.units[unit], own.sizes[unit], own.units.trace
    saved = (*(size.saved - set(found.inputs)), *size.left)
    return PlannedUnit(
        name=found.name,
        kind=" + ".join(trace.calls[call].kind for call in found.calls),
        saved_bytes=size.inside_bytes + sum(trace.storage_bytes[storage] for storage in saved),
        input_bytes=sum(trace.storage_bytes[storage] for storage in found.inputs),
        seconds=own.costs[unit].seconds,
        flops=own.costs[unit].flops,
    )


def held_of(own: Profile, tree: Tree) -> tuple[HeldOperators, ...]:
    """Return what the units hold that a tree keeps in part."""
    units: dict[tuple[tuple[str, ...], tuple[int, ...]], list[int]] = {}
    for unit, number in chosen_options(tree):
        option = own.options[unit][number - 1]
        units.setdefault((option.operators, option.ordinals), []).append(unit)
    return tuple(
        HeldOperators(units=tuple(members), operators=operators, held=ordinals)
        for (operators, ordinals), members in units.items()
    )


def input_sizes(own: Profile) -> InputSizes:
    """Return how large the inputs of the roots were."""
    elements: dict[str, int] = {}
    for root in own.units.roots:
        call = own.units.trace.calls[root]
        elements[call.name] = max(elements.get(call.name, 0), call.input_elements)
    return InputSizes(elements=elements)


def curve_of(own: Profile, tree: Tree, fixed_bytes: int) -> tuple[Point, ...]:
    """Return the predicted step under a tree: a point where each piece begins, and one at its peak."""
    points: list[Point] = []
    now_s, running = 0.0, 0.0
    for state in Walk(own.units, own.sizes, own.order, own.lifetimes, tree, own.options):
        if not isinstance(state, Live):
            continue
        live = fixed_bytes + own.extra_bytes[state.key] + state.held_bytes
        moment, unit = state.key
        if moment in (Moment.FORWARD, Moment.RECOMPUTE):
            running = own.costs[state.unit if state.unit >= 0 else unit].seconds
        elif moment is Moment.BACKWARD:
            running = own.costs[unit].seconds_backward
        else:
            running = 0.0
        points.append(Point(seconds=now_s, live_bytes=live, what=state.what))
        points.append(Point(seconds=now_s + running / 2, live_bytes=live + over_bytes(own, state), what=state.what))
        now_s += running
    return tuple(points)
