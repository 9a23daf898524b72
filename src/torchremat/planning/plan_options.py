"""The options of plans: one value, from the functions that take them as keywords down to the search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Literal, ParamSpec, TypedDict, TypeVar, cast, get_type_hints

import torch

from torchremat.errors import UnsupportedError, check_flags
from torchremat.planning.devices.device import Device
from torchremat.planning.peers.peers import Group, check_group
from torchremat.planning.searches.chains import Cost, check_cost
from torchremat.planning.searches.search_budget import Progress, checked
from torchremat.planning.stepping import NO_STORES, Stepping, StepStores, ways_of_stepping
from torchremat.planning.store_profiles import check_apart, check_step_stores, check_stores
from torchremat.tensors.handles import Store

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a plan, checked. Functions of this library take them as keywords: `plan(..., cost="flops")`.

    Attributes:
        optimizer: If given, its state and the peak of its step count.
        device: The device whose bytes count; that of the first parameter if not given. With `on="meta"` the device to
            plan for: a name (`"h100"`), a file that `Planner.save_device` has written, or a `Device`.
        cost: The quantity to minimise: predicted `"seconds"`, or `"flops"`, which are exact and repeatable.
        operators: Whether parts of a module may be kept: the outputs of some of its operators.
        stores: Stores where saved tensors may wait instead of being recomputed, if that is faster; the speed of each is
            measured. Without any, nothing is stored.
        allow_lossy: Whether stores may lose digits, so that gradients are not those of the plain run.
        release_gradients: Whether each parameter of `optimizer` makes its step in the backward, when its gradient is
            complete, and the gradient is freed: True, or `"auto"` if the plan may choose it, where it is faster than
            other ways to fit the budget. See `torchremat.release_gradients`, whose rules are those of the training loop
            then.
        accumulates: Whether steps begin with the gradients of others before them: several backwards come before each
            step of `optimizer`, or gradients are set to zero, or dropped after the forward. A parameter that has a
            gradient now is counted with it in any case. With `release_gradients` only the last of these backwards
            releases, and `torchremat.last_microbatch(optimizer)` says before it that it is the last.
        clip_value: With `release_gradients`: as of `clip_grad_value_`.
        optimizer_store: A store where the state of `optimizer` may wait, if that is faster than other ways to fit the
            budget. See `torchremat.offload_optimizer`.
        parameter_store: A store where parameters may wait while their modules do not run, if no other way that is
            allowed fits the budget, or none is as fast. See `torchremat.offload_parameters`.
        certify: Whether plans have a `certificate` of how far they can be from the best: one more run of the step, and
            about a second when it is first asked for.
        on: `"meta"` to run nothing: the step is profiled on tensors without data, possibly for an absent device. Model
            and batch may be real, on the meta device, or fakes.
        group: The processes that plan together: `"step"` for those that the step communicates with, as its runs show; a
            process group, where it communicates in ways that torch.distributed does not see; or None for this process
            alone, which is refused where the step communicates.
        progress: Called with the progress of planning; an exception that it raises ends planning. If not given, `plan`,
            `frontier` and `fit` show a bar in a terminal beyond two seconds, if rich is installed; False for neither.
            `progress_bar` of `torchremat.reports.bars` makes an observer that shows a bar.

    Raises:
        UnsupportedError: `cost`, `operators`, `allow_lossy`, `release_gradients`, `certify` or `progress` is not valid;
            one of the stores is no store, or is lossy and that is not allowed; or there are stores or
            `release_gradients` with `on="meta"`, or `parameter_store` is among `stores` and has a limit.
    """

    optimizer: torch.optim.Optimizer | None = None
    device: torch.device | str | Path | Device | None = None
    cost: Cost = "seconds"
    operators: bool = True
    stores: Sequence[Store] = ()
    allow_lossy: bool = False
    release_gradients: bool | Literal["auto"] = False
    accumulates: bool = False
    clip_value: float | None = None
    optimizer_store: Store | None = None
    parameter_store: Store | None = None
    certify: bool = False
    on: Literal["meta"] | None = None
    group: Group = "step"
    progress: Callable[[Progress], None] | Literal[False] | None = None

    def __post_init__(self) -> None:
        check_cost(self.cost)
        flags = {"operators": self.operators, "allow_lossy": self.allow_lossy, "accumulates": self.accumulates}
        check_flags(**flags, certify=self.certify)
        checked(self.progress)
        check_group(self.group)
        object.__setattr__(self, "stores", check_stores(self.stores, allow_lossy=self.allow_lossy))
        if self.release_gradients not in (True, False, "auto") or type(self.release_gradients) is int:
            raise UnsupportedError(
                f'release_gradients={self.release_gradients!r}: allowed are True, False and "auto", with which the '
                "plan may choose it."
            )
        if not self.release_gradients and self.clip_value is not None:
            raise UnsupportedError(
                "clip_value= says how gradients are released. Leave it out, or allow that with "
                'release_gradients=True or "auto".'
            )
        check_step_stores(self.step_stores)
        check_apart(self.stores, self.parameter_store, "parameter_store=")
        if self.stores and self.on is not None:
            raise UnsupportedError(
                "stores are chosen by their speed, which has to be measured on the device: leave out stores or "
                f"on={self.on!r}."
            )
        if (self.release_gradients or self.step_stores != NO_STORES) and self.on is not None:
            raise UnsupportedError(
                "release_gradients=, optimizer_store= and parameter_store=: parts of the optimizer's step run in the "
                f"backward to be measured, and need data. Leave them out, or on={self.on!r}."
            )

    @property
    def step_stores(self) -> StepStores:
        """The stores where the optimizer's state and parameters may wait."""
        return StepStores(state=self.optimizer_store, parameters=self.parameter_store)

    @property
    def in_words(self) -> str:
        """The options that decide about a plan, alike in processes that plan together."""
        kinds = {"optimizer", "optimizer_store", "parameter_store", "stores"}  # each process has its own
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        for name in kinds:
            value = found[name]
            found[name] = [type(one).__name__ for one in (value if isinstance(value, tuple) else (value,))]
        return ", ".join(f"{name}={found[name]!r}" for name in found if name not in ("device", "group", "progress"))

    @property
    def ways_of_stepping(self) -> tuple[Stepping, ...]:
        """The ways in which the optimizer may step, in the order of the seconds that they add."""
        return ways_of_stepping(
            releases=self.release_gradients,
            stores=self.optimizer_store is not None,
            accumulates=self.accumulates,
            clip_value=self.clip_value,
            stores_parameters=self.parameter_store is not None,
        )

    @property
    def keywords(self) -> PlanKeywords:
        """The options by name, for a function that takes them as keywords."""
        return cast("PlanKeywords", vars(self).copy())


class TrainingKeywords(TypedDict, total=False):
    """The options as keywords, for type checkers: those of a training whose loop makes the steps."""

    cost: Cost
    operators: bool
    release_gradients: bool | Literal["auto"]
    optimizer_store: Store | None
    parameter_store: Store | None


class PlanKeywords(TrainingKeywords, total=False):
    """And all others; `takes` says which of them a function takes."""

    optimizer: torch.optim.Optimizer | None
    device: torch.device | str | Path | Device | None
    stores: Sequence[Store]
    allow_lossy: bool
    accumulates: bool
    clip_value: float | None
    certify: bool
    on: Literal["meta"] | None
    group: Group
    progress: Callable[[Progress], None] | Literal[False] | None


# The names of the options of a plan; of a step that runs here; of a training whose loop makes the steps; of plans for
# changing shapes.
PLANNING = tuple(one.name for one in fields(PlanOptions))
FITTING = tuple(name for name in PLANNING if name != "on")
TRAINING = tuple(get_type_hints(TrainingKeywords))
ADAPTING = ("optimizer", "device", "cost", "operators", "release_gradients", "accumulates", "group")


def takes(names: Sequence[str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Give a function with `**options: Unpack[...]` the signature that lists these, and let it take no others.

    `names` are the names of the options.
    """
    kinds = get_type_hints(PlanOptions)
    listed = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kinds[one.name])
        for one in fields(PlanOptions)
        if one.name in names
    ]

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        plain = signature(function)
        named = [one for one in plain.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        full = plain.replace(parameters=[*named, *listed])

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            unknown = [name for name in kwargs if name not in full.parameters]
            if unknown:
                raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}")
            return function(*args, **kwargs)

        vars(call)["__signature__"] = full
        return call

    return decorated
