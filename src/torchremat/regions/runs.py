"""Several calls as one region, and regions inside regions, while the parent's code stays as it is.

While a `Scope` is open, it says for each call in which regions the call runs, outermost first. The calls of one region
enter it one by one: an input that is an output of an earlier call of the run, by identity and version, is recomputed;
every other input is held. So the code between the calls (glue) never runs twice and needs no change, and a call that
cannot be linked is simply not linked.

    h = layer3(x)      region R: call 0, holds x
    h = layer4(h)      region R: call 1, its input is output 0 of call 0: linked, nothing held
    h = h + skip       glue: runs once, saves outside of R
    h = layer5(h)      region R: call 2, holds h

Missing on purpose: glue inside regions. It belongs to the parent's forward, and no part of that can run alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from torch import nn

from torchremat._compat.autograd import top_saved_tensor_hooks
from torchremat._compat.checkpoints import is_hook_of_torch_checkpoint
from torchremat._compat.sharding import is_sharded
from torchremat.errors import OrderWarning, UnsupportedError, warn
from torchremat.regions.calls import Body
from torchremat.regions.offload_schedule import OffloadRun, OffloadSchedule, Trigger
from torchremat.regions.region import Region
from torchremat.regions.settings import Settings
from torchremat.regions.threads import thread
from torchremat.regions.transforms import new_region


@dataclass(frozen=True, slots=True, eq=False)
class RegionPlace:
    """One region of a scope, by identity.

    Attributes:
        calls: The number of calls that run in it.
        name: The words for it in messages.
        first: The first of the units that it covers, for the code that made the scope.
        last: The last of them.
        settings: How it behaves, if not as the scope says.
    """

    calls: int
    name: str
    first: int = -1
    last: int = -1
    settings: Settings | None = None

    def __str__(self) -> str:
        return f"`{self.name}`"


@dataclass(frozen=True, slots=True, eq=False)
class CallDecision:
    """The decision on one call: the regions around it, outermost first, the scope for the calls inside it, its stop.

    A call that `is_open` is only counted, and the calls inside it belong to the scope of the call itself.
    """

    places: tuple[RegionPlace, ...] = ()
    inside: Scope | None = None
    stop: Trigger | None = None
    is_open: bool = False


@dataclass(frozen=True, eq=False)
class Scope:
    """The choices for the calls that are made while one call runs.

    Attributes:
        choices: By name of the module and its number of earlier calls in the scope.
        settings: How the regions behave.
        offload_schedule: The transfers into stores and back, at the calls that have a stop.
        unmet: The names of modules that no call was expected of.
        calls_vary: Whether unexpected calls are acceptable.
    """

    choices: Mapping[tuple[str, int], CallDecision]
    settings: Settings
    offload_schedule: OffloadSchedule | None = field(default=None, kw_only=True)
    unmet: frozenset[str] = field(default=frozenset(), kw_only=True)
    calls_vary: bool = field(default=False, kw_only=True)
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", self.unmet.union(name for name, _ in self.choices))

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` with the scope open: the calls that it makes are counted from zero, and no region is open yet."""
        opened = _Opened(self)
        output = opened.run(body, *args, **kwargs)
        self.ended(opened.counts)
        return output

    def begun(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record that a module whose call opens the scope is called, with these arguments."""

    def counted_elsewhere(self) -> None:
        """Record that its owner counts other bytes in addition to those of the scope's model."""

    def ended(self, counts: Mapping[str, int]) -> None:
        """Record the number of calls, in a run that has ended, of each module that the scope has choices for."""


class _Opened:
    """One run of a scope: the regions that wait for further calls. They are dropped with it, also if the run raises."""

    __slots__ = ("counts", "in_flight", "pack", "regions", "scope")

    def __init__(self, scope: Scope, counts: dict[str, int] | None = None) -> None:
        self.scope = scope
        self.counts: dict[str, int] = {} if counts is None else counts
        self.regions: dict[RegionPlace, Region] = {}
        self.in_flight = None if scope.offload_schedule is None else OffloadRun(scope.offload_schedule)
        self.pack = _pack_hook()

    def choice(self, name: str) -> CallDecision | None:
        """Return the choice for the next call of `name`; None if the scope does not know the name."""
        if name not in self.scope.names:
            return None
        count = self.counts.get(name, 0)
        self.counts[name] = count + 1
        found = self.scope.choices.get((name, count))
        if found is None:
            said = (
                f"`{name}` was called, and was not when the model was planned; it is recomputed by itself. Plan a step "
                "that calls all that can be called: with layers that are left out at random, one that leaves out none."
                if name in self.scope.unmet
                else f"`{name}` was called {count + 1} times in one forward, more often than planned for; the "
                "additional calls are recomputed one by one. Plan again if the model has changed."
            )
            if not (self.scope.calls_vary and name in self.scope.unmet):
                warn(said, OrderWarning)
            found = CallDecision((RegionPlace(1, name),))
        return _PLAINLY if self.is_overruled() else found

    def is_overruled(self) -> bool:
        """Return whether `torch.utils.checkpoint` runs the call. See NOTE [ Checkpoints inside a scope ]."""
        pack = _pack_hook()
        return pack is not self.pack and is_hook_of_torch_checkpoint(pack)

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` with the scope open."""
        scopes = thread.now.scopes
        scopes.append(self)
        try:
            output = body(*args, **kwargs)
        finally:
            scopes.pop()
        if self.in_flight is not None:
            self.in_flight.end()
        return output


# NOTE [ Checkpoints inside a scope ]
#
# The code of a model that runs in a scope may itself use a checkpoint around calls that the scope has choices for. The
# forward and the recompute of that checkpoint must make the same choices, although the scope is closed long before the
# recompute:
#
#   ours      remembers the counts that it began with, and opens the scope again with these. No region spans its edge:
#             the regions of the scope are others inside of it than outside, in the forward as in the recompute.
#   torch's   tells us nothing when it recomputes, so the calls are plain ones, in the forward as in the recompute.


class _Continued:
    """The body of a checkpoint that was called in a scope, which it continues.

    See NOTE [ Checkpoints inside a scope ].
    """

    __slots__ = ("body", "counts", "opened", "scope")

    def __init__(self, opened: _Opened, body: Body) -> None:
        self.opened: _Opened | None = opened
        self.scope = opened.scope
        self.counts = dict(opened.counts)
        self.body = body

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        opened, self.opened = self.opened, None
        # In the forward the caller's own counts go on.
        counts = opened.counts if opened is not None else dict(self.counts)
        return _Opened(self.scope, counts).run(self.body, *args, **kwargs)


def continued(body: Body) -> Body:
    """Return a body that runs `body` under the scope that is open now, also in a recompute."""
    if not thread.now.scopes:
        return body
    opened = cast("_Opened", thread.now.scopes[-1])
    if not opened.scope.names:
        return body
    return partial(_PLAIN.run, body) if opened.is_overruled() else _Continued(opened, body)


def is_in_scope() -> bool:
    """Return whether a scope is open that may have choices for calls."""
    return bool(thread.now.scopes) and bool(cast("_Opened", thread.now.scopes[-1]).scope.names)


def open_choice(name: str) -> CallDecision | None:
    """Return the innermost open scope's choice for the next call of `name`; None without an open scope."""
    scopes = thread.now.scopes
    return cast("_Opened", scopes[-1]).choice(name) if scopes else None


def run_choice(
    choice: CallDecision,
    function: Callable[..., object],
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Run a call as chosen, in the regions that are open for it."""
    if choice.is_open:
        return function(*args, **kwargs)
    opened = cast("_Opened", thread.now.scopes[-1])
    # The inner calls have their own scope, or none: never the scope of this call.
    inside = partial((choice.inside or _PLAIN).run, function)
    if choice.stop is None or opened.in_flight is None:
        return _enter(choice.places, opened.regions, opened.scope.settings, inside, module, args, kwargs)
    entering = partial(_enter, choice.places, opened.regions, opened.scope.settings, inside, module, args, kwargs)
    return opened.in_flight.run(choice.stop, opened.pack, entering)


def _enter(
    places: tuple[RegionPlace, ...],
    regions: dict[RegionPlace, Region],
    settings: Settings,
    body: Body,
    module: nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    if not places:
        return body(*args, **kwargs)
    place = places[0]
    if place.calls > 1 and is_sharded(module):
        raise UnsupportedError(
            f"region {place} is a run of {place.calls} calls, and one of them is of a module that `fully_shard` has "
            "sharded. To recompute the run, the parameters of all of its modules are needed at once, and FSDP gathers "
            "those of one module at a time. Make each sharded module its own region (`wrap` without a plan), or "
            "shard the module that the whole run is in and none inside of it."
        )
    region = regions.pop(place, None) or new_region(place.settings or settings, place)
    last = len(region.calls) + 1 >= place.calls
    if not last:
        regions[place] = region
    if len(places) > 1:
        body = _Nested(places[1:], regions, settings, body, module)
    return region.call(body, args, kwargs, [module], last=last)


@dataclass(slots=True, eq=False)
class _Nested:
    """The body of a call in an outer region: the same call in its inner ones.

    In the forward the inner regions belong to the open scope; in a recompute of the outer region they are new ones,
    shared by the calls of that recompute.
    """

    places: tuple[RegionPlace, ...]
    regions: dict[RegionPlace, Region] | None
    settings: Settings
    body: Body
    module: nn.Module

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        if self.regions is not None:
            regions, self.regions = self.regions, None
        else:
            regions = _regions_of_recompute()
        return _enter(self.places, regions, self.settings, self.body, self.module, args, kwargs)


def _regions_of_recompute() -> dict[RegionPlace, Region]:
    if not thread.now.scopes:
        thread.now.scopes.append(_Opened(_PLAIN))
    return cast("_Opened", thread.now.scopes[-1]).regions


def _pack_hook() -> object:
    hooks = top_saved_tensor_hooks(True)
    return hooks[0] if hooks is not None else None


# The scope in which every call is a plain call.
_PLAIN = Scope({}, Settings())
_PLAINLY = CallDecision()
