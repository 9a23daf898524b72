"""The options of an optimizer's groups, and its step on some of its parameters.

NOTE [ A part of a step ]
`step()` of an optimizer loops over `param_groups`, and over the parameters of each. A part of it is the same method,
called while `param_groups` has only some of the parameters. So optimizer, options and state stay the user's own, and
the arithmetic is that of the class, whoever wrote it.

Some classes count their steps in the options of a group (`group["k"] += 1`). So each part begins with the options that
the whole step began with, and each part of a group has to leave the same options behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchremat.measuring.optimizers import Optimizer, bare_step

Group = dict[str, Any]


class GroupOptions:
    """The options of groups at one time, all but their parameters.

    Args:
        groups: The groups of an optimizer.
    """

    def __init__(self, groups: Iterable[Group]) -> None:
        self._kept = [(group, _options_of(group)) for group in groups]

    def put_back(self) -> None:
        """Give the groups these options again."""
        for group, before in self._kept:
            if _options_of(group) != before:
                for name in group.keys() - before.keys() - {"params"}:
                    del group[name]
                group.update({name: one.value for name, one in before.items()})

    def differing(self) -> list[str]:
        """Return the names of the options that groups have otherwise by now."""
        found: dict[str, None] = {}
        for group, before in self._kept:
            now = _options_of(group)
            found |= dict.fromkeys(name for name in {**before, **now} if before.get(name) != now.get(name))
        return list(found)


class _Option:
    """An option, which equals another if no step can tell the two apart."""

    __slots__ = ("value", "version")

    def __init__(self, value: object) -> None:
        self.value = value
        self.version = value._version if isinstance(value, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Option):
            return False
        if isinstance(self.value, Tensor) or isinstance(other.value, Tensor):
            return self.value is other.value and self.version == other.version
        return type(self.value) is type(other.value) and (self.value is other.value or self.value == other.value)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  it is compared, and never looked up


def _options_of(group: Group) -> dict[str, _Option]:
    return {name: _Option(value) for name, value in group.items() if name != "params"}


def groups_by_parameter(optimizer: Optimizer) -> dict[int, Group]:
    """Return the group of each parameter, by the id of the parameter."""
    return {id(one): group for group in optimizer.param_groups for one in group["params"]}


def step_on(optimizer: Optimizer, parameters: Sequence[Tensor], group_of: Mapping[int, Group]) -> None:
    """Run the optimizer's step on some of its parameters, without its hooks. See NOTE [ A part of a step ].

    Args:
        optimizer: The optimizer.
        parameters: Some of its parameters.
        group_of: The result of `groups_by_parameter`.
    """
    chosen: dict[int, tuple[Group, list[Tensor]]] = {}
    for one in parameters:
        group = group_of[id(one)]
        chosen.setdefault(id(group), (group, []))[1].append(one)
    groups = optimizer.param_groups
    had = [(group, group["params"]) for group, _ in chosen.values()]
    try:
        for group, some in chosen.values():
            group["params"] = some
        optimizer.param_groups = [group for group, _ in chosen.values()]
        bare_step(optimizer)()
    finally:
        for group, every in had:
            group["params"] = every
        optimizer.param_groups = groups


def move_versions(parameters: Sequence[Tensor], before: Sequence[int]) -> None:
    """Move the version of each parameter that a step has written without moving it.

    What reads a parameter after its part of the step is then an error, for autograd and for regions, however the
    optimizer writes: by fused kernels, or through `.data`. See NOTE [ When a parameter may be written ].
    """
    silent = [one for one, version in zip(parameters, before, strict=True) if one._version == version]
    if silent:
        torch.autograd.graph.increment_version(silent)
