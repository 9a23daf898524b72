"""What each thread does with regions right now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import ReferenceType

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from torchremat.regions.calls import Call, Frozen
    from torchremat.regions.carriers import Carried
    from torchremat.regions.selecting import Collecting, Replaying
    from torchremat.regions.selection import Selection


class Thread(threading.local):
    """One thread.

    Attributes:
        recomputing: How many recomputes run, one inside the other.
        calls: The calls that run for the first time, outermost first; of those that run in a recompute, the ones that
            were made in it.
        frozen: What the call that runs again has frozen in its forward, by name.
        carried: What is on its way in the recompute that runs, by carrier and key; None outside of recomputes.
        on_carried: Told of each value that is put into a carrier, and when it is taken out.
        scopes: The scopes that are open, innermost last. Kept by `runs`.
        selecting: Who sees the operators that run, for a policy.
        moved: The generators that kept draws have moved in the recompute that runs, and the states they had before.
        plain: Whether what would become a region is called plainly. Kept by `plainly`.
        inner: What regions that are met in a recompute take over, see NOTE [ Selective recompute ].
    """

    def __init__(self) -> None:
        self.recomputing = 0
        self.calls: list[Call] = []
        self.frozen: Mapping[object, Iterator[Frozen]] = {}
        self.carried: dict[tuple[object, object], Carried] | None = None
        self.on_carried: Callable[[object], None] | None = None
        self.scopes: list[object] = []
        self.selecting: Collecting | Replaying | None = None
        self.moved: dict[torch.Generator | torch.device, Tensor] | None = None
        self.plain = False
        self.inner: Iterator[ReferenceType[Selection]] = iter(())


thread = Thread()


def makes_regions() -> bool:
    """Return whether calls become regions now: with grad mode on, and not inside `plainly`."""
    return torch.is_grad_enabled() and not thread.plain


@contextmanager
def plainly() -> Generator[None]:
    """Let calls that would become regions in the block be plain calls; autograd keeps what they save.

    For a forward whose backward follows at once. Recomputes are as ever, and compiled code keeps its regions.
    """
    had, thread.plain = thread.plain, True
    try:
        yield
    finally:
        thread.plain = had
