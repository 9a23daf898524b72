"""Private state of Lightning Fabric.

Under mixed precision a module that Fabric has set up lets only `fabric.backward` begin a backward from its outputs,
recognised by a flag of its own. Otherwise `fabric.backward` only scales the loss, on which no byte depends.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager

_MODULES = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")  # it has been released under both names
_FLAG = "_in_fabric_backward"


@contextmanager
def as_fabrics_backward() -> Generator[None]:
    """Let a backward in the block count as one of Fabric's, where Fabric is in use."""
    modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
    found = [vars(module) for module in modules if hasattr(module, _FLAG)]
    before = [one[_FLAG] for one in found]
    for one in found:
        one[_FLAG] = True
    try:
        yield
    finally:
        for one, flag in zip(found, before, strict=True):
            one[_FLAG] = flag
