"""A step where it runs: what all its profiles have in common."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial

from torch import nn

from torchremat.errors import UnsupportedError
from torchremat.measuring.communication import known_groups
from torchremat.measuring.step import check_kinds
from torchremat.optimizing.module_runs import keeps_in_store
from torchremat.planning.devices.fakes import placed
from torchremat.planning.exactness.replayability import Repeats
from torchremat.planning.parameter_bytes import NONE_AWAY, ParameterBytes, parameter_bytes
from torchremat.planning.peers.agreement import most
from torchremat.planning.peers.peers import peers_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.optimizers import state_made
from torchremat.planning.profiles.step_seconds import SteppingSeconds, stepping_seconds
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.stepping import PLAIN_STEPPING, Stepping, check_ways, stepping_as
from torchremat.planning.store_profiles import check_apart
from torchremat.stores.stored_parameters import keeper_of


class PlacedStep:
    """A step where it runs.

    Attributes:
        model: The model.
        options: The options.
        machine: Where it runs.
        profiled: The model that runs there.
        subject: The step with everything that it touches.
        peers: The processes that train the model.
        repeats: Which modules repeat their forward, as found so far.
        is_stored: Whether parameters wait in a store in any way: `offload_parameters` was called before.
        parameters: Shapes of the parameters, by name.
        limit_bytes: What no run that can be left out needs more than; None if none is left out for its bytes.
    """

    def __init__(self, model: nn.Module, step: Step, options: PlanOptions, limit_bytes: int | None = None) -> None:
        self._began_s = time.perf_counter()
        self.model, self.options, self.limit_bytes = model, options, limit_bytes
        check_kinds(step, model, options.optimizer, needs_model=True)
        self.is_stored = keeps_in_store(model)
        keepers = [one for each in model.parameters() if (one := keeper_of(each)) is not None]
        self._given_store = keepers[0].store if keepers else None
        if self.is_stored:
            _check_stored(options)
            for one in keepers:
                check_apart(options.stores, one.store, "offload_parameters")
        self.machine, self.profiled, subject = placed(model, step, options.optimizer, options.device, options.on)
        self.subject = replace(subject, accumulates=options.accumulates or None)
        self.peers = peers_of(known_groups((model, *self.subject.models), self.subject.inputs), options.group)
        self.peers.each(lambda: check_ways(options.ways_of_stepping, model, options.optimizer))
        self.repeats = Repeats()
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._profiled_s = time.perf_counter() - self._began_s
        self.begin()

    @contextmanager
    def within(self, limit_bytes: int | None) -> Generator[None]:
        """Use this limit in the block."""
        before, self.limit_bytes = self.limit_bytes, limit_bytes
        try:
            yield
        finally:
            self.limit_bytes = before

    def allows(self, peak_bytes: int) -> bool:
        """Return whether a run with this peak is within the limit of what planning may need."""
        return self.limit_bytes is None or not self.machine.is_here or peak_bytes <= self.limit_bytes

    def begin(self) -> None:
        """Count the seconds of another plan from now on."""
        self._began_s = time.perf_counter()

    @contextmanager
    def profiling(self) -> Generator[None]:
        """Count the seconds of the block for every plan."""
        start_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - start_s
            self._profiled_s += took_s
            self._began_s += took_s

    @property
    def spent_seconds(self) -> float:
        """Seconds spent on profiles, and on the current plan so far."""
        return self._profiled_s + time.perf_counter() - self._began_s

    @contextmanager
    def stepping(self, way: Stepping) -> Generator[None]:
        """Let the optimizer step in a way in the block, and have its state."""
        stepping = stepping_as(self.model, self.options.optimizer, way, self.options.step_stores)
        with ExitStack() as stack:
            for one in (stepping, state_made(self.subject)):
                self.peers.each(partial(stack.enter_context, one))
            yield
            self.peers.each(stack.close)

    def parameter_bytes(self, way: Stepping, trace: Trace) -> ParameterBytes:
        """Return the bytes of parameters that wait in a store while the optimizer steps in a way."""
        is_away = way.stores_parameters or self.is_stored
        if not is_away:
            return NONE_AWAY
        return most(self.peers.all(lambda: parameter_bytes(self.model, trace, self.machine.device)))

    def added_s(self, way: Stepping, backward_s: float) -> float:
        """Return the seconds that a way adds to a plain step whose backward takes `backward_s`."""
        if way == PLAIN_STEPPING:
            return 0.0
        return self._seconds_in(way, backward_s) - self.waiting_s(backward_s)

    def waiting_s(self, backward_s: float) -> float:
        """Return the seconds that parameters which wait in any way add to a plain step."""
        return self._seconds_in(PLAIN_STEPPING, backward_s) if self.is_stored else 0.0

    def _seconds_in(self, way: Stepping, backward_s: float) -> float:
        way = replace(way, stores_parameters=way.stores_parameters or self.is_stored)
        return self.stepping_seconds.added_s(way, backward_s)

    @cached_property
    def stepping_seconds(self) -> SteppingSeconds:
        """The seconds that ways of stepping add, measured when first asked for: in all processes at once."""
        stores = self.options.step_stores
        stores = replace(stores, parameters=self._given_store) if self.is_stored else stores
        in_parts = any(one.releases or one.stores for one in self.options.ways_of_stepping)
        with self.profiling():
            device = self.machine.device
            return most(self.peers.all(lambda: stepping_seconds(self.subject, device, stores, in_parts=in_parts)))


def _check_stored(options: PlanOptions) -> None:
    """Raise if parameters that wait in a store already, in any plan, do not agree with an option."""
    waits = "parameters of this model wait in a store already (torchremat.offload_parameters)"
    if options.parameter_store is not None:
        raise UnsupportedError(
            f"parameter_store=: {waits}, and every plan counts them so. Leave it out; or call `remove()` of the "
            "offload, and the plan may choose it."
        )
    if options.on is not None:
        raise UnsupportedError(
            f"on={options.on!r}: {waits}, and parts of the step run to measure that, which need data. Leave `on` out, "
            "or call `remove()` of the offload."
        )
