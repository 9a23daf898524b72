"""A step of which parts are made, and which the user's `step()` has not ended.

NOTE [ Between two parts of a step ]
In a plain loop, a whole step reads what code between `backward()` and `step()` has left: the learning rate of a
schedule, a gradient that was replaced or dropped, parameters and state that were written. A parameter that has stepped
in the backward has not read it. So a part notes what it has found and left, and if something else is there at `step()`,
that is an error. What no part has read may change: options of other groups, parameters that have not stepped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.measuring.optimizers import Optimizer
from torchremat.optimizing.entries import StoredEntry
from torchremat.optimizing.groups import GroupOptions, groups_by_parameter, move_versions, step_on, version_of

# Of each entry its key, the id of its value, and the value's version.
_State = tuple[tuple[object, int, int], ...]
_STORED = -1  # in place of the id


class _Stepped(NamedTuple):
    """A parameter that has stepped; and, once its gradient is released, what must be there at `step()`."""

    parameter: Tensor
    version: int
    state: _State = ()
    gradient: Tensor | None = None


class _GroupParts(NamedTuple):
    """A group of which parameters have stepped, with the options that the first one began with and left."""

    before: GroupOptions
    after: GroupOptions


class OpenStep:
    """The parts of one step of an optimizer that are made.

    Attributes:
        known: How many parameters had state when it was opened.
        backwards: The backwards that have made parts of it, and have not ended: they run, or have failed.
        is_over: Whether state was loaded since: the next backward begins another step, and this one cannot end.
        group_of: The group of each parameter, by the id of the parameter.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.known = len(optimizer.state)
        self.backwards: set[int] = set()
        self.is_over = False
        self.group_of = groups_by_parameter(optimizer)
        self._name = type(optimizer).__name__
        self._parts: dict[int, _Stepped] = {}
        self._groups: dict[int, _GroupParts] = {}

    def __contains__(self, parameter: Tensor) -> bool:
        """Return whether a parameter has stepped."""
        return id(parameter) in self._parts

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the parameters that have stepped."""
        return (one.parameter for one in self._parts.values())

    def __len__(self) -> int:
        return len(self._parts)

    def done(self, names: Mapping[int, str]) -> str:
        """Return how many parameters have stepped, and which, in words."""
        found = [names.get(id(one)) for one in self]
        which = f" ({', '.join(name for name in found if name)})" if any(found) else ""
        return f"{len(self)} of {len(self.group_of)} parameters had made this step{which}"

    def failed(self, running: int, names: Mapping[int, str]) -> str:
        """Return where the step stands, if a backward other than the running one has not ended; else ""."""
        if not self.backwards.difference((running,)):
            return ""
        return (
            f"a backward has failed when {self.done(names)}. The others have not: load a checkpoint of the model and "
            "of the optimizer before you go on, whose `load_state_dict()` begins afresh."
        )

    def put_state_in_order(self, optimizer: Optimizer) -> None:
        """Let state that the step has made lie in the order in which a whole step would have made it."""
        state = optimizer.state
        made = list(dict.items(state))[self.known :]
        if len(made) > 1:
            place = {one: number for number, one in enumerate(self.group_of)}
            for key, _ in made:
                del state[key]
            state.update(sorted(made, key=lambda item: place.get(id(item[0]), 0)))

    def make(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        """Make the part for some parameters. See NOTE [ A part of a step ].

        Raises:
            UnsupportedError: An option of their group is not what an earlier part has left; or this part leaves others.
        """
        groups = {id(group): group for group in (self.group_of[id(parameter)] for parameter in parameters)}
        for number in groups:
            if number in self._groups and (found := self._groups[number].after.differing()):
                self._raise(_of_options(found[0]))
        for number in groups.keys() & self._groups.keys():
            self._groups[number].before.put_back()
        began = {number: GroupOptions([group]) for number, group in groups.items() if number not in self._groups}
        versions = [parameter._version for parameter in parameters]
        try:
            step_on(optimizer, parameters, self.group_of)
        except BaseException:
            for number in groups:
                (began.get(number) or self._groups[number].after).put_back()
            raise
        move_versions(parameters, versions)
        for number, group in groups.items():
            if number in began:
                self._groups[number] = _GroupParts(began[number], GroupOptions([group]))
            elif found := self._groups[number].after.differing():
                raise UnsupportedError(
                    f"{self._name}: the option {found[0]!r} of a group depends on which parameters step together, so "
                    "its step cannot be made in parts. Remove what releases its gradients or moves its state."
                )
        self._parts |= {id(parameter): _Stepped(parameter, parameter._version) for parameter in parameters}

    def release(self, optimizer: Optimizer, parameter: Tensor, gradient: Tensor) -> None:
        """Put another tensor in place of the gradient of a parameter that has stepped; from now on both must stay."""
        parameter.grad = gradient
        state = _state_of(optimizer, parameter)
        self._parts[id(parameter)] = self._parts[id(parameter)]._replace(state=state, gradient=gradient)

    def check_unchanged(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Raise if what parts have read or left is not there. See NOTE [ Between two parts of a step ].

        Args:
            optimizer: The optimizer.
            names: The names of parameters, by id, for the message.

        Raises:
            UnsupportedError: It is not.
        """
        found = next(self._find_changes(optimizer, names), None)
        if found is not None:
            self._raise(found)

    def _raise(self, changed: str) -> None:
        raise UnsupportedError(
            f"{changed} between a backward that has released gradients and {self._name}.step(), and a plain step would "
            "read that. Parameters have stepped in the backward already, without it. Do it before the backward or "
            "after step(); or leave the gradients (`release_gradients`). Load a checkpoint before you go on."
        )

    def _find_changes(self, optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[str]:
        here = {id(group) for group in optimizer.param_groups}
        if not here.issuperset(self._groups):
            yield "the groups of parameters were replaced"
        for one in self._groups.values():
            yield from map(_of_options, one.after.differing())
        for one in self._parts.values():
            if one.gradient is None:
                continue
            parameter = one.parameter
            name = names.get(id(parameter)) or f"a parameter of shape {tuple(parameter.shape)}"
            if parameter.grad is not one.gradient:
                yield f"the gradient of {name} was dropped or replaced"
            if parameter._version != one.version:
                yield f"{name} was written"
            if not _is_state(one.state, _state_of(optimizer, parameter)):
                yield f"the state of {name} was changed"

    def put_options_back(self) -> None:
        """Give groups the options that their first part began with, for the optimizer's own code."""
        for one in self._groups.values():
            one.before.put_back()


def _of_options(name: str) -> str:
    return f"the option {name!r} of a group was changed"


def _state_of(optimizer: Optimizer, parameter: Tensor) -> _State:
    """Return what can be told of a parameter's state without bringing any of it back."""
    entries = cast("dict[object, object]", dict.get(optimizer.state, parameter, {}))
    return tuple(
        (key, _STORED if isinstance(value, StoredEntry) else id(value), version_of(value))
        for key, value in dict.items(entries)
    )


def _is_state(before: _State, now: _State) -> bool:
    """Return whether state is as it was; what a store had may have been read meanwhile."""
    return len(before) == len(now) and all(
        then[0] == one[0] and (_STORED in (then[1], one[1]) or then == one)
        for then, one in zip(before, now, strict=True)
    )


class RunClosure:
    """Stands for a closure that has run, and returns what it has returned. To run it again would train again."""

    def __init__(self, loss: object, optimizer: str) -> None:
        self._losses = [loss]
        self._optimizer = optimizer

    def __call__(self) -> object:
        """Return what the closure has returned, once."""
        if not self._losses:
            raise UnsupportedError(
                f"{self._optimizer}.step(closure) calls the closure several times, so its step cannot be made in "
                "parts. Keep its gradients and its state as they are."
            )
        return self._losses.pop()
