"""The options of an optimizer's groups, and its step on some of its parameters.

NOTE [ A part of a step ]
`step()` of an optimizer loops over `param_groups`, and over the parameters of each. A part of it is the same method,
called while `param_groups` has only some of the parameters. So optimizer, options and state stay the user's own, and
the arithmetic is that of the optimizer's class, of torch or not.

Some classes count their steps in the options of a group (`group["k"] += 1`). So each part begins with the options that
the whole step began with, and each part of a group has to leave the same options behind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchremat.measuring.optimizers import Optimizer, bare_step
from torchremat.state.containers import make

Group = dict[str, Any]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class GroupOptions:
    """The options of groups at one time, all but their parameters."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self._kept = [_KeptOptions(group, dict(group), list(map(version_of, group.values()))) for group in groups]

    def put_back(self) -> None:
        """Give the groups these options again."""
        for kept in self._kept:
            make(kept.group, {**kept.options, "params": kept.group["params"]})

    def differing(self) -> list[str]:
        """Return the names of the options that groups have otherwise by now."""
        return list(dict.fromkeys(name for one in self._kept for name in one.differing()))


class _KeptOptions(NamedTuple):
    group: Group
    options: Group
    versions: list[int]

    def differing(self) -> list[str]:
        now, before = self.group, self.options
        versions = zip(before, self.versions, strict=True)
        written = [
            name for name, version in versions if version >= 0 and name in now and version_of(now[name]) != version
        ]
        if now.keys() == before.keys() and all(map(is_, now.values(), before.values())):
            return written
        names = (name for name in {**before, **now} if name != "params" and name not in written)
        return written + [name for name in names if not _is_same(now.get(name, _MISSING), before.get(name, _MISSING))]


_MISSING = object()


def version_of(option: object) -> int:
    """Return the version of a tensor, -1 for anything else."""
    return option._version if isinstance(option, Tensor) else -1


def _is_same(one: object, other: object) -> bool:
    """Return whether no step can tell two options apart."""
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))


def groups_by_parameter(optimizer: Optimizer) -> dict[int, Group]:
    """Return the group of each parameter, by the id of the parameter."""
    return {id(one): group for group in optimizer.param_groups for one in group["params"]}


def step_on(optimizer: Optimizer, parameters: Sequence[Tensor], group_of: Mapping[int, Group]) -> list[Group]:
    """Run the optimizer's step on some of its parameters, without its hooks, and return the groups of these.

    See NOTE [ A part of a step ].

    A step may call that of its base class, which runs hooks if the base class has instances of its own; not these.
    """
    chosen: dict[int, tuple[Group, list[Tensor]]] = {}
    for parameter in parameters:
        group = group_of[id(parameter)]
        chosen.setdefault(id(group), (group, []))[1].append(parameter)
    attributes, all_groups = vars(optimizer), optimizer.param_groups
    groups = [group for group, _ in chosen.values()]
    all_parameters = [group["params"] for group in groups]
    hooks = {name: attributes[name] for name in _HOOKS if name in attributes}
    try:
        for group, some in chosen.values():
            group["params"] = some
        optimizer.param_groups = groups
        attributes.update({name: {} for name in hooks})
        bare_step(optimizer)()
    finally:
        attributes.update(hooks)
        for group, of_group in zip(groups, all_parameters, strict=True):
            group["params"] = of_group
        optimizer.param_groups = all_groups
    return groups


def slices(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters in parts, none larger than the largest parameter."""
    parameters = list(parameters)
    most_bytes = max((parameter.nbytes for parameter in parameters), default=0)
    part: list[Tensor] = []
    for parameter in parameters:
        if part and sum(other.nbytes for other in part) + parameter.nbytes > most_bytes:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def move_versions(parameters: Sequence[Tensor], before: Sequence[int]) -> None:
    """Move the version of each parameter that a step has written without moving it.

    What reads a parameter after its part of the step is then an error, for autograd and for regions, however the
    optimizer writes: by fused kernels, or through `.data`. See NOTE [ When a parameter may be written ].
    """
    silent = [one for one, version in zip(parameters, before, strict=True) if one._version == version]
    if silent:
        torch.autograd.graph.increment_version(silent)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a block without autocast on a device: a backward may run under it, and a step does not."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
