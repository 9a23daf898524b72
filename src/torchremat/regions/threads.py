"""What each thread does with regions right now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ReferenceType

import torch

from torchremat._compat.graphs import is_traced

if TYPE_CHECKING:
    from torch import Tensor

    from torchremat.regions.calls import Call, Frozen
    from torchremat.regions.carriers import Carried
    from torchremat.regions.selecting import Collecting, Replaying
    from torchremat.regions.selection import Selection


class Now:
    """What goes on around the code that runs. A recompute begins with nothing of it. See Rule 3.

    Attributes:
        recomputing: How many recomputes run, one inside the other.
        calls: The calls that run for the first time, outermost first; of those that run in a recompute, the ones that
            were made in it.
        scopes: The scopes that are open, innermost last. Kept by `runs`.
        carried: What is on its way in the recompute that runs, by carrier and key; None outside of recomputes.
        selecting: Who sees the operators that run, for a policy.
        inner: What regions that are met in a recompute take over, see NOTE [ Selective recompute ]; None for nothing.
        plain: Whether what would become a region is called plainly. Kept by `plainly`.
    """

    __slots__ = ("calls", "carried", "inner", "plain", "recomputing", "scopes", "selecting")

    def __init__(self, recomputing: int = 0) -> None:
        self.recomputing = recomputing
        self.calls: list[Call] = []
        self.scopes: list[object] = []
        self.carried: dict[tuple[object, object], Carried] | None = {} if recomputing else None
        self.selecting: Collecting | Replaying | None = None
        self.inner: Iterator[ReferenceType[Selection]] | None = None
        self.plain = False


class Thread(threading.local):
    """One thread.

    Attributes:
        now: What goes on around the code that runs.
        frozen: What the call that runs again has frozen in its forward, by name.
        on_carried: Told of each value that is put into a carrier, and when it is taken out.
        moved: The generators that kept draws have moved in the recompute that runs, and the states they had before.
    """

    def __init__(self) -> None:
        self.now = Now()
        self.frozen: Mapping[object, Iterator[Frozen]] = {}
        self.on_carried: Callable[[object], None] | None = None
        self.moved: dict[torch.Generator | torch.device, Tensor] | None = None


thread = Thread()


def makes_regions() -> bool:
    """Return whether calls become regions now: with grad mode on, not inside `plainly`, not under `torch.jit.trace`."""
    return torch.is_grad_enabled() and not thread.now.plain and not is_traced()


@contextmanager
def plainly() -> Generator[None]:
    """Let calls that would become regions in the block be plain calls; autograd keeps what they save.

    For a forward whose backward follows at once. Recomputes are as ever, and compiled code keeps its regions.
    """
    had, thread.now.plain = thread.now.plain, True
    try:
        yield
    finally:
        thread.now.plain = had
