"""Functions that reach nothing that has state, which most functions are: found without following them each time."""

from __future__ import annotations

import types

from torchremat.state.code import Reads, reads_of
from torchremat.state.following.code import PASSIVE
from torchremat.state.holders import contents_of
from torchremat.state.reach import reach
from torchremat.state.world import Reaching

_FILES = frozenset({types.ModuleType})
_PLAIN = PASSIVE | _FILES


def plain_cells(function: object) -> tuple[Reads, list[object]] | None:
    """Return what a function reads and the contents of its cells, if it obviously reaches nothing else with state.

    Returns:
        The contents are numbers, strings and Python modules, since most functions hold nothing else; None if more is
        possible.
    """
    if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
        return None
    reads = reads_of(function.__code__)
    files: list[object] = [*map(function.__globals__.get, reads.names)] if reads.names else []
    if reads.imports or (files and not _FILES.issuperset(map(type, files))):
        return None
    contents: list[object] = []
    if function.__closure__:
        contents = contents_of(function.__closure__)
        if reads.stores or not _PLAIN.issuperset(map(type, contents)):
            return None
        files += [one for one in contents if type(one) is types.ModuleType]
    if function.__dict__ or (files and not _are_stateless(function.__code__, files)):
        return None
    return reads, contents


# By the id of a piece of code, which it keeps alive: the Python modules in which its names lead to no state.
_stateless: dict[int, tuple[types.CodeType, list[object]]] = {}
_MOST = 20_000


def _are_stateless(code: types.CodeType, files: list[object]) -> bool:
    """Return whether the names that a piece of code reads lead to no state in some Python modules."""
    known = _stateless.get(id(code))
    if known is not None and known[1] == files:
        return True
    world = Reaching()
    world.called |= reads_of(code).attributes
    reach(world, files)
    if world.rest or world.bindings or world.dicts or world.tensors or world.generators:
        return False
    if len(_stateless) > _MOST:
        _stateless.clear()
    _stateless[id(code)] = code, files
    return True
