"""A plan as data: what is done with each unit, what a step is predicted to need, and what both were made from.

The three are the bases of `Plan` instead of attributes of it, so that files and `dataclasses.replace` have one level.
A file is the data as JSON under a versioned schema: readable, diffable, and loaded without executing anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Literal, TypeVar, cast

from torchremat.errors import PlanError, ScheduleError
from torchremat.json_data import UNWRITTEN, JsonForm, JsonReader, fields_of, text_of
from torchremat.measuring.store_speeds import Speed
from torchremat.planning.bounds.certificates import Certificate, Claim
from torchremat.planning.layout import Calls, HeldOperators
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.searches.chains import Cost
from torchremat.planning.simulator.offload_choices import StoredUnit
from torchremat.planning.stepping import PLAIN_STEPPING, GivenOptimizer, Stepping
from torchremat.planning.training.conditions import Conditions, InputSizes
from torchremat.regions.offload_schedule import Transfer
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree, kept
from torchremat.tensors.handles import Store

PlainSource = Literal["measured", "predicted"]

P = TypeVar("P", bound="PlanData")

SCHEMA = "torchremat.plan"
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Point:
    """A point of a predicted step: its time, the live bytes, and what runs."""

    seconds: float
    live_bytes: int
    what: str


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted bytes and seconds of a training step under a plan, and of a plain one.

    Bytes are absolute: they include the live bytes before the step.

    Attributes:
        peak_bytes: Predicted peak of a training step: the larger of the next two.
        step_peak_bytes: Predicted peak of forward and backward.
        optimizer_peak_bytes: Peak of `optimizer.step()`; None if no optimizer was given.
        optimizer_state_bytes: State that the optimizer will have after its first step; part of `step_peak_bytes`.
        before_bytes: Live bytes before a step: parameters, gradients, buffers, optimizer state, inputs.
        kept_bytes: Predicted bytes that the forward leaves for the backward.
        where: What runs at the predicted peak of forward and backward.
        plain_peak_bytes: Peak of a step without any recompute.
        plain_source: Whether that was measured or predicted.
        plain_seconds: Seconds of forward and backward without any recompute, estimated.
        recompute_seconds: Seconds that recomputes add, estimated.
        recomputed_flops: Flops that recomputes add.
        recomputed_calls: Number of unit forwards that recomputes run; of recomputed units, if the step takes gradients
            itself.
        flops: Flops of one forward.
        floor_bytes: The smallest budget for which a plan was found.
        curve: The curve of the predicted step.
        plain_curve: The same without any recompute.
        moving_seconds: Seconds that copies into stores and back add, estimated.
        released_bytes: Bytes of the gradients that are freed in the backward.
        waiting_bytes: Bytes of the optimizer's state that waits in a store.
        stepping_seconds: Seconds that stepping in the backward, and moving the state and parameters, add, estimated.
        away_bytes: Bytes of the parameters that wait in a store.
        room_bytes: The most of them in memory at once in forward and backward; part of the predicted peak, which is an
            upper bound with it.
    """

    peak_bytes: int
    step_peak_bytes: int
    optimizer_peak_bytes: int | None
    optimizer_state_bytes: int
    before_bytes: dict[str, int]
    kept_bytes: int
    where: str
    plain_peak_bytes: int
    plain_source: PlainSource
    plain_seconds: float
    recompute_seconds: float
    recomputed_flops: int
    recomputed_calls: int
    flops: int
    floor_bytes: int
    curve: tuple[Point, ...]
    plain_curve: tuple[Point, ...]
    moving_seconds: float = 0.0
    released_bytes: int = 0
    waiting_bytes: int = 0
    stepping_seconds: float = 0.0
    away_bytes: int = 0
    room_bytes: int = 0

    @property
    def is_by_optimizer(self) -> bool:
        """Whether the predicted peak is that of the optimizer's step, not one of forward and backward."""
        return self.peak_bytes > self.step_peak_bytes

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over a plain step's."""
        added_s = self.recompute_seconds + self.moving_seconds + self.stepping_seconds
        return 1 + added_s / self.plain_seconds if self.plain_seconds else 1.0


@dataclass(frozen=True, kw_only=True)
class PlannedUnit:
    """One unit in a plan, in readable form.

    Attributes:
        name: The names of its modules.
        kind: Their types.
        saved_bytes: Bytes that it holds from forward to backward if it is kept, beyond its inputs.
        input_bytes: Bytes of its inputs.
        seconds: Seconds of one forward.
        flops: Flops of one forward.
        exchanges: How often it exchanges with other processes: "again" if its recompute does too; "" if it never does.
        line: File and line of the code of its first module; a plan that was loaded has none.
    """

    name: str
    kind: str
    saved_bytes: int
    input_bytes: int
    seconds: float
    flops: int
    exchanges: Literal["", "once", "again"] = ""
    line: str = field(default="", compare=False, metadata=UNWRITTEN)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """The request that a plan answers, and the step that it was made for.

    Attributes:
        budget_bytes: The budget.
        budget: The budget as it was given.
        device: The device that the bytes are on.
        cost: The quantity that was minimised.
        parameters: Shapes of the parameters that the plan was made for, by name.
        inputs: Elements in the inputs of the step's largest call of each module that it calls itself, mostly the model;
            larger inputs raise a warning.
        stores: Descriptions of the given stores.
        speeds: The speed of each store when the plan was made, the source of `moving_seconds`.
        given_stores: The stores themselves, for `apply`; a plan that was loaded has none.
        optimizer_store: A description of the store that was given for the optimizer's state; "" without one.
        given_optimizer_store: That store itself, for `apply`; a plan that was loaded has none.
        parameter_store: A description of the store that was given for parameters; "" without one.
        given_parameter_store: That store itself, likewise.
        given_optimizer: The optimizer, for `apply`, if it is alive; a plan that was loaded or copied has none.
        ran_out: Whether the search ran out of time, so that a better plan may exist.
        conditions: The conditions of the first call of each module that the step calls itself; other conditions raise a
            warning in the first step.
        planning_seconds: Seconds of planning: the runs of the step, and the search. 0 in older plans.
        planning_steps: Number of times that planning has run the step, or its forward alone.
        processes: Number of processes that have planned together.
        ranks: Their ranks, if there are several; a plan that was loaded has none.
    """

    budget_bytes: int
    budget: str
    device: str
    cost: Cost
    parameters: dict[str, tuple[int, ...]]
    inputs: InputSizes
    stores: tuple[str, ...] = ()
    speeds: tuple[Speed, ...] = ()
    given_stores: tuple[Store, ...] = field(default=(), compare=False, repr=False, metadata=UNWRITTEN)
    optimizer_store: str = ""
    given_optimizer_store: Store | None = field(default=None, compare=False, repr=False, metadata=UNWRITTEN)
    parameter_store: str = ""
    given_parameter_store: Store | None = field(default=None, compare=False, repr=False, metadata=UNWRITTEN)
    given_optimizer: GivenOptimizer = field(
        default_factory=GivenOptimizer, compare=False, repr=False, metadata=UNWRITTEN
    )
    ran_out: bool = field(default=False, compare=False)
    conditions: dict[str, Conditions] = field(default_factory=dict[str, Conditions])
    planning_seconds: float = field(default=0.0, compare=False)
    planning_steps: int = field(default=0, compare=False)
    processes: int = 1
    ranks: tuple[int, ...] = field(default=(), compare=False, repr=False, metadata=UNWRITTEN)


def _tree_data(tree: Tree) -> list[object]:
    """Return a tree as JSON types: a kept unit is its number, a region the list of its children."""
    return [
        _tree_data(node.children)
        if isinstance(node, RegionNode)
        else {"keep": node.stage, "option": node.option}
        if node.option
        else node.stage
        for node in tree
    ]


def _tree_in(reader: JsonReader, value: object, where: str) -> Tree:
    return tuple(_node_in(reader, item, place) for item, place in reader.items(value, where))


def _node_in(reader: JsonReader, value: object, where: str) -> Node:
    match value:
        case list():
            try:
                return RegionNode(_tree_in(reader, cast("list[object]", value), where))
            except ScheduleError as error:
                raise ValueError(f"{where}: {error}.") from error
        case {"keep": stage, "option": option, **others} if not others:
            return KeepNode(reader.read(stage, int, where), reader.read(option, int, where))
        case _:
            return KeepNode(reader.read(value, int, where))


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a plan does with each unit, and with the optimizer's step.

    Attributes:
        tree: The choice.
        units: The units that the tree is over.
        calls: The keys that identify their calls.
        held: The operators whose outputs units kept in part hold; the tree names an option for these units.
        stored: The kept units whose saved tensors wait in a store.
        unlike: Modules that are not recomputed as a whole since that would not repeat their forward, with the reasons.
        stepping: How the optimizer steps: whether its gradients are released, and whether its state and parameters are
            stored.
    """

    tree: Tree = field(metadata={"json": JsonForm(_tree_data, _tree_in)})
    units: tuple[PlannedUnit, ...]
    calls: Calls
    held: tuple[HeldOperators, ...] = ()
    stored: tuple[StoredUnit, ...] = ()
    unlike: dict[str, str] = field(default_factory=dict[str, str])
    stepping: Stepping = PLAIN_STEPPING

    @property
    def held_by_unit(self) -> dict[int, HeldOperators]:
        """The operators that each unit kept in part holds."""
        return {unit: one for one in self.held for unit in one.units}

    @property
    def transfers(self) -> dict[int, Transfer]:
        """The transfers of each unit whose saved tensors wait in a store, as the executor takes them."""
        return {one.unit: one.transfer for one in self.stored}

    @property
    def stored_bytes(self) -> int:
        """Bytes that go to stores in a step, and come back."""
        return sum(one.stored_bytes for one in self.stored)


@dataclass(frozen=True, kw_only=True)
class PlanData(Choice, Forecast, Provenance):
    """The fields of a plan.

    Attributes:
        certified: The certificate, if it was computed before; ask for `certificate`.
    """

    certified: Certificate | None = field(default=None, compare=False)
    claim: InitVar[Claim | None] = None  # of this plan only: `dataclasses.replace` does not copy it
    _claim: Claim | None = field(init=False, compare=False, repr=False)

    def __post_init__(self, claim: Claim | None) -> None:
        object.__setattr__(self, "_claim", claim)

    @property
    def is_of_stored(self) -> bool:
        """Whether parameters have waited in a store when it was made, so that it counts on that in any step."""
        return bool(self.away_bytes) and not self.stepping.stores_parameters

    @cached_property
    def certificate(self) -> Certificate | None:
        """How far it can be from the best possible, computed when first asked for; None without `certify=True`."""
        return self._claim() if self.certified is None and self._claim is not None else self.certified


def with_given(plan: P, options: PlanOptions) -> P:
    """Return the plan with the optimizer and the stores of this process, for `apply`."""
    return replace(
        plan,
        claim=plan._claim,
        given_stores=tuple(options.stores),
        given_optimizer=GivenOptimizer(options.optimizer),
        given_optimizer_store=options.optimizer_store,
        given_parameter_store=options.parameter_store,
    )


def file_of(plan: PlanData) -> str:
    """Return the text of a plan's file."""
    return text_of({"schema": SCHEMA, "version": VERSION, **fields_of(plan)})


def plan_in(text: str, kind: type[P], *, source: str) -> P:
    """Return the plan in a JSON text.

    Raises:
        PlanError: It is no JSON, no plan, of a newer version, or has a field that is missing, unknown or of another
        type.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{source}: not a plan, it is not JSON ({error}).") from error
    except RecursionError:
        raise PlanError(f"{source}: not a plan, it is nested too deeply.") from None
    if not isinstance(content, dict) or cast("dict[str, object]", content).get("schema") != SCHEMA:
        raise PlanError(f'{source}: not a plan, "schema" is not "{SCHEMA}".')
    values = dict(cast("dict[str, object]", content))
    version = values.pop("version", None)
    values.pop("schema")
    if type(version) is not int or version < 1:
        raise PlanError(f'{source}: "version" is {version!r}, expected a number from 1 to {VERSION}.')
    if version > VERSION:
        raise PlanError(
            f"{source}: the plan has version {version}, this torchremat reads up to {VERSION}. Install a newer "
            "torchremat, or plan again."
        )
    try:
        plan = JsonReader("a plan").read(values, kind, source)
        problem = next(_problems(plan), "")
    except ValueError as error:
        raise PlanError(str(error)) from error
    except RecursionError:
        raise PlanError(f"{source}: not a plan, its tree is nested too deeply.") from None
    if problem:
        raise PlanError(f"{source}: {problem}")
    return plan


def _problems(plan: PlanData) -> Iterator[str]:
    """Yield what a plan contradicts itself in."""
    calls, units, tree = plan.calls.units, len(plan.units), plan.tree
    found = [keep.stage for keep in kept(tree)]
    if found != list(range(units)) or len(calls) != units:
        yield f"the tree covers the units {found}, the plan has {units}, with calls for {len(calls)}."
    parts = sorted(unit for one in plan.held for unit in one.units)
    chosen = [keep.stage for keep in kept(tree) if keep.option]
    inside = [keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,)) if keep.option]
    nested = [unit for unit in inside if any(one.held and unit in one.units for one in plan.held)]
    if nested:
        yield f"the tree keeps the units {nested} in part inside of regions, which is not possible."
    if parts != chosen:
        yield f"the tree keeps the units {chosen} in part, and `held` is for the units {parts}."
    uncut = [one.cuts for one in plan.held if one.cuts != tuple(sorted({*one.cuts} - {0}))]
    if uncut:
        yield f"`cuts` are no rising numbers above 0: {uncut[0]}."
    missing = [one.held for one in plan.held if max(one.held, default=-1) >= len(one.operators)]
    if missing:
        yield f"`held` has numbers of operators that do not exist: {missing[0]}."
    last = max((max(one.unit, one.leaves_after, one.comes_before) for one in plan.stored), default=0)
    if last >= units or any(one.store >= len(plan.stores) for one in plan.stored):
        yield "`stored` names stores or units that do not exist."
    if plan.speeds and len(plan.speeds) != len(plan.stores):
        yield f"there are {len(plan.stores)} stores, and the speeds of {len(plan.speeds)}."
    empty = [unit for unit, made in enumerate(calls) if not made]
    if empty:
        yield f"the units {empty} have no calls."
    if not plan.calls.roots:
        yield "`calls` has no roots, and without one nothing is recomputed."
