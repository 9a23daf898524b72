"""The names that a piece of code reads, and whose code is followed."""

from __future__ import annotations

import builtins
import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from typing import NamedTuple, cast
from weakref import ReferenceType, WeakKeyDictionary, ref

_FOREIGN = frozenset({"torch", "torchremat", "numpy", "scipy"})
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "LOAD_SUPER_ATTR", "IMPORT_FROM")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME")
_STORES = ("STORE_DEREF", "DELETE_DEREF", "STORE_ATTR", "DELETE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
# Code that looks attributes up by strings.
_LOOKUPS = frozenset({"getattr", "setattr", "hasattr", "vars", "attrgetter", "__dict__"})
# Code that sets the state of a generator calls one of these.
_SETTERS = frozenset({"manual_seed", "seed", "set_rng_state", "set_state", "fork_rng"})
# Code that writes past a version counter gets at the memory of a tensor by one of these, or calls one of these kernels.
_PAST_VERSIONS = frozenset(
    {
        "data", "data_ptr", "numpy", "__array__", "asarray", "from_numpy", "from_dlpack", "storage", "untyped_storage",
        "batch_norm", "instance_norm",
    }
)  # fmt: skip
# Methods of a class that no recompute runs.
_NEVER_RUN = frozenset(
    {
        "__init__", "__new__", "__init_subclass__", "__class_getitem__", "__repr__", "__str__", "__del__", "__dir__",
        "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__", "__deepcopy__",
    }
)  # fmt: skip


class Reads(NamedTuple):
    """The reads of a piece of code, including the functions defined inside of it.

    Attributes:
        names: Global names, without Python's builtins.
        attributes: Names of attributes, of any object; imported names too, and strings where names are looked up.
        imports: The modules that it imports, each with its number of leading dots.
        sets_generators: Whether it may set the state of a random generator.
        stores: Whether it binds a cell, or stores an attribute or an item.
        passes_versions: Whether it may write to a tensor in a way that its version counter does not see.
    """

    names: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[tuple[str, int], ...]
    sets_generators: bool
    stores: bool
    passes_versions: bool


# By id: hashing code takes longer than inspecting most functions. The code is kept alive so that its id stays its own.
_known: dict[int, tuple[types.CodeType, Reads]] = {}
_MOST = 20_000


def reads_of(code: types.CodeType) -> Reads:
    """Return the reads of a piece of code."""
    found = _known.get(id(code))
    if found is None:
        if len(_known) > _MOST:
            _known.clear()
        found = _known[id(code)] = code, _read(code)
    return found[1]


def _read(code: types.CodeType) -> Reads:
    names: dict[str, None] = {}
    attributes: set[str] = set()
    imports: list[tuple[str, int]] = []
    stores = False
    for one in nested(code):
        values: list[object] = []
        for instruction in dis.get_instructions(one):
            if instruction.opname in _GLOBALS:
                names[instruction.argval] = None
            elif instruction.opname in _ATTRIBUTES:
                attributes.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                imports.append((instruction.argval, cast("int", values[-2])))  # before it: the dots, and the names
                attributes.update(instruction.argval.split("."))
            values.append(instruction.argval)
            if instruction.opname in _STORES:
                stores = True
    sets = not _SETTERS.isdisjoint({*names, *attributes})
    if not _LOOKUPS.isdisjoint({*names, *attributes}):
        attributes |= {text for one in nested(code) for text in one.co_consts if isinstance(text, str)}
    reads = tuple(name for name in names if not hasattr(builtins, name))
    passes = not _PAST_VERSIONS.isdisjoint(attributes)
    return Reads(reads, frozenset(attributes), tuple(imports), sets, stores, passes)


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a piece of code, and the functions, lambdas and comprehensions written inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


@functools.cache
def is_library(module: str | None) -> bool:
    """Return whether a module belongs to torch, NumPy, Python or this package, whose code reaches no user state."""
    root = (module or "").partition(".")[0]
    if root in _FOREIGN:
        return True
    if root not in sys.stdlib_module_names:
        return False
    # A user module may have the same name as one of Python's.
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)
    return origin in (None, "built-in", "frozen") or str(origin).startswith(_STANDARD_LIBRARY)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Return whether a module belongs to an installed package other than these."""
    root = (module or "").partition(".")[0]
    origin = getattr(getattr(sys.modules.get(root), "__spec__", None), "origin", None)
    # Of any environment: one may lie on top of another.
    return str(origin).startswith(_PACKAGES) or any(f"{os.sep}{name}{os.sep}" in str(origin) for name in _FOLDERS)


_PACKAGES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})
_FOLDERS = ("site-packages", "dist-packages")
_STANDARD_LIBRARY = dis.__file__.removesuffix("dis.py")


def is_library_class(kind: type) -> bool:
    """Return whether a class is a library's own, and not one that the library has made at run time for the user."""
    if kind in permanent:
        return True
    if not is_library(kind.__module__):
        return False
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    if found is kind or kind.__module__ == "builtins":
        permanent.add(kind)
        return True
    return False


# Classes that their modules hold by name, and that live as long as these.
permanent: set[type] = set()


class ClassCode(NamedTuple):
    """The contents of the user's part of a class, bases included; weak, so that an unused class is freed.

    Attributes:
        methods: Functions by name, including those of properties, class methods and static methods.
        always: The names of the methods that run without being named.
        data: The classes that have their own attributes, with the names of these attributes, methods included.
    """

    methods: dict[str, list[ReferenceType[types.FunctionType]]]
    always: frozenset[str]
    data: list[tuple[ReferenceType[type], tuple[str, ...]]]


_classes: WeakKeyDictionary[type, tuple[list[object], ClassCode]] = WeakKeyDictionary()


def class_code(kind: type) -> ClassCode:
    """Return the contents of the user's part of a class."""
    users = [one for one in kind.__mro__ if one not in permanent and not is_library_class(one)]
    classes = [vars(one) for one in users]
    shape: list[object] = []
    for own in classes:
        shape += (len(own), id(own.get("forward")))
    found = _classes.get(kind)
    if found is None or found[0] != shape:
        found = _classes[kind] = shape, _read_class(users)
    return found[1]


def _read_class(classes: list[type]) -> ClassCode:
    methods: dict[str, list[ReferenceType[types.FunctionType]]] = {}
    data: list[tuple[ReferenceType[type], tuple[str, ...]]] = []
    for one in classes:
        own: list[str] = []
        for name, value in vars(one).items():
            functions = list(_functions_in(value))
            if functions:
                methods.setdefault(name, []).extend(map(ref, functions))
            if not _is_dunder(name):
                own.append(name)
        data.append((ref(one), tuple(own)))
    always = {name for name in methods if _is_dunder(name)} - _NEVER_RUN
    return ClassCode(methods, frozenset(always | ({"forward"} & methods.keys())), data)


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _functions_in(value: object) -> Iterator[types.FunctionType]:
    for one in (value, *(getattr(value, name, None) for name in ("fget", "fset", "__func__", "func", "__wrapped__"))):
        if isinstance(one, types.FunctionType):
            yield one


def function_of(body: object) -> object:
    """Return the user's function that a callable of this package calls."""
    while True:
        if isinstance(body, functools.partial) and _is_own(body.func) and body.args:
            body = body.args[0]
        elif _is_own(type(body)) and hasattr(body, "body"):
            body = body.body  # pyright: ignore[reportAttributeAccessIssue]
        else:
            return body


def _is_own(item: object) -> bool:
    return (getattr(item, "__module__", None) or "").startswith("torchremat.")
