"""A tree of regions over units, put on a model and taken off again."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

from torchremat.planning.units import Units
from torchremat.regions.region import Settings
from torchremat.regions.runs import Choice, Place, Scope
from torchremat.regions.wrapping import is_wrapped, restore_forward, set_forward
from torchremat.schedules.chain import Keep, Tree

Key = tuple[str, int]


def choices_of(units: Units, tree: Tree) -> dict[Key, Choice]:
    """Return the regions that each call runs in, for the calls of the first root; the calls of further roots are alike.

    A kept call has no entry, unless a module that has one is called inside of it and would be counted.
    """
    choices: dict[Key, Choice] = {}
    kept: list[int] = []
    for node in tree:
        _choose(units, node, (), choices, kept)
    names = {name for name, _ in choices}
    for unit in kept:
        for call, key in zip(units.units[unit].calls, units.units[unit].keys, strict=True):
            inside = {units.trace.calls[inner].name for inner in units.trace.descendants(call)}
            if inside & names:
                choices[key] = Choice()
    return choices


def _choose(units: Units, node: object, places: tuple[Place, ...], choices: dict[Key, Choice], kept: list[int]) -> None:
    if isinstance(node, Keep):
        if not places:
            kept.append(node.stage)
        for key in units.units[node.stage].keys if places else ():
            choices[key] = Choice(places)
        return
    first, last = node.first, node.last  # pyright: ignore
    calls = sum(len(units.units[unit].calls) for unit in range(first, last + 1))
    names = [units.units[first].keys[0][0], units.units[last].keys[-1][0]]
    place = Place(calls, names[0] if names[0] == names[1] else f"{names[0]} .. {names[1]}", first, last)
    for child in node.children:  # pyright: ignore
        _choose(units, child, (*places, place), choices, kept)


def install(model: nn.Module, roots: set[str], choices: dict[Key, Choice], settings: Settings) -> None:
    """Make the calls of the modules that `choices` names regions, under the roots' scopes."""
    scope = Scope(choices, settings)
    names = {name for name, _ in choices}
    done: list[nn.Module] = []
    try:
        for name in sorted(names | roots):
            module = model.get_submodule(name)
            set_forward(module, name, settings if name in names else None, scope if name in roots - names else None)
            done.append(module)
    except BaseException:
        for module in done:
            restore_forward(module)
        raise


def uninstall(model: nn.Module) -> None:
    """Take off what `install` has put on."""
    for module in model.modules():
        if is_wrapped(module):
            restore_forward(module)


@contextmanager
def installed(model: nn.Module, units: Units, tree: Tree, settings: Settings) -> Generator[None]:
    """Put a tree on the model for a block."""
    roots = {units.trace.calls[root].name for root in units.roots}
    install(model, roots, choices_of(units, tree), settings)
    try:
        yield
    finally:
        uninstall(model)
