"""How the optimizer steps under a plan: where it makes its step, and where its state and the parameters wait.

                           gradients in memory    state in memory
    plain                  all                    all
    released               one at a time          all
    stored                 all                    that of the largest parameter, twice
    released and stored    one at a time          that of two parameters

These are ways of stepping, in the order of the seconds that they add. Each changes all bytes of a step, so each has a
profile of its own; the trees of regions are searched for in each. The last way has parameters in a store as well, while
their modules do not run; see `parameter_bytes`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from weakref import ref

from torch import nn

from torchremat._compat.modules import WeakIdentityDict
from torchremat.errors import PlanError, UnsupportedError
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.optimizers import Optimizer
from torchremat.measuring.step import check_steps_on
from torchremat.optimizing.module_runs import check_model
from torchremat.optimizing.parameter_offload import ParameterOffload, offload_parameters
from torchremat.optimizing.partial_steps import partial_steps
from torchremat.optimizing.release import GradientRelease, release_gradients
from torchremat.optimizing.stored_state import OptimizerOffload, offload_optimizer
from torchremat.tensors.handles import Store


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """A way of stepping.

    Attributes:
        releases: Whether each parameter steps when its gradient is complete, and the gradient is freed.
        stores: Whether the optimizer's state waits in a store.
        accumulates: See `release_gradients`.
        clip_value: See `release_gradients`.
        stores_parameters: Whether parameters wait in a store.
    """

    releases: bool = False
    stores: bool = False
    accumulates: bool = False
    clip_value: float | None = None
    stores_parameters: bool = False

    def __str__(self) -> str:
        words = ["gradients released"] * self.releases + ["state stored"] * self.stores
        words += ["parameters stored"] * self.stores_parameters
        return ", ".join(words) or "plain"


PLAIN_STEPPING = Stepping()

# Of a tensor of the state that goes to the store: a budget that asks for it counts small ones too.
LEAST_STORED_BYTES = 2**10


def ways_of_stepping(
    *,
    releases: object,
    stores: bool,
    accumulates: bool = False,
    clip_value: float | None = None,
    stores_parameters: bool = False,
) -> tuple[Stepping, ...]:
    """Return the ways of stepping that the options of a plan allow, in the order of the seconds that they add.

    Args:
        releases: The option: True, False or `"auto"`.
        stores: Whether there is a store for the state.
        accumulates: See `release_gradients`.
        clip_value: See `release_gradients`.
        stores_parameters: Whether there is a store for the parameters.
    """
    released = Stepping(releases=True, accumulates=accumulates, clip_value=clip_value)
    found = [] if releases is True else [PLAIN_STEPPING]
    if releases:
        found.append(released)
    # While gradients may be released, that comes first: it adds less than moving state does.
    if stores:
        found.append(replace(found[-1], stores=True))
    if stores_parameters:
        found.append(replace(found[-1], stores_parameters=True))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class StepStores:
    """The stores of a way of stepping; one that the way does not use may be missing.

    Attributes:
        state: The store of the optimizer's state.
        parameters: The store of the parameters.
    """

    state: Store | None = None
    parameters: Store | None = None


NO_STORES = StepStores()


class SteppingHandles:
    """What a way of stepping has put on an optimizer. `remove` takes it off, and may be called twice.

    Args:
        model: The model.
        optimizer: The optimizer that trains it.
        stepping: The way.
        stores: The stores; not used unless the way does.

    Raises:
        UnsupportedError: See `release_gradients`, `offload_optimizer` and `offload_parameters`.
        StoreError: See `offload_optimizer`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, stepping: Stepping, stores: StepStores = NO_STORES
    ) -> None:
        self._stepping = stepping
        self._model, self._optimizer, self._stores = ref(model), ref(optimizer), stores
        self._handles: list[GradientRelease | OptimizerOffload | ParameterOffload] = []
        self.put()

    def optimizer(self) -> Optimizer | None:
        """Return the optimizer; None if it is gone."""
        return self._optimizer()

    def put(self) -> None:
        """Put it on, if it is not."""
        model, optimizer = self._model(), self._optimizer()
        if self._handles or model is None or optimizer is None:
            return
        with ExitStack() as undo:
            if self._stepping.releases:
                way = self._stepping
                accumulates, clip_value = way.accumulates, way.clip_value
                released = release_gradients(
                    model,
                    optimizer,
                    accumulates=accumulates,
                    clip_value=clip_value,
                    batch_bytes=0,  # exact bytes
                )
                self._handles.append(released)
            undo.callback(self.remove)
            stores = self._stores
            if self._stepping.stores and stores.state is not None:
                self._handles.append(offload_optimizer(optimizer, stores.state, min_bytes=LEAST_STORED_BYTES))
            if self._stepping.stores_parameters and stores.parameters is not None:
                self._handles.append(offload_parameters(model, optimizer, stores.parameters))
            undo.pop_all()

    def remove(self) -> None:
        """Take it off.

        Raises:
            UnsupportedError: A step is open: a backward has released gradients, and `optimizer.step()` did not follow.
            StoreError: The state, or a parameter, cannot be brought back.
        """
        while self._handles:
            self._handles[0].remove()
            del self._handles[0]


@contextmanager
def stepping_as(
    model: nn.Module, optimizer: Optimizer | None, stepping: Stepping, stores: StepStores
) -> Generator[None]:
    """Let an optimizer step in a way for a block."""
    if optimizer is None or stepping == PLAIN_STEPPING:
        yield
        return
    handles = SteppingHandles(model, optimizer, stepping, stores)
    try:
        yield
    finally:
        with uninterrupted():
            handles.remove()


# By the module of a model that has the plan on it: copies of the model, which have it too, train with an optimizer of
# their own.
_on: WeakIdentityDict[nn.Module, SteppingHandles] = WeakIdentityDict()


def belongs_to(module: nn.Module, handles: SteppingHandles) -> None:
    """Let handles be removed with the plan on a module."""
    _on[module] = handles


def removed_with(module: nn.Module) -> None:
    """Remove what belongs to a module, if anything does.

    Raises:
        UnsupportedError: See `SteppingHandles`.
        StoreError: See `SteppingHandles`.
    """
    handles = _on.get(module)
    if handles is not None:
        handles.remove()
        del _on[module]


def handles_on(modules: Iterable[nn.Module]) -> Iterator[SteppingHandles]:
    """Yield what belongs to some modules."""
    for module in modules:
        if module in _on:
            yield _on[module]


@contextmanager
def stepping_plainly(modules: Iterable[nn.Module]) -> Generator[None]:
    """Take off what belongs to some modules for a block."""
    aside = list(handles_on(modules))
    for handles in aside:
        handles.remove()
    try:
        yield
    finally:
        for handles in aside:
            handles.put()


class GivenOptimizer:
    """The optimizer that a plan was made with, while it lives. Copies and files of the plan have none."""

    __slots__ = ("_optimizer",)

    def __init__(self, optimizer: Optimizer | None = None) -> None:
        self._optimizer = None if optimizer is None else ref(optimizer)

    def get(self) -> Optimizer | None:
        """Return the optimizer, or None."""
        return None if self._optimizer is None else self._optimizer()

    def __reduce__(self) -> tuple[type[GivenOptimizer], tuple[()]]:
        return GivenOptimizer, ()


def optimizer_for(model: nn.Module, stepping: Stepping, optimizer: Optimizer | None) -> Optimizer:
    """Return the optimizer to let step in a way.

    Raises:
        PlanError: There is none.
        StepError: It has none of the model's parameters.
    """
    if optimizer is None:
        raise PlanError(
            f"the plan counts on an optimizer that steps in its way ({stepping}), and it has none: it was loaded, "
            "copied or made in another process, or the optimizer is gone. Call `apply(model, optimizer=...)` with the "
            "optimizer that trains the model."
        )
    check_steps_on(optimizer, model.parameters())
    return optimizer


def check_ways(ways: Iterable[Stepping], model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise if a plan cannot choose among ways of stepping, whatever the budget.

    Raises:
        UnsupportedError: There is no optimizer, or it cannot step in one of the ways.
    """
    others = [one for one in ways if one != PLAIN_STEPPING]
    if not others:
        return
    if optimizer is None:
        raise UnsupportedError(
            "release_gradients=, optimizer_store= and parameter_store= are about the step of an optimizer, and none is "
            "given: pass the one that trains the model, `optimizer=`."
        )
    if any(one.stores_parameters for one in others):
        check_model(model, None)
    released = next((one for one in others if one.releases), None)
    if released is not None:
        SteppingHandles(model, optimizer, replace(released, stores=False, stores_parameters=False)).remove()
    else:
        partial_steps(optimizer).end()
