"""Puts a tree of regions on a model, and takes it off again."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from torchremat.errors import PlanError, first_of
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.modules import visible_modules
from torchremat.planning.profiles.traces import named
from torchremat.planning.profiles.units import Units
from torchremat.planning.stepping import (
    PLAIN_STEPPING,
    Stepping,
    SteppingHandles,
    belongs_to,
    removed_with,
    stepping_plainly,
)
from torchremat.planning.training.checks import Checks, PlannedScope, is_part_of
from torchremat.planning.training.conditions import Conditions, InputSizes
from torchremat.policies.ordinals import save_ordinals
from torchremat.regions.decisions import AnyPolicy
from torchremat.regions.offload_schedule import OffloadSchedule, Transfer, Trigger
from torchremat.regions.patches import (
    ForwardOwner,
    called_attribute,
    can_be_wrapped,
    check_uncovered,
    forward_under,
    is_wrapped,
    restore_forward,
    scopes_on,
    set_forward,
    wrapped_forward,
)
from torchremat.regions.runs import CallDecision, RegionPlace
from torchremat.regions.settings import Settings
from torchremat.schedules.chain import Node, RegionNode, Tree


@dataclass(frozen=True, kw_only=True)
class PlannedCall:
    """One call of a unit, with the keys that identify it.

    Attributes:
        name: The module's name.
        number: The number of its earlier calls in the same call of the root.
        inside: Names of the modules that are called inside it.
    """

    name: str
    number: int
    inside: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The calls that were planned.

    Attributes:
        units: The calls of all units.
        others: The calls between the units.
        roots: The names of the roots.
        opened: The calls that contain units.
        met: The names of all modules that were called; none in plans that are older than this.
        vary: Whether the calls may depend on values, as in mixtures of experts.
    """

    units: tuple[tuple[PlannedCall, ...], ...]
    others: tuple[PlannedCall, ...]
    roots: tuple[str, ...]
    opened: tuple[PlannedCall, ...] = ()
    met: frozenset[str] = frozenset()
    vary: bool = False


def calls_of(units: Units) -> Calls:
    """Return the calls that must be known to put a tree of units on a model."""
    trace = units.trace

    def planned(call: int, key: tuple[str, int]) -> PlannedCall:
        inside = frozenset(trace.calls[inner].name for inner in trace.descendants(call))
        return PlannedCall(name=key[0], number=key[1], inside=inside)

    # A split call is counted only where another call of the same module was not split.
    whole = {name for unit in units.units for name, _ in unit.keys}
    return Calls(
        units=tuple(tuple(map(planned, unit.calls, unit.keys)) for unit in units.units),
        others=tuple(planned(call, key) for call, key in units.others),
        roots=tuple(dict.fromkeys(trace.calls[root].name for root in units.roots)),
        opened=tuple(planned(call, key) for call, key in units.opened if key[0] in whole),
        met=trace.untraced.union(call.name for call in trace.calls),
        vary=trace.operators.is_sized_by_values,
    )


def unmet_modules(model: nn.Module, calls: Calls) -> dict[str, str]:
    """Return the modules without a traced call, by name with the name of the root; only the outermost of each root."""
    found: dict[str, str] = {}
    for name, module in visible_modules(model) if calls.met else ():
        root = next((one for one in calls.roots if is_part_of(name, one)), None)
        if root is None or name in calls.met or any(is_part_of(name, other) for other in found):
            continue
        if can_be_wrapped(module):  # lists of modules are not called, but their items may be
            found[name] = root
    return found


@dataclass(frozen=True, kw_only=True)
class HeldOperators:
    """The operators whose outputs units kept in part hold. The rest of these units is recomputed, maybe in parts.

    Attributes:
        units: The units, by number.
        operators: The torch names of all operators that each of them runs, without casts and views.
        held: The numbers of the operators whose outputs are held.
        cuts: The saves that begin a part of the recompute; see `Settings.cuts`.
        saves: How many of the operators have begun before each save; empty if that is not known.
    """

    units: tuple[int, ...]
    operators: tuple[str, ...]
    held: tuple[int, ...]
    cuts: tuple[int, ...] = ()
    saves: tuple[int, ...] = ()

    @property
    def policy(self) -> AnyPolicy | None:
        """The policy that holds these outputs, if there are any."""
        return save_ordinals(self.operators, frozenset(self.held), self.saves) if self.held else None


@dataclass(frozen=True, kw_only=True)
class Application(ForwardOwner):
    """The part of a plan that is put on a model; it identifies the plan there, on copies, and by equal plans."""

    calls: Calls
    tree: Tree
    held: tuple[HeldOperators, ...]
    transfers: Mapping[int, Transfer]
    stepping: Stepping = PLAIN_STEPPING

    def leave(self, module: nn.Module) -> None:
        """Let the optimizer step as before, if it steps in a way for this module."""
        removed_with(module)


def choices_of(
    calls: Calls,
    tree: Tree,
    settings: Settings,
    held: Iterable[HeldOperators] = (),
    stops: frozenset[int] = frozenset(),
) -> dict[tuple[str, int], CallDecision]:
    """Return the regions that each call runs in, and the stops of the calls of some units.

    A kept call has no entry, unless a module that has one is called inside it and would be counted.
    """
    choices: dict[tuple[str, int], CallDecision] = {}
    own = {unit: replace(settings, policy=one.policy, cuts=one.cuts) for one in held for unit in one.units}
    kept = list(_choose(calls.units, tree, (), choices, own))
    for unit in stops:
        last = len(calls.units[unit]) - 1
        for place, call in enumerate(calls.units[unit]):
            key = call.name, call.number
            choices[key] = replace(choices.get(key, CallDecision()), stop=Trigger(unit, is_last=place == last))
    names = {name for name, _ in choices}
    for call in (*(call for unit in kept for call in calls.units[unit]), *calls.others):
        if call.inside & names:
            choices.setdefault((call.name, call.number), CallDecision())
    names.update(name for name, _ in choices)  # the kept calls of a module that is counted now, and its split ones
    for call in calls.opened:
        if call.name in names:
            choices[call.name, call.number] = CallDecision(is_open=True)
    return choices


def _choose(
    units: Sequence[Sequence[PlannedCall]],
    nodes: Iterable[Node],
    places: tuple[RegionPlace, ...],
    choices: dict[tuple[str, int], CallDecision],
    own: dict[int, Settings],
) -> Iterable[int]:
    """Enter the calls in regions into `choices`, and yield the units that are in no region.

    `own` are the settings of units that are separate regions, since they are kept in part.
    """
    for node in nodes:
        if isinstance(node, RegionNode):
            count = sum(len(units[unit]) for unit in range(node.first, node.last + 1))
            ends = [units[node.first][0].name, units[node.last][-1].name]
            place = RegionPlace(count, " .. ".join(dict.fromkeys(ends)), node.first, node.last)
            yield from _choose(units, node.children, (*places, place), choices, own)
        elif node.option:
            calls = units[node.stage]
            name = " .. ".join(dict.fromkeys([calls[0].name, calls[-1].name]))
            place = RegionPlace(len(calls), name, node.stage, node.stage, own[node.stage])
            choices.update(((call.name, call.number), CallDecision((*places, place))) for call in calls)
        elif places:
            choices.update(((call.name, call.number), CallDecision(places)) for call in units[node.stage])
        else:
            yield node.stage


def install(
    model: nn.Module,
    calls: Calls,
    tree: Tree,
    settings: Settings,
    *,
    held: Iterable[HeldOperators] = (),
    inputs: InputSizes | None = None,
    conditions: Mapping[str, Conditions] | None = None,
    rise_bytes: int | None = None,
    gradient_bytes: int = 0,
    offload_schedule: OffloadSchedule | None = None,
    slowdown: float | None = None,
    unmet: Mapping[str, str] | None = None,
    checks: Checks | None = None,
    stepping: Stepping = PLAIN_STEPPING,
    handles: Callable[[], SteppingHandles] | None = None,
) -> Application:
    """Make the calls of a model regions by a tree, and return the application; on an error nothing changes.

    `handles` lets the optimizer step in the way `stepping`; this ends when the application is taken off.

    Calls of `unmet` modules, by name with the root of each, are reported, and are separate regions.
    """
    held, transfers = tuple(held), {} if offload_schedule is None else dict(offload_schedule.transfers)
    applied = Application(calls=calls, tree=tree, held=held, transfers=transfers, stepping=stepping)
    choices = choices_of(
        calls, tree, settings, held, frozenset() if offload_schedule is None else offload_schedule.stops
    )
    names = {name for name, _ in choices}
    watched = {name: root for name, root in (unmet or {}).items() if root not in names}
    done: list[nn.Module] = []
    try:
        for name in sorted(names.union(calls.roots, watched)):
            module = model.get_submodule(name)
            # A root that is itself the unit has no caller that opens a scope: each of its calls is a region.
            if name in names and name in calls.roots:
                own = next((place.settings for place in choices[name, 0].places), None) or settings
            else:
                own = None
            scope = (
                None
                if name in names or name in watched
                else PlannedScope(
                    choices,
                    settings,
                    name,
                    inputs,
                    rise_bytes,
                    slowdown,
                    gradient_bytes=gradient_bytes,
                    offload_schedule=offload_schedule,
                    conditions=(conditions or {}).get(name),
                    unmet=frozenset(one for one, root in watched.items() if root == name),
                    calls_vary=calls.vary,
                    others=tuple(one for one in calls.roots if one != name and is_part_of(one, name)),
                    checks=checks,
                )
            )
            set_forward(module, name, own, scope, called_attribute(module), applied)
            done.append(module)
        if handles is not None:
            # With the first one: if it cannot end yet, nothing has been taken off.
            first = {*map(id, done)}
            belongs_to(next(one for one in model.modules() if id(one) in first), handles())
    except BaseException:
        for module in done:
            restore_forward(module)
        raise
    return applied


def check_bare(model: nn.Module) -> None:
    """Raise a PlanError if modules of a model are wrapped already."""
    wrapped = [name or "the model" for name, module in model.named_modules() if is_wrapped(module)]
    if wrapped:
        raise PlanError(
            f"the model has wrapped modules already ({first_of(wrapped)}). "
            "Remove the plan that is applied, or unwrap it, first."
        )


@contextmanager
def bare(model: nn.Module) -> Generator[None]:
    """Take the forwards that were put on a model off for a block, and let the optimizer of a plan step plainly.

    Raises:
        WrapError: Another library has wrapped one of them since, and would go on calling it.
        UnsupportedError: See `SteppingHandles.remove`.
    """
    check_uncovered(model)
    with stepping_plainly(model.modules()), _bare_forwards(model):
        yield


@contextmanager
def _bare_forwards(model: nn.Module) -> Generator[None]:
    aside = [(module, *found) for module in model.modules() if (found := wrapped_forward(module)) is not None]
    for module, attribute, forward in aside:
        del module.__dict__[attribute]
        if forward.own is not None:
            module.__dict__[attribute] = forward.own
    try:
        yield
    finally:
        with uninterrupted():
            for module, attribute, forward in aside:
                module.__dict__[attribute] = forward


def applied_scopes(model: nn.Module) -> list[PlannedScope]:
    """Return the scopes that `install` has put on a model."""
    return [scope for scope in scopes_on(model) if isinstance(scope, PlannedScope)]


def expect_larger(model: nn.Module) -> None:
    """Let the plan on a model not warn of larger inputs: the owner of the plan handles these."""
    for scope in applied_scopes(model):
        scope.told.append("")


def modules_under(model: nn.Module, applied: Application) -> list[nn.Module]:
    """Return the modules with the same application by `install`, on this model or on the one that it is a copy of."""
    found: list[nn.Module] = []
    known: dict[int, bool] = {}  # all modules of a model share one
    for module in model.modules():
        forward = forward_under(module)
        owner = None if forward is None else forward.owner
        if owner is not None and known.setdefault(id(owner), owner is applied or owner == applied):
            found.append(module)
    return found


def put_on(model: nn.Module) -> str:
    """Return a description of what is on a model: plans, and otherwise wrapped modules."""
    wrapped = [(name, found) for name, module in model.named_modules() if (found := forward_under(module))]
    others = [named(name) for name, forward in wrapped if forward.owner is None]
    words = [f"`wrap` of {first_of(others)}"] if others else []
    if len(others) < len(wrapped):
        words.append("another plan")
    return " and ".join(words) or "nothing"


def uninstall(model: nn.Module, applied: Application) -> None:
    """Undo `install`, and nothing else.

    Raises:
        WrapError: Another library has wrapped a forward since; nothing has changed.
    """
    check_uncovered(model)
    for module in modules_under(model, applied):
        restore_forward(module)


@contextmanager
def installed(
    model: nn.Module,
    calls: Calls,
    tree: Tree,
    settings: Settings,
    held: Iterable[HeldOperators] = (),
    *,
    offload_schedule: OffloadSchedule | None = None,
) -> Generator[None]:
    """Put a tree on the model for a block."""
    applied = install(model, calls, tree, settings, held=held, offload_schedule=offload_schedule)
    try:
        yield
    finally:
        with uninterrupted():
            uninstall(model, applied)
