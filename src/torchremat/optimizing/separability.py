"""Whether an optimizer's step is the same on all parameters at once and on one after the other.

It is for every optimizer of torch but LBFGS, and for most others. It is not if parameters share a number: a norm over
all of them, a common scale, the draws of one generator. A list of classes would say nothing about the next one, so it
is tried: two twins of the optimizer, with parameters of a few elements, step side by side, and must agree in every bit
of parameters, state, options and attributes.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchremat.errors import UnsupportedError
from torchremat.measuring.optimizers import Optimizer, bare_step, parameters_of, with_wrapped, words_for_wrapped
from torchremat.measuring.untouched import RandomNumbers
from torchremat.optimizing.groups import GroupOptions, groups_by_parameter, step_on
from torchremat.tensors.copies import same_bits
from torchremat.tensors.parts import is_wrapper

# torch's RAdam changes its formula at the sixth step.
_STEPS = 7
# Of each group, and the most of the elements of each dimension.
_PARAMETERS, _ELEMENTS = 3, 4
_OURS = ("state", "param_groups", "step")


def check_separable(optimizer: Optimizer) -> None:
    """Raise if parts of an optimizer's step are not known to be the step, bit for bit.

    Raises:
        UnsupportedError: They differ; or it cannot be tried, as the optimizer needs a closure or cannot be copied.
    """
    name = type(optimizer).__name__
    wrapped = with_wrapped(optimizer)
    if len(wrapped) > 1:
        raise UnsupportedError(f"{name} does not step by itself. Hand over {words_for_wrapped(wrapped)}.")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedError(f"{name}(differentiable=True): its step is part of a graph, which parts of it are not.")
    numbers, raised = RandomNumbers(), None
    try:
        with torch.enable_grad():
            whole, parts = _twin(optimizer), _twin(optimizer)
            for step in range(_STEPS):
                _give_gradients(whole, step)
                bare_step(whole)()
                numbers.put_back()  # both draw the same
                _give_gradients(parts, step)
                raised = _step_in_parts(parts) or raised
            numbers.put_back()
            drawing = _classes_that_draw(optimizer, numbers)
        found = _differences(whole, parts)
        if raised is not None and not found:
            raise raised
    except Exception as error:
        closure = " It steps with a closure." if "closure" in str(error) else ""
        raise UnsupportedError(
            f"{name}: whether parts of its step are the step must be tried on small parameters, which fails:{closure} "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Keep its gradients and its state as they are."
        ) from error
    finally:
        numbers.put_back()
    if drawing:
        raise UnsupportedError(
            f"{name}: a step on a {' or a '.join(drawing)} draws random numbers, as one that rounds at random does, "
            "and in parts each parameter would draw others. Keep its gradients and its state as they are."
        )
    if found:
        raise UnsupportedError(
            f"{name}: its step on all parameters at once is not its step on one after the other: {'; '.join(found)}. "
            "Its parameters depend on each other within a step. Keep its gradients and its state as they are."
        )


def _classes_that_draw(optimizer: Optimizer, numbers: RandomNumbers) -> list[str]:
    """Return the names of the classes of wrappers among the parameters on which a step draws random numbers."""
    wrappers = [one for one in parameters_of([optimizer]) if one.requires_grad and is_wrapper(one)]
    wrappers.sort(key=Tensor.numel, reverse=True)
    found: list[str] = []
    for kind, smallest in {type(one): one for one in wrappers}.items():
        copied = nn.Parameter(smallest.detach().clone())
        twin = _twin(optimizer, {id(smallest): copied})
        copied.grad = torch.zeros_like(copied, requires_grad=False)
        bare_step(twin)()
        if numbers.have_moved():
            found.append(kind.__name__)
            numbers.put_back()
    return found


def _twin(optimizer: Optimizer, instead: dict[int, nn.Parameter] | None = None) -> Optimizer:
    """Return an optimizer of the same class and options, without state, on small parameters.

    Args:
        optimizer: The optimizer.
        instead: By the ids of its parameters, the only ones to step on.
    """
    draws = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(one): _small(one, draws) for one in parameters_of([optimizer])} | (instead or {})
    twin = object.__new__(type(optimizer))
    attributes = {name: one for name, one in vars(optimizer).items() if name not in _OURS and "_hooks" not in name}
    vars(twin).update(copy.deepcopy(attributes, memo), **{name: {} for name in vars(optimizer) if "_hooks" in name})
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        chosen = {(one.shape, one.dtype, one.device): one for one in reversed(group["params"])}
        some = [memo[id(one)] for one in chosen.values()][-_PARAMETERS:]
        if instead is not None:
            some = [instead[id(one)] for one in group["params"] if id(one) in instead]
        options = {key: value for key, value in group.items() if key != "params"}
        twin.param_groups.append({"params": some, **copy.deepcopy(options, memo)})
    return twin


def _small(parameter: Tensor, draws: torch.Generator) -> nn.Parameter:
    shape = torch.Size(min(size, _ELEMENTS) for size in parameter.shape)
    return nn.Parameter(_draw(shape, parameter, draws), requires_grad=parameter.requires_grad)


def _draw(shape: torch.Size, like: Tensor, draws: torch.Generator) -> Tensor:
    # The global generators are the user's. To seed them takes a millisecond as well, for those of absent devices.
    return torch.randn(shape, generator=draws).to(device=like.device, dtype=like.dtype)


def _give_gradients(optimizer: Optimizer, step: int) -> None:
    draws = torch.Generator().manual_seed(step)
    for one in parameters_of([optimizer]):
        one.grad = _draw(one.shape, one, draws) if one.requires_grad else None


def _step_in_parts(optimizer: Optimizer) -> Exception | None:
    """Step on one parameter after the other, the last first, and then on all, none of which has a gradient any more.

    Return what the last of these steps raises. One that divides by the number of its parameters may raise there. That
    alone would tell a user little: the reason is that it counts them, and the steps before are not its step.
    """
    before, group_of = GroupOptions(optimizer.param_groups), groups_by_parameter(optimizer)
    for one in reversed(parameters_of([optimizer])):
        if one.grad is not None:
            before.put_back()
            step_on(optimizer, [one], group_of)
            one.grad = None
    after = GroupOptions(optimizer.param_groups)
    before.put_back()
    try:
        bare_step(optimizer)()
    except Exception as error:  # noqa: BLE001  of the optimizer's own code
        after.put_back()
        return error
    return None


def _differences(whole: Optimizer, parts: Optimizer) -> list[str]:
    theirs = _contents(parts)
    return [found for name, one in _contents(whole).items() for found in _unlike(one, theirs[name], name)][:3]


def _contents(optimizer: Optimizer) -> dict[str, object]:
    parameters = parameters_of([optimizer])
    names = {"state", "param_groups", "defaults"}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "parameters": [one.detach() for one in parameters],
        "state": [dict(optimizer.state.get(one, {})) for one in parameters],
        "options": options,
        "attributes": {
            name: one
            for name, one in vars(optimizer).items()
            if name not in names and isinstance(one, Tensor | int | float | str | list | tuple | dict)
        },
    }


def _unlike(one: object, other: object, where: str) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        mine, theirs = cast("dict[object, object]", one), cast("dict[object, object]", other)
        if list(mine) == list(theirs):
            return [found for key in mine for found in _unlike(mine[key], theirs[key], f"{where}[{key!r}]")]
        return [f"the keys of {where}"]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = [*zip(cast("Sequence[object]", one), cast("Sequence[object]", other), strict=False)]
        inside = [found for place, pair in enumerate(pairs) for found in _unlike(*pair, f"{where}[{place}]")]
        return inside if len(one) == len(other) else [f"the length of {where}"]
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if same_bits(one, other):
            return []
        return [f"{where}, by up to {float((one.double() - other.double()).abs().max()):.1e}"]
    if isinstance(one, int | float | str) and one != other:
        return [f"{where}, {one} and {other}"]
    return []
