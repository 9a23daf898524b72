"""The observations of a plan on a model that trains: whether the step is the planned one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from torchremat._compat.autograd import current_graph_task
from torchremat.errors import OrderWarning, PlanWarning, ShapeWarning, warn
from torchremat.planning.checks import Checks
from torchremat.planning.conditions import Conditions, InputSizes, conditions_of
from torchremat.regions.calls import Body
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.regions.runs import Scope

# NOTE [ The first step under a plan ]
# A plan is for the step as it was planned: mode, precision, sharding and calls. The first step after the plan was
# applied is compared with that, once, and each difference is one warning that names it; later steps are not checked.
# A run of the library's own, to measure, is no training step, and is not compared: `rehearsing` marks it.


@dataclass(frozen=True, eq=False)
class PlannedScope(Scope):
    """The scope of a root, which also checks the sizes of the root's inputs."""

    root: str = ""
    inputs: InputSizes | None = None
    rise_bytes: int | None = None
    slowdown: float | None = None
    told: list[str] = field(default_factory=list[str])  # once per application of a plan
    conditions: Conditions | None = None
    # Reference for the comparison of the first step. See NOTE [ The first step under a plan ]
    seen: list[object] = field(default_factory=list[object])
    checks: Checks | None = None

    def run(self, body: Body, /, *args: object, **kwargs: object) -> object:
        """Run `body` with the scope open."""
        if self.inputs is not None and not self.told:
            said = self.inputs.are_exceeded(self.root, (args, kwargs))
            if said is not None:
                self.told.append(said)
                warn(said, ShapeWarning)
        if self.checks is None or not _is_a_step():
            return super().run(body, *args, **kwargs)
        try:
            output = super().run(body, *args, **kwargs)
        except BaseException:
            self.checks.failed()
            raise
        self.checks.came(output)
        return output

    def begun(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compare, in the first step, the conditions of the call with those of the planned one."""
        if not _is_a_step():
            return
        if self.checks is not None:
            self.checks.begun(module, _named(self.root), (args, kwargs))
        if self.seen or self.conditions is None:
            return
        now = conditions_of(module)
        self.seen.append(now)
        for said in self.conditions.differences(now):
            warn(f"{_named(self.root)} has a plan that was made under other conditions: {said}.", PlanWarning)

    def counted_elsewhere(self) -> None:
        """Leave the bytes of the model to the owner of the plan, which is one of several plans or changes."""
        if self.checks is not None:
            self.checks.only_counters()

    def ended(self, counts: Mapping[str, int]) -> None:
        """Compare, in the first step, the number of calls of modules with the planned number."""
        if len(self.seen) != 1 or self.calls_vary:
            return
        self.seen.append(counts)
        planned = Counter(name for name, _ in self.choices if is_part_of(name, self.root))
        fewer = [name for name, times in planned.items() if counts.get(name, 0) < times]
        if fewer:
            name = fewer[0]
            more = f", and {len(fewer) - 1} others were called less often too" if fewer[1:] else ""
            warn(
                f"`{name}` was called {counts.get(name, 0)} times in one forward, and planned for {planned[name]}"
                f"{more}: the step that was planned is not the one that trains, and its peak may be elsewhere. Plan "
                "the step that trains.",
                OrderWarning,
            )


def _is_a_step() -> bool:
    """Return whether a step of the user's begins, not a recompute by a checkpoint around the model."""
    return not is_rehearsing() and current_graph_task() == -1


def _named(root: str) -> str:
    return f"`{root}`" if root else "the model"


def is_part_of(name: str, owner: str) -> bool:
    """Return whether a module is another one, or is inside it, by their names."""
    return f"{name}.".startswith(f"{owner}." if owner else "")
