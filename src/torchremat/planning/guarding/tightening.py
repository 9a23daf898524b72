"""Plans again after a failure: for fewer bytes than the failed attempt needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from torchremat.errors import TorchrematError
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.planning.layout import bare
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.planner import Planner
from torchremat.planning.results.plans import Plan
from torchremat.regions.patches import count_elsewhere, is_wrapped
from torchremat.tensors.sizes import format_bytes

# Bytes lost to fragmentation in a caching allocator, as a share of the bytes allocated at failure.
_PIECES_SHARE = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundStep:
    """A step with its batch, called with the model alone, like a step for `plan`.

    Attributes:
        step: The user's step.
        args: Of one call.
        kwargs: Of one call.
        held: The modules and tensors that the step itself holds; a search of the attributes finds them.
        prepare: Called before each run. The step runs several times, and may modify its batch.
    """

    step: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    held: tuple[nn.Module | Tensor, ...]
    prepare: Callable[[], None]

    def __call__(self, model: nn.Module) -> Any:
        """Run the step and return its result."""
        self.prepare()
        return self.step(model, *self.args, **self.kwargs)


class Applied:
    """The plan that is on the model, in place of any regions of the user."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._aside = ExitStack()
        self.plan: Plan | None = None

    def replace(self, plan: Plan) -> None:
        """Put another plan on the model."""
        self._take_off()
        if any(map(is_wrapped, self._model.modules())):
            self._aside.enter_context(bare(self._model))
        plan.apply(self._model)
        count_elsewhere(self._model)
        self.plan = plan

    def remove(self) -> None:
        """Restore the model as the user gave it."""
        self._take_off()
        self._aside.close()

    def _take_off(self) -> None:
        if self.plan is not None and self.plan.is_on(self._model):
            self.plan.remove(self._model)
        self.plan = None


class Tightening:
    """Plans for one step with its batch, each smaller than the last. Holds the batch, so it lives only for the step."""

    def __init__(self, model: nn.Module, bound: BoundStep, applied: Applied, options: PlanOptions) -> None:
        self._model = model
        self._bound = bound
        self._applied = applied
        self._options = replace(options, optimizer=None)  # the failed attempt has not stepped
        self._planner: Planner | None = None
        self._failed_bytes: int | None = None
        self._why_not = ""

    def tighten(self, *, attempts_left: int, room_bytes: int | None) -> str:
        """Put a smaller plan on the model, and return a description of it.

        Args:
            attempts_left: With 1, the smallest plan that exists.
            room_bytes: Bytes that torch had allocated for the failed attempt, beyond those from before it and gradients
                that the step had yet to make; None if unknown.
        """
        if self._why_not:
            return self._why_not
        try:
            return self._tightened(attempts_left, room_bytes)
        except Exception as error:  # noqa: BLE001  it runs the user's step; the next attempt may do without a plan
            let_go(error)
            if is_out_of_memory(error):
                return "the same again, since memory ran out in planning as well"
            self._why_not = f"the same again, since no plan can be made: {_first_line(error)}"
            return self._why_not

    def _tightened(self, attempts_left: int, room_bytes: int | None) -> str:
        if self._planner is None:
            with bare(self._model):
                self._planner = Planner(self._model, self._bound, **self._options.keywords)
        planner, floor = self._planner, self._planner.floor_bytes
        failed = self._failed_bytes or self._peak_of_failed(planner)
        known = None if room_bytes is None else planner.fixed_bytes + room_bytes
        if attempts_left == 1:
            target = floor
        elif known is not None and known < failed:
            # The bytes allocated at failure fit, except for the share lost to fragmentation.
            target = known - known // _PIECES_SHARE
        else:
            target = floor + (failed - floor) // 2
        plan = planner.plan(max(target, floor))
        self._failed_bytes = min(plan.peak_bytes, max(target, floor))
        self._applied.replace(plan)
        smallest = ", the smallest there is" if plan.budget_bytes <= floor else ""
        return f"planned for {format_bytes(plan.budget_bytes)}{smallest}"

    def _peak_of_failed(self, planner: Planner) -> int:
        """Return the peak of the failed attempt as the planner counts it: for this batch, without an optimizer."""
        plan, plain_bytes = self._applied.plan, planner.profiled.peak_of(planner.solver.plain)
        if plan is None:
            return plain_bytes
        return min(planner.fixed_bytes + plan.step_peak_bytes - sum(plan.before_bytes.values()), plain_bytes)


def _first_line(error: Exception) -> str:
    words = str(error) if isinstance(error, TorchrematError) else f"{type(error).__name__}: {error}"
    return words.splitlines()[0][:300]
