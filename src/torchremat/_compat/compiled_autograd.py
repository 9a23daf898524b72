"""Support for compiled autograd, so that a saved tensor is unpacked inside of its graph when a node of it runs.

Dynamo takes an object of a *black box* class into a graph as an input and passes it to our operators, which run as they
are; the compiler sees only their metadata.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, reduce
from operator import or_
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.binding import private
from torchremat._compat.dynamo import backend_name
from torchremat._compat.tensors import storage_uses

_bind = partial(private, needed_for="unpacking under compiled autograd")
# Only `isinstance` differs from that of ordinary classes: a compiler's stand-in for an object passes.
BlackBoxMeta: type[type] = _bind("_custom_class_base.CustomClassBaseMeta", "_opaque_base.OpaqueBaseMeta")
_register: Callable[..., None] = _bind(
    "_library.opaque_object.register_custom_class",
    "_library.opaque_object.register_opaque_type",  # torch 2.13 and older
)
# Boxes are compared by identity, not by contents.
_BY_IDENTITY = "symbolic" if _register.__name__ == "register_custom_class" else "reference"
_READ_ONCE = _bind("_library.opaque_object.MemberType.USE_REAL")
_Stand_in: type = _bind("_library.fake_class_registry.FakeScriptObject")
_Keys: Any = _bind("_C.DispatchKeySet")
_included: Callable[[], Any] = _bind("_C._dispatch_tls_local_include_set")
_excluded: Callable[[], Any] = _bind("_C._dispatch_tls_local_exclude_set")
_Forced: Callable[..., AbstractContextManager[None]] = _bind("_C._ForceDispatchKeyGuard")
_ALL_KEYS: dict[str, Any] = _bind("_C.DispatchKey.__members__")

_library = torch.library.Library("torchremat", "FRAGMENT")


def register_black_box(box: type, *, guarded: str) -> None:
    """Register a class as a black box.

    Args:
        box: The class, a `BlackBoxMeta`. Some torch versions do not recognise its subclasses by it.
        guarded: The attribute to which graphs are specialised; another value recompiles them.
    """
    _register(
        box,
        typ=_BY_IDENTITY,
        guard_fn=lambda value: [getattr(value, guarded)],  # pyright: ignore[reportUnknownLambdaType]
        members={guarded: _READ_ONCE},
    )


def operator(
    name: str, arguments: str, kernel: Callable[..., Tensor], shapes: Callable[..., Tensor], box: type
) -> Callable[..., Tensor]:
    """Return an operator that takes a black box.

    Args:
        name: Its name.
        arguments: The further arguments, as in its schema.
        kernel: The function that runs.
        shapes: The function that a compiler runs in its place; it may read only the guarded attribute of the black box.
        box: The class of the first argument, or a base class of it.
    """
    # A kernel that recomputes, or waits for a disk, cannot be captured.
    tags = (torch.Tag.cudagraph_unsafe,)
    _library.define(f"{name}({box.__module__}.{box.__qualname__} box, {arguments}) -> Tensor", tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"torchremat::{name}", shapes, lib=_library)
    return cast("Callable[..., Tensor]", getattr(torch.ops.torchremat, name))


def reuses_memory() -> bool:
    """Return whether the backend of the running trace may write to memory that an operator has returned.

    Inductor does, once the result has no more readers. The same is assumed of unknown backends.
    """
    name = backend_name()
    return name != "eager" and not name.startswith("aot_eager")


# Dynamo runs it while tracing, and treats its result as a constant.
reuses_memory._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


_AUTOCAST = reduce(or_, [_Keys(key) for name, key in _ALL_KEYS.items() if name.startswith("Autocast")])


def as_outside_of_operators() -> AbstractContextManager[None]:
    """Let operators behave as when a user calls them; autocast stays as it is."""
    return _Forced(_included(), _excluded() & _AUTOCAST)


def is_shared(tensor: Tensor) -> bool:
    """Return whether this tensor's memory is shared with another user."""
    # The Python object of a storage counts as a user as well.
    return storage_uses(tensor.untyped_storage()._cdata) > 2


def in_compiled_backward() -> bool:
    """Return whether a graph of compiled autograd is running."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return module is not None and bool(module.in_compiled_autograd_region)


# NOTE [ What a compiler keeps ]
# A compiled graph keeps stand-ins for the black boxes with which it was traced, and these keep the boxes, with
# everything that they own, for the lifetime of the graph. They are never read again when the graph runs, so they are
# then replaced by boxes of the same metadata with nothing in them.
_stand_ins: list[ReferenceType[Any]] = []


def remember_stand_in(box: object) -> None:
    """Record a compiler's stand-in for a black box, if it is one. See NOTE [ What a compiler keeps ]."""
    if type(box) is _Stand_in:
        _stand_ins.append(ref(box))


def empty_stand_ins(emptied: Callable[[Any], object]) -> None:
    """Release the black boxes that compilers have kept, and leave `emptied(box)` in their places."""
    while _stand_ins:
        stand_in = _stand_ins.pop()()
        if stand_in is not None:
            object.__setattr__(stand_in, "real_obj", emptied(stand_in.real_obj))
