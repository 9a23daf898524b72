"""Writes plans as JSON and reads them: a versioned schema, readable, diffable, and loaded without executing anything.

Trees are written as nested lists: a number is a kept unit, a list a region. Everything else is written field by field.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from hashlib import sha256
from typing import TypeVar, cast

from torchremat.errors import PlanError, ScheduleError
from torchremat.planning.results.plan_data import PlanData
from torchremat.schedules.chain import KeepNode, Node, RegionNode, Tree, kept

SCHEMA = "torchremat.plan"
VERSION = 1

# No number of a plan is beyond this, and floats end not much later.
_MOST_BITS = 128

T = TypeVar("T", bound=PlanData)


def to_json(plan: PlanData) -> str:
    """Return a plan as JSON text; lists of plain values stand on one line each."""
    content = {"schema": SCHEMA, "version": VERSION, **cast("dict[str, object]", _written(plan))}
    return _laid_out(content, "") + "\n"


def digest_of(value: object) -> str:
    """Return some characters that equal parts of plans share, in any process; other parts have others."""
    return sha256(json.dumps(_written(value)).encode()).hexdigest()[:16]


def from_json(text: str, kind: type[T], *, source: str) -> T:
    """Return the plan in a JSON text.

    Raises:
        PlanError: It is no JSON, no plan, of a newer version, or has a field that is missing, unknown or of another
        type.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{source}: not a plan, it is not JSON ({error}).") from error
    except RecursionError:
        raise PlanError(f"{source}: not a plan, it is nested too deeply.") from None
    if not isinstance(content, dict) or cast("dict[str, object]", content).get("schema") != SCHEMA:
        raise PlanError(f'{source}: not a plan, "schema" is not "{SCHEMA}".')
    values = dict(cast("dict[str, object]", content))
    version = values.pop("version", None)
    values.pop("schema")
    if type(version) is not int or version < 1:
        raise PlanError(f'{source}: "version" is {version!r}, expected a number from 1 to {VERSION}.')
    if version > VERSION:
        raise PlanError(
            f"{source}: the plan has version {version}, this torchremat reads up to {VERSION}. Install a newer "
            "torchremat, or plan again."
        )
    try:
        plan = cast("T", _read(values, kind, source))
        problem = next(_problems(plan), "")
    except RecursionError:
        raise PlanError(f"{source}: not a plan, its tree is nested too deeply.") from None
    if problem:
        raise PlanError(f"{source}: {problem}")
    return plan


def _problems(plan: PlanData) -> Iterator[str]:
    """Yield what a plan contradicts itself in."""
    calls, units, tree = plan.calls.units, len(plan.units), plan.tree
    found = [keep.stage for keep in kept(tree)]
    if found != list(range(units)) or len(calls) != units:
        yield f"the tree covers the units {found}, the plan has {units}, with calls for {len(calls)}."
    parts = sorted(unit for one in plan.held for unit in one.units)
    chosen = [keep.stage for keep in kept(tree) if keep.option]
    inside = [keep.stage for node in tree if isinstance(node, RegionNode) for keep in kept((node,)) if keep.option]
    nested = [unit for unit in inside if any(one.held and unit in one.units for one in plan.held)]
    if nested:
        yield f"the tree keeps the units {nested} in part inside of regions, which is not possible."
    if parts != chosen:
        yield f"the tree keeps the units {chosen} in part, and `held` is for the units {parts}."
    uncut = [one.cuts for one in plan.held if one.cuts != tuple(sorted({*one.cuts} - {0}))]
    if uncut:
        yield f"`cuts` are no rising numbers above 0: {uncut[0]}."
    missing = [one.held for one in plan.held if max(one.held, default=-1) >= len(one.operators)]
    if missing:
        yield f"`held` has numbers of operators that do not exist: {missing[0]}."
    last = max((max(one.unit, one.leaves_after, one.comes_before) for one in plan.stored), default=0)
    if last >= units or any(one.store >= len(plan.stores) for one in plan.stored):
        yield "`stored` names stores or units that do not exist."
    if plan.speeds and len(plan.speeds) != len(plan.stores):
        yield f"there are {len(plan.stores)} stores, and the speeds of {len(plan.speeds)}."
    empty = [unit for unit, made in enumerate(calls) if not made]
    if empty:
        yield f"the units {empty} have no calls."
    if not plan.calls.roots:
        yield "`calls` has no roots, and without one nothing is recomputed."


# -------------------------------------------------------------------------------------------------------------- writing


def _written(value: object) -> object:
    if isinstance(value, KeepNode):
        return value.stage if not value.option else {"keep": value.stage, "option": value.option}
    if isinstance(value, RegionNode):
        return [_written(child) for child in value.children]
    if is_dataclass(value):
        return {one.name: _written(getattr(value, one.name)) for one in _written_fields(type(value))}
    if isinstance(value, Mapping):
        return {str(key): _written(item) for key, item in cast("dict[object, object]", value).items()}
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[str]", value))
    if isinstance(value, tuple):
        return [_written(item) for item in cast("tuple[object, ...]", value)]
    return value


def _laid_out(value: object, indent: str) -> str:
    """Like `json.dumps` with an indent, with short and flat values on one line."""
    flat = json.dumps(value)
    if len(indent) + len(flat) <= 100 or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [
            f"{json.dumps(key)}: {_laid_out(item, inner)}" for key, item in cast("dict[str, object]", value).items()
        ]
        edges = "{}"
    else:
        items = [_laid_out(item, inner) for item in cast("list[object]", value)]
        edges = "[]"
    return f"{edges[0]}\n" + ",\n".join(f"{inner}{item}" for item in items) + f"\n{indent}{edges[1]}"


# -------------------------------------------------------------------------------------------------------------- reading


def _read(value: object, kind: object, where: str) -> object:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Tree or (origin is tuple and arguments and _is_node(arguments[0])):
        return _nodes(value, where)
    if is_dataclass(kind):
        return _read_fields(value, cast("type", kind), where)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        return _read(value, next(one for one in arguments if one is not type(None)), where)
    if origin is typing.Literal:
        if value not in arguments:
            raise PlanError(f"{where} is {value!r}, expected one of {', '.join(map(repr, arguments))}.")
        return value
    if origin in (tuple, frozenset):
        if not isinstance(value, list):
            raise PlanError(f"{where} is {value!r:.60}, expected a list.")
        items = [_read(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(cast("list[object]", value))]
        return origin(items)
    if origin is dict:
        if not isinstance(value, dict):
            raise PlanError(f"{where} is {value!r:.60}, expected an object.")
        return {
            key: _read(item, arguments[1], f"{where}.{key}") for key, item in cast("dict[str, object]", value).items()
        }
    return _read_plain(value, cast("type", kind), where)


def _read_plain(value: object, kind: type, where: str) -> object:
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise PlanError(f"{where} is 2**{value.bit_length() - 1} or more, too large for a plan.")
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise PlanError(f"{where} is {value!r:.60}, expected {kind.__name__}.")
    if isinstance(value, int) and value < 0:
        raise PlanError(f"{where} is {value}, which is negative.")
    return value


def _read_fields(value: object, kind: type, where: str) -> object:
    if not isinstance(value, dict):
        raise PlanError(f"{where} is {value!r:.60}, expected an object.")
    content = cast("dict[str, object]", value)
    types_of = typing.get_type_hints(kind)
    known = {one.name: one for one in _written_fields(kind)}
    # A field with a default is younger than the file may be.
    needed = [name for name, one in known.items() if one.default is MISSING and one.default_factory is MISSING]
    problems = [f"{where}.{name} is missing" for name in needed if name not in content]
    problems += [f"{where}.{name} is unknown" for name in content if name not in known]
    if problems:
        raise PlanError("; ".join(problems) + ".")
    return kind(**{name: _read(content[name], types_of[name], f"{where}.{name}") for name in known if name in content})


def _written_fields(kind: type) -> list[Field[object]]:
    return [one for one in fields(kind) if not one.name.startswith("_") and one.metadata.get("written", True)]


def _is_node(kind: object) -> bool:
    return KeepNode in typing.get_args(kind)


def _nodes(value: object, where: str) -> Tree:
    if not isinstance(value, list):
        raise PlanError(f"{where} is {value!r:.60}, expected a list.")
    return tuple(_node(item, f"{where}[{i}]") for i, item in enumerate(cast("list[object]", value)))


def _node(value: object, where: str) -> Node:
    if isinstance(value, list):
        try:
            return RegionNode(_nodes(cast("list[object]", value), where))
        except ScheduleError as error:
            raise PlanError(f"{where}: {error}.") from error
    if isinstance(value, dict):
        content = cast("dict[str, object]", value)
        if content.keys() == {"keep", "option"}:
            return KeepNode(
                cast("int", _read_plain(content["keep"], int, where)),
                cast("int", _read_plain(content["option"], int, where)),
            )
    return KeepNode(cast("int", _read_plain(value, int, where)))
