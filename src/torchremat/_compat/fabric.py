"""Private state of Lightning Fabric.

Under mixed precision a module that Fabric has set up lets only `fabric.backward` begin a backward from its outputs,
recognised by a flag of its own. Otherwise `fabric.backward` only scales the loss, on which no byte depends.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

from torchremat._compat.binding import overridden

_MODULES = ("lightning.fabric.wrappers", "lightning_fabric.wrappers")  # it has been released under both names
_FLAG = "_in_fabric_backward"


def as_fabrics_backward() -> AbstractContextManager[None]:
    """Return a context in which a backward counts as one of Fabric's, where Fabric is in use."""
    modules = [sys.modules[name] for name in _MODULES if name in sys.modules]
    return overridden([one for one in modules if hasattr(one, _FLAG)], **{_FLAG: True})
