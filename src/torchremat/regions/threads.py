"""The current state of each thread around regions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import ReferenceType

import torch
from torch import Tensor

from torchremat._compat.autograd import (
    get_from_tls,
    is_in_tls,
    is_pythons_thread,
    remove_from_tls,
    stash_in_tls,
)
from torchremat._compat.dynamo import is_traced
from torchremat.regions.calls import Call, Frozen
from torchremat.regions.selective.cache import Selection
from torchremat.regions.selective.watching import Collecting, Replaying

# NOTE [ In which thread a backward runs ]
#
# A backward that is called in a region runs the nodes of a device in a thread of autograd, and so does any backward
# that is nested deeply enough. The state around the running code must be visible there as well: the operators of that
# backward belong to the region, and a region there is an inner region. torch copies its own thread-local state, such as
# grad mode and dispatch modes, from the thread that calls a backward to the threads in which it runs, together with
# objects stashed there under a key. So `Now` is stashed while it is not empty. An autograd thread serves many backwards
# in turn, also one in the middle of another, so state of its own would belong to the wrong backward: it reads the stash
# each time. Other threads keep their own `Now`.


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A value, and the place where it was put.

    Attributes:
        value: Any structure of tensors and other objects.
        calls: The calls that were in their first run there, outermost first.
        is_reentrant: Whether a reentrant region was in its first run there.
    """

    value: object
    calls: tuple[Call, ...]
    is_reentrant: bool


@dataclass(slots=True, eq=False)
class Deriving:
    """What a recompute of a derivative passes on. See NOTE [ The derivative of a region ].

    Attributes:
        arriving: What begins to wait for gradients, once the next backward has put its own in the places of some.
        unpacks: By derivative, the hook for what the calls before its backward have saved.
    """

    arriving: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    unpacks: dict[object, Callable[[Any], Tensor]] = field(default_factory=dict[object, Callable[[Any], Tensor]])


class Now:
    """The state around the running code. A recompute begins with an empty one. See Rule 3.

    Attributes:
        recomputing: How many nested recomputes run.
        is_partial: Whether the innermost of them leaves saves to a later one, which needs the same inputs.
        calls: The calls in their first run, outermost first; in a recompute, only calls that were made in it.
        scopes: The open scopes, innermost last. Kept by `runs`.
        carried: Values in transit in the running recompute, by carrier and key; None outside of recomputes.
        selecting: The watcher of the running operators, for a policy.
        inner: The selections that inner regions of a recompute take over, see NOTE [ Selective recompute ]; None for
            nothing.
        plain: Whether calls that would become regions are plain calls. Kept by `plainly`.
        frozen: The values that the rerunning call froze in its forward, by name.
        deriving: What the running recompute of a derivative passes on to its backwards; None outside of one.
        moved: The generators that kept draws have moved in the running recompute, with their earlier states.
        is_shared: Whether backwards that are called now see it. See NOTE [ In which thread a backward runs ].
    """

    __slots__ = (
        "calls", "carried", "deriving", "frozen", "inner", "is_partial", "is_shared", "moved", "plain", "recomputing",
        "scopes", "selecting",
    )  # fmt: skip

    def __init__(self, recomputing: int = 0, *, is_partial: bool = False) -> None:
        self.recomputing = recomputing
        self.is_partial = is_partial
        self.calls: list[Call] = []
        self.scopes: list[object] = []
        self.carried: dict[tuple[object, object], Carried] | None = {} if recomputing else None
        self.selecting: Collecting | Replaying | None = None
        self.inner: Iterator[ReferenceType[Selection]] | None = None
        self.plain = False
        self.frozen: Mapping[object, Iterator[Frozen]] = _NOTHING_FROZEN
        self.deriving: Deriving | None = None
        self.moved: dict[torch.Generator | torch.device, Tensor] | None = None
        self.is_shared = False

    def share(self) -> bool:
        """Let backwards that are called from now on see it; return whether they did not see it before."""
        if self.is_shared:
            return False
        stash_in_tls(_KEY, self)
        self.is_shared = True
        return True

    def unshare(self) -> None:
        """Hide it from backwards that are called from now on."""
        remove_from_tls(_KEY)
        self.is_shared = False


_KEY = "torchremat.now"
_NOTHING_FROZEN: Mapping[object, Iterator[Frozen]] = {}


class _NowOfAutograd:
    """The state in a thread of autograd, which has none of its own under this name.

    A `__getattr__` would do the same, and make each access to the state of any thread take twice as long.
    """

    def __get__(self, thread: Thread, _: object) -> Now:
        return thread.there()


class Thread(threading.local):
    """One thread.

    Attributes:
        now: The state around the running code. See NOTE [ In which thread a backward runs ].
        on_carried: Told of each value that is put into a carrier, and when it is taken out.
        around_loop: Returns a context that each loop runs its steps in.
    """

    now = _NowOfAutograd()

    def __init__(self) -> None:
        self.on_carried: Callable[[object], None] | None = None
        self.around_loop: Callable[[], AbstractContextManager[None]] | None = None
        self._own = Now()
        if is_pythons_thread():
            self.__dict__["now"] = self._own

    def there(self) -> Now:
        """Return the state in a thread of autograd."""
        there = get_from_tls(_KEY) if is_in_tls(_KEY) else None
        if there is not None:
            return cast("Now", there)
        if self._own.is_shared:  # by a backward that waits for this one
            self._own = Now()
        return self._own

    def begin(self, now: Now) -> Now:
        """Replace the state; return the earlier one, for `end`."""
        had, own = self.now, self.__dict__
        if "now" in own:
            own["now"] = now
        stash_in_tls(_KEY, now)
        now.is_shared = True
        return had

    def end(self, had: Now) -> None:
        """Restore the state from before `begin`."""
        self.now.is_shared = False
        own = self.__dict__
        if "now" in own:
            own["now"] = had
        if had.is_shared:
            stash_in_tls(_KEY, had)
        else:
            remove_from_tls(_KEY)


thread = Thread()


def makes_regions() -> bool:
    """Return whether calls become regions now: with grad mode on, not inside `plainly`, not under `torch.jit.trace`."""
    return torch.is_grad_enabled() and not thread.now.plain and not is_traced()


@contextmanager
def plainly() -> Generator[None]:
    """Let calls that would become regions in the block be plain calls; autograd keeps their saved tensors.

    For a forward whose backward follows at once. Recomputes are not affected, and compiled code keeps its regions.
    """
    now = thread.now
    had, now.plain = now.plain, True
    shared = now.share()
    try:
        yield
    finally:
        now.plain = had
        if shared:
            now.unshare()
