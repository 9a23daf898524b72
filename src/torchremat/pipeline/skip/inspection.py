"""Checks of the skips in a model before it runs: whether they match, and their routes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from torchremat.errors import SkippableError
from torchremat.pipeline.skip.layouts import Key, SkipLayout, words_of
from torchremat.pipeline.skip.skippables import Skippable


@dataclass(frozen=True, slots=True)
class FoundSkippable:
    """A skippable module and its path in the model."""

    path: str
    module: Skippable

    def __str__(self) -> str:
        return repr(self.path or type(self.module).__name__)


# Skippables that run in an unknown order. Groups are in the order in which they run.
Group = list[FoundSkippable]


def groups_of(module: nn.Module, path: str = "") -> list[Group]:
    """Return the skippable modules in a module, itself included, in groups.

    The children of a sequence run one after the other. The forward of any other module decides the order of its
    children, so all skippables in such a module are one group.
    """
    if isinstance(module, nn.Sequential):
        names = {id(child): name for name, child in module.named_children()}
        return [group for child in module for group in groups_of(child, _joined(path, names[id(child)]))]
    found = [
        FoundSkippable(name, one)
        for name, one in module.named_modules(prefix=path, remove_duplicate=False)
        if isinstance(one, Skippable)
    ]
    return [found] if found else []


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def verify_skippables(module: nn.Module) -> None:
    """Check that each skip in a model is stashed once and then popped once.

    Raises:
        SkippableError: One or more skips are not; the message lists all of them.
    """
    check(groups_of(module))


def inspect_skip_layout(partitions: Iterable[nn.Module]) -> SkipLayout:
    """Return the routes of the skips in a model; each module is a stage.

    Raises:
        SkippableError: Stashes and pops do not match.
    """
    stages = list(partitions)
    groups = [groups_of(module, str(stage)) for stage, module in enumerate(stages)]
    check([group for stage in groups for group in stage])
    places: tuple[dict[Key, int], dict[Key, int]] = {}, {}
    for stage, found in enumerate(groups):
        for one in (one for group in found for one in group):
            places[0].update(dict.fromkeys(one.module.stashable(), stage))
            places[1].update(dict.fromkeys(one.module.poppable(), stage))
    sources, targets = places
    return SkipLayout(len(stages), {key: (source, targets[key]) for key, source in sources.items()})


def check(groups: Sequence[Group]) -> None:
    """Check the skippable modules of a model.

    Raises:
        SkippableError: They do not match.
    """
    stashed: set[Key] = set()
    popped: set[Key] = set()
    faults: list[str] = []
    for group in groups:
        for one in group:
            both = one.module.stashable_names & one.module.poppable_names
            if both:
                faults.append(f"{one} declared {words_of(both)} both as stashable and as poppable")
            again = set(one.module.stashable()) & stashed
            if again:
                faults.append(_redeclared(one, again, "stashable"))
            stashed.update(one.module.stashable())
        for one in group:
            both = one.module.stashable_names & one.module.poppable_names
            pops = {key for key in one.module.poppable() if key[1] not in both}
            again = pops & popped
            if again:
                faults.append(_redeclared(one, again, "poppable"))
            missing = pops - stashed
            if missing:
                faults.append(f"{one} declared {_words(missing)} as poppable but it was not stashed")
            popped.update(one.module.poppable())
    left = stashed - popped
    if left:
        faults.append(f"no module declared {_words(left)} as poppable but stashed")
    if faults:
        listed = "\n".join(f"* {fault}" for fault in faults)
        raise SkippableError(f"one or more pairs of stash and pop do not match:\n\n{listed}")


def _redeclared(one: FoundSkippable, keys: set[Key], kind: str) -> str:
    return f"{one} redeclared {_words(keys)} as {kind} but not isolated by namespace"


def _words(keys: set[Key]) -> str:
    return words_of({name for _, name in keys})
