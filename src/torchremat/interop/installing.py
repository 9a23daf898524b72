"""The drop-in installed in place of `torch.utils.checkpoint`, for code that cannot be edited.

    object                                                     while installed           afterwards
    names of `torch.utils.checkpoint`                          the drop-in's             torch's
    globals of other modules that are one of these objects     the drop-in's             torch's
    `functools.partial` objects of them, wherever they live    call the drop-in's        call torch's

`transformers` puts such partials on the modules of a model by `gradient_checkpointing_enable()`, and torch's
`checkpoint_wrapper` on the modules that it makes: a model that was prepared before uses the drop-in as well.

NOTE [ What is put back ]
The installed objects are copies of the drop-in's functions and classes, which are available nowhere else. So a module
that imports the names meanwhile gets the copies, and every copy found at the end comes from here: it is put back. The
drop-in's own objects, which a program may also use, are left alone.

Missing on purpose: torch's functions in the closures, default arguments, class bodies and containers of other code, and
private names of torch's module (`torch.distributed._composable.checkpoint` uses one): these still call torch's.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Mapping
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any, Self, cast

from torch.utils import checkpoint as torch_checkpoint

from torchremat.errors import UnsupportedError
from torchremat.interop import torch_checkpoint as drop_in

_NAMES = (
    "checkpoint",
    "checkpoint_sequential",
    "CheckpointFunction",
    "GraphExecGroup",
    "create_selective_checkpoint_contexts",
)


class Installation:
    """The drop-in, installed until the block that this opens has ended. Made by `install()`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with _lock:
            if self in _open:
                _close(self)


def install() -> Installation:
    """Let third-party code that uses `torch.utils.checkpoint` use torchremat's regions, from now on.

    Takes effect at once, in every module and for models on which checkpointing is enabled already; undone by
    `uninstall()`, or when the block ends if it is used in a `with` statement. May be called several times: the last
    one to be undone puts torch's functions back.

    >>> from torch.utils import checkpoint
    >>> with install():
    ...     checkpoint.checkpoint.__module__
    'torchremat.interop.torch_checkpoint'
    >>> checkpoint.checkpoint.__module__
    'torch.utils.checkpoint'
    """
    with _lock:
        if not _open:
            _exchange(_originals, _installed)
        made = Installation()
        _open.append(made)
        return made


def uninstall() -> None:
    """Undo the last `install()` that is still in force.

    Raises:
        UnsupportedError: None is in force.
    """
    with _lock:
        if not _open:
            raise UnsupportedError("uninstall(): the drop-in is not installed; call torchremat.install() first.")
        _close(_open[-1])


def _close(installation: Installation) -> None:
    _open.remove(installation)
    if not _open:
        _exchange(_installed, _originals)


def _exchange(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    exchanged = {id(before[name]): after[name] for name in _NAMES}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == "torchremat":
            continue
        # Never `getattr`: modules that load lazily would load everything.
        names = cast("dict[str, object] | None", getattr(module, "__dict__", None))
        if type(names) is not dict:
            continue
        for name, value in list(names.items()):
            if id(value) in exchanged:
                names[name] = exchanged[id(value)]
    for one in gc.get_referrers(*before.values()):
        if isinstance(one, partial) and id(cast("partial[Any]", one).func) in exchanged:
            # In place: its holders are unknown.
            _, _, state = cast("tuple[object, object, tuple[object, ...]]", one.__reduce__())
            state = (exchanged[id(one.func)], *state[1:])
            one.__setstate__(state)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]: no stub has it


def _copy(value: object) -> object:
    # See NOTE [ What is put back ]
    if isinstance(value, FunctionType):
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, value.__closure__)
        copied.__kwdefaults__ = value.__kwdefaults__
        copied.__doc__, copied.__annotations__ = value.__doc__, value.__annotations__
        copied.__module__, copied.__qualname__ = value.__module__, value.__qualname__
        return copied
    assert isinstance(value, type)
    return type(value)(value.__name__, (value,), {"__module__": value.__module__, "__doc__": value.__doc__})


_lock = threading.RLock()
_open: list[Installation] = []
_originals: Mapping[str, object] = MappingProxyType({name: getattr(torch_checkpoint, name) for name in _NAMES})
_installed: Mapping[str, object] = MappingProxyType({name: _copy(getattr(drop_in, name)) for name in _NAMES})
