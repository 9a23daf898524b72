"""Values as JSON, and back: dataclasses field by field, by the types of their fields; nothing is executed.

Fields whose names begin with an underscore are not written. The metadata of a field says what else is special: it is
`UNWRITTEN`, or has a `JsonForm` as `"json"`. Whoever has a file puts a header and a class of errors around this.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from hashlib import sha256
from typing import Any, TypeVar, cast

T = TypeVar("T")

UNWRITTEN: Mapping[str, object] = {"json": None}

# No number in a file is beyond this, and floats end not much later.
_MOST_BITS = 128


@dataclass(frozen=True)
class JsonForm:
    """The form of a field that has one of its own; `read` gets the reader, the data, and where this is."""

    write: Callable[[Any], object]
    read: Callable[[JsonReader, object, str], object]


# -------------------------------------------------------------------------------------------------------------- writing


def data_of(value: object) -> object:
    """Return a value as JSON types."""
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Mapping):
        return {str(key): data_of(item) for key, item in cast("Mapping[object, object]", value).items()}
    if isinstance(value, frozenset):
        return sorted(cast("frozenset[str]", value))
    if isinstance(value, tuple | list):
        return [data_of(item) for item in cast("tuple[object, ...]", value)]
    return value


def fields_of(value: object) -> dict[str, object]:
    """Return the fields of a dataclass as JSON types."""
    found: dict[str, object] = {}
    for name, own in _written_fields(type(value)).items():
        item: object = getattr(value, name)
        found[name] = own.metadata["json"].write(item) if "json" in own.metadata else data_of(item)
    return found


def text_of(value: object) -> str:
    """Return a value as JSON text, in which short lists and objects stand on one line each."""
    return _laid_out(data_of(value), "") + "\n"


def digest_of(value: object) -> str:
    """Return some characters that equal values share, in any process; other values have others."""
    return sha256(json.dumps(data_of(value)).encode()).hexdigest()[:16]


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


def _written_fields(kind: type) -> dict[str, Field[object]]:
    own = (one for one in fields(kind) if not one.name.startswith("_"))
    return {one.name: one for one in own if one.metadata.get("json", "") is not None}


# -------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class JsonReader:
    """Reads values of given types.

    Attributes:
        noun: What is read, in messages.
        is_complete: Whether fields with a default have to be there; they may be younger than a file.
    """

    noun: str
    is_complete: bool = False

    def read(self, value: object, kind: type[T], where: str) -> T:
        """Return the value of a type in JSON types; `where` is its place, in messages.

        Raises:
            ValueError: It has another type, or a field that is missing or unknown.
        """
        return cast("T", self._read(value, kind, where))

    def items(self, value: object, where: str) -> list[tuple[object, str]]:
        """Return the items of a list, each with its place.

        Raises:
            ValueError: It is no list.
        """
        if not isinstance(value, list):
            raise ValueError(f"{where} is {value!r:.60}, expected a list.")
        return [(item, f"{where}[{place}]") for place, item in enumerate(cast("list[object]", value))]

    def _read(self, value: object, kind: object, where: str) -> object:
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if is_dataclass(kind):
            return self._fields(value, cast("type", kind), where)
        if origin in (types.UnionType, typing.Union):
            if value is None and type(None) in arguments:
                return None
            return self._read(value, next(one for one in arguments if one is not type(None)), where)
        if origin is typing.Literal:
            if value not in arguments:
                raise ValueError(f"{where} is {value!r}, expected one of {', '.join(map(repr, arguments))}.")
            return value
        if origin in (tuple, frozenset):
            return origin([self._read(item, arguments[0], place) for item, place in self.items(value, where)])
        if origin is dict:
            content = _object(value, where)
            return {key: self._read(item, arguments[1], f"{where}.{key}") for key, item in content.items()}
        return self._plain(value, cast("type", kind), where)

    def _plain(self, value: object, kind: type, where: str) -> object:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(f"{where} is 2**{value.bit_length() - 1} or more, too large for {self.noun}.")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError(f"{where} is {value!r:.60}, expected {kind.__name__}.")
        if isinstance(value, int) and value < 0:
            raise ValueError(f"{where} is {value}, which is negative.")
        return value

    def _fields(self, value: object, kind: type, where: str) -> object:
        content, types_of, known = _object(value, where), typing.get_type_hints(kind), _written_fields(kind)
        needed = [
            name
            for name, one in known.items()
            if self.is_complete or (one.default is MISSING and one.default_factory is MISSING)
        ]
        problems = [f"{where}.{name} is missing" for name in needed if name not in content]
        problems += [f"{where}.{name} is unknown" for name in content if name not in known]
        if problems:
            raise ValueError("; ".join(problems) + ".")
        found: dict[str, object] = {}
        for name in (name for name in known if name in content):
            item, place, metadata = content[name], f"{where}.{name}", known[name].metadata
            has_form = "json" in metadata
            found[name] = (
                metadata["json"].read(self, item, place) if has_form else self._read(item, types_of[name], place)
            )
        return kind(**found)


def _object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {value!r:.60}, expected an object.")
    return cast("dict[str, object]", value)
