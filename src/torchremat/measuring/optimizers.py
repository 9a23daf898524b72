"""The optimizer of a step: the optimizers that it wraps, its step run alone, and no steps while we run the user's step.

An optimizer may wrap another (accelerate's, Lightning's, Lookahead) and have no own state. Wrapping does not depend on
attribute names: an optimizer wraps each optimizer that is reachable from it, by the traversal of `state.world`, and
that steps on some of the same parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor

from torchremat._compat.autograd import current_graph_task
from torchremat.errors import UnsupportedError
from torchremat.state.optimizer_steps import before_each_step
from torchremat.state.reach import reach
from torchremat.state.world import Reaching
from torchremat.tensors.metadata import version_of

Optimizer = torch.optim.Optimizer


def with_wrapped(optimizer: Optimizer | None) -> tuple[Optimizer, ...]:
    """Return an optimizer and the optimizers that it wraps; none if it is None."""
    if optimizer is None:
        return ()
    own = {id(one) for one in parameters_of([optimizer])}
    return (
        optimizer,
        *(one for one in optimizers_in(optimizer) if not own or not own.isdisjoint(map(id, parameters_of([one])))),
    )


def optimizers_in(item: object) -> list[Optimizer]:
    """Return the optimizers reachable from an object, without itself."""
    world = Reaching()
    reach(world, [item], are_whole=True)
    return [one for one in world.optimizers if one is not item]


def parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the parameters that optimizers step on, each once."""
    groups = (cast("list[dict[str, list[Tensor]]]", getattr(one, "param_groups", ())) for one in optimizers)
    found = [parameter for own in groups for group in own for parameter in group["params"]]
    return list({id(one): one for one in found}.values())


def words_for_wrapped(optimizers: Sequence[Optimizer]) -> str:
    """Return the words for the innermost optimizer that an optimizer wraps; "" if it wraps none."""
    if len(optimizers) < 2:
        return ""
    outer, inner = optimizers[0], optimizers[-1]
    names = [name for name, one in vars(outer).items() if one is inner]
    return f"the {type(inner).__name__} that it wraps{f' (its `{names[0]}`)' if names else ''}"


def not_an_optimizer(item: object) -> str:
    """Return the message for what was given as an optimizer, and is none: what it is, and the optimizer it holds."""
    kind, inner = type(item), optimizers_in(item)
    # The optimizers of some packages are of classes of the same name.
    name = f"{kind.__module__}.{kind.__name__}" if kind.__name__ == Optimizer.__name__ else kind.__name__
    advice = ""
    if inner:
        advice = (
            f", which holds an optimizer: hand over that, the {type(inner[0]).__name__}. If the {name} adds state to "
            "it, do so after a training step, when the state is there and counts"
        )
    return f"optimizer: expected a torch.optim.Optimizer, got {name}{advice}."


def steps_alone(optimizer: Optimizer) -> bool:
    """Return whether a step needs no closure, as that of LBFGS does."""
    try:
        # A scheduler puts a function in place of the method, whose signature has `self`.
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return False
    return True


def bare_step(optimizer: Optimizer) -> Callable[..., object]:
    """Return the step of an optimizer's class, without the wrapper that runs hooks and counts.

    This also leaves out replacements on the instance, as by schedulers.
    """
    step = type(optimizer).step
    # `Optimizer` wraps the step of each subclass whose `__init__` calls its own, and marks it. Other wrappers of a
    # step, like `no_grad`, belong to it.
    is_hooked = getattr(step, "hooked", False) and hasattr(step, "__wrapped__")
    return MethodType(cast("Any", step).__wrapped__ if is_hooked else step, optimizer)


@contextmanager
def without_hooks(optimizers: Sequence[Optimizer]) -> Generator[Callable[[], None]]:
    """Yield the step of the first optimizer; inside the block the others have a step that runs no hooks.

    The step raises a RuntimeError if none of the others steps in it, as while gradients still accumulate.
    """
    had = [(one, vars(one).get("step")) for one in optimizers[1:]]
    outer, ran = bare_step(optimizers[0]), list[Optimizer]()

    def step() -> None:
        parameters = parameters_of(optimizers)
        before = list(map(version_of, parameters))
        outer()
        # Code that kept a reference to the old step calls it past the attribute.
        if had and not ran and list(map(version_of, parameters)) == before:
            raise RuntimeError("now it steps nothing, as where gradients are accumulated over several steps")

    try:
        for one, _ in had:
            vars(one)["step"] = partial(_noted, ran, one, bare_step(one))
        yield step
    finally:
        for one, own in had:
            vars(one).pop("step", None)
            if own is not None:
                vars(one)["step"] = own


def _noted(
    ran: list[Optimizer], one: Optimizer, step: Callable[..., object], *args: object, **kwargs: object
) -> object:
    ran.append(one)
    return step(*args, **kwargs)


# NOTE [ Nobody steps while we run the step ]
#
# To plan and to measure, a step is run several times. An optimizer that steps in it, in the forward or by a hook in the
# backward, would train each time. torch runs hooks before any optimizer steps, and before anything is written, so a
# hook of ours refuses there. It need not know the caller: a hook after a gradient, a hook of a node, the step itself.


@contextmanager
def refusing_steps(tensors: Iterable[Tensor], but: Sequence[Optimizer] = ()) -> Generator[None]:
    """Refuse, for the block, all optimizer steps in this thread, and in other threads steps on the given tensors.

    Args:
        tensors: Tensors that no other optimizer may step on.
        but: The optimizers that may step.

    Raises:
        UnsupportedError: Raised in the optimizer's step. See NOTE [ Nobody steps while we run the step ]
    """
    own, thread = {id(one) for one in tensors}, get_ident()

    def refuse(optimizer: Optimizer, *_: object) -> None:
        if any(optimizer is one for one in but):
            return
        steps_on = parameters_of([optimizer])
        # On CUDA, backward runs in threads of autograd. Other threads may train other models meanwhile.
        if get_ident() != thread and own.isdisjoint(map(id, steps_on)):
            return
        phase = "backward" if current_graph_task() != -1 else "forward"
        raise UnsupportedError(
            f"the step trains: {type(optimizer).__name__}.step() runs within its {phase}, on {len(steps_on)} "
            "parameters. To plan or to measure it, a step is run several times, and each would train; so this one was "
            "ended before anything was written. "
            + (
                "Remove the hook that steps (such as one of `register_post_accumulate_grad_hook`) meanwhile, and "
                "register it afterwards."
                if phase == "backward"
                else "Let the step return the loss, and call `optimizer.step()` outside of it."
            )
        )

    end = before_each_step(refuse)
    _refusals.append(refuse)
    try:
        yield
    finally:
        _refusals.remove(refuse)
        end()


# For parts of a step, which run no hooks.
_refusals: list[Callable[[Optimizer], None]] = []


def check_may_step(optimizer: Optimizer) -> None:
    """Raise if an optimizer may not step now.

    Raises:
        UnsupportedError: See NOTE [ Nobody steps while we run the step ]
    """
    for refuse in _refusals:
        refuse(optimizer)
