"""A step where it runs: what all its profiles have in common."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import cached_property

from torch import nn

from torchremat.errors import UnsupportedError
from torchremat.measuring.step import check_kinds
from torchremat.optimizing.module_runs import keeps_in_store
from torchremat.planning.devices.fakes import placed
from torchremat.planning.exactness.replayability import Repeats
from torchremat.planning.parameter_bytes import NONE_AWAY, ParameterBytes, parameter_bytes
from torchremat.planning.peers.peers import peers_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.optimizers import state_made
from torchremat.planning.profiles.step_seconds import SteppingSeconds, stepping_seconds
from torchremat.planning.profiles.traces import Trace
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.stepping import Stepping, check_ways, stepping_as


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
        parameters: Shapes of the parameters, by name.
    """

    def __init__(self, model: nn.Module, step: Step, options: PlanOptions) -> None:
        self._began_s = time.perf_counter()
        self.model, self.options = model, options
        check_kinds(step, model, options.optimizer, needs_model=True)
        if keeps_in_store(model):
            raise UnsupportedError(
                "parameters of this model wait in a store (torchremat.offload_parameters), and a step is profiled with "
                "all of them in memory. Plan first, apply the plan, and call offload_parameters then; or call "
                "`remove()`, and plan with parameter_store=."
            )
        self.machine, self.profiled, self.subject = placed(model, step, options.optimizer, options.device, options.on)
        self.peers = peers_of(model)
        if options.stores and self.peers.are_several:
            raise UnsupportedError(
                "stores are measured by each process for itself, and processes that train one model need one plan: "
                "leave out stores."
            )
        check_ways(options.ways_of_stepping, model, options.optimizer, are_several=self.peers.are_several)
        self.repeats = Repeats()
        self.parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._profiled_s = time.perf_counter() - self._began_s
        self.begin()

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
        """Let the optimizer step in a way in the block, and have its state; parameters are in memory in any way."""
        with (
            stepping_as(self.model, self.options.optimizer, way.profiled, self.options.step_stores),
            state_made(self.subject),
        ):
            yield

    def parameter_bytes(self, way: Stepping, trace: Trace) -> ParameterBytes:
        """Return the bytes of parameters that wait in a store; this moves all of them there and back once."""
        store, optimizer = self.options.parameter_store, self.options.optimizer
        if not way.stores_parameters or store is None or optimizer is None:
            return NONE_AWAY
        return parameter_bytes(self.model, optimizer, store, trace, self.machine)

    @cached_property
    def stepping_seconds(self) -> SteppingSeconds:
        """The seconds that ways of stepping add, measured when first asked for."""
        with self.profiling():
            return stepping_seconds(self.subject, self.machine.device, self.options.step_stores)
