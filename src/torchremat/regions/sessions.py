"""The owner of recomputed tensors, and how long they stay.

By default each backward call is its own session: its recomputed tensors are dropped when the node that unpacked
them has run. An explicit session spans several backward calls, so that one recompute serves them all, and can start a
recompute ahead of the gradient (Rules 4, 8 and 9).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from typing import Protocol, cast
from weakref import WeakSet, ref

from torchremat._compat.autograd import (
    get_from_tls,
    is_in_tls,
    leads_elsewhere,
    remove_from_tls,
    retains_graph,
    stash_in_tls,
)
from torchremat.errors import UnsupportedError
from torchremat.regions.slots import Recomputable, waits

# NOTE [ How a session reaches the autograd threads ]
# Backward on a CUDA device runs in a thread of the engine, which sees neither thread-locals nor context variables of
# the caller, but does see objects stashed in torch's own thread-local state: the engine carries those over.
_KEY = "torchremat.session"

# Sessions that are open in any thread: a query to torch is too slow for a region, and mostly no session is open.
open_sessions: list[Session] = []


# NOTE [ What a weight pass needs ]
#
# A backward that is split runs first the nodes that lead to the stage's inputs (the input pass), and later, for each
# group of weights, the nodes that lead to those (weight passes):
#
#     output <- 4 mm <- 3 silu <- 2 mm <- 1 norm <- input        input pass: 4 3 2 1
#                |                 |        |                     weight passes: 4, 2, 1, never 3
#               weight           weight    weight
#
# So a node that runs in the input pass runs again if one of its edges is not followed there. The engine knows which
# edges it follows. One case escapes: a weight that is used twice, whose pass also runs the nodes between its two uses.
# Tensors dropped there are asked for again, and the region is recomputed once more; from then on nothing is dropped
# early.


class Watch(Protocol):
    """Observes a session's recomputes. Regions are numbered in the order of the forward, -1 if not made there."""

    def recomputing(self, number: int) -> None:
        """A region is about to be recomputed."""
        ...

    def recomputed(self, number: int, region: Recomputable, *, is_whole: bool) -> None:
        """The region has been recomputed: all of it is in memory, or a part. See NOTE [ A recompute in parts ]."""
        ...

    def dropped_too_early(self) -> None:
        """An input pass has dropped a tensor that a weight pass asks for."""
        ...


class Session:
    """The owner of recomputed tensors across several backward calls.

    `session()` makes one that serves a block of code and closes with it. Where such blocks would overlap, as the passes
    of several microbatches do in a pipeline, make one session for each, let it serve each piece of code by `active()`,
    and `close()` it after the last:

    >>> import torch
    >>> from torchremat import checkpoint
    >>> x = torch.ones(3, requires_grad=True)
    >>> sessions = [Session(passes=2) for _ in range(2)]
    >>> losses = [checkpoint(torch.exp, x).sum() for _ in sessions]
    >>> for one, loss in zip(sessions, losses):
    ...     with one.active():
    ...         loss.backward(retain_graph=True)
    >>> for one, loss in zip(sessions, losses):
    ...     with one.active():
    ...         loss.backward()  # recomputes nothing
    ...     one.close()

    Args:
        passes: How many backward calls run each node at most. A recomputed tensor is dropped when that many calls have
            unpacked it; without the number, and in nodes that fewer passes run, it stays until the session closes.
        unpacks_once: Whether a second backward through a node is an error instead of a recompute.
        serves_all: Whether no backward outside of the session follows, so that outputs kept by policies are dropped in
            the first recompute.
        watch: Is told of recomputes.

    Raises:
        UnsupportedError: `passes` is less than 1.
    """

    __slots__ = (
        "__weakref__", "_created", "_has_dropped", "_left", "_recomputed", "drops", "passes", "serves_all",
        "unpacks_once", "watch",
    )  # fmt: skip

    def __init__(
        self,
        passes: int | None = None,
        *,
        unpacks_once: bool = False,
        serves_all: bool = False,
        watch: Watch | None = None,
    ) -> None:
        if passes is not None and (type(passes) is not int or passes < 1):
            raise UnsupportedError(
                f"passes={passes!r}: expected an int of at least 1, or None to keep all until the session closes."
            )
        self.passes = passes
        self.unpacks_once = unpacks_once
        self.serves_all = serves_all
        self.watch = watch
        self.drops = False  # whether an input pass runs now
        self._has_dropped = False
        self._created: list[ref[Recomputable]] = []
        self._left = 0  # the regions before this one have not been recomputed ahead
        self._recomputed: WeakSet[Recomputable] = WeakSet()

    @property
    def recomputes_once(self) -> bool:
        """Whether a recompute now serves all later backward calls."""
        return self.serves_all or self.drops or self.passes == 1

    def keeps(self) -> bool:
        """Return whether tensors that are recomputed for the running backward stay for another one."""
        return self.passes != 1 and retains_graph()

    def created(self, region: Recomputable) -> None:
        """Remember a region that was made inside the session."""
        if not self.unpacks_once:  # such a session outlives its block, and is never asked to recompute ahead
            self._created.append(ref(region))
            self._left = len(self._created)

    def refuses(self, region: Recomputable, unpacked: bool) -> bool:
        """Return whether a tensor of a region is asked for a second time although that is an error."""
        return self.unpacks_once and unpacked and region in self._recomputed

    def recomputing(self, region: Recomputable) -> None:
        """Tell the watch that a region is about to be recomputed for the session."""
        if self.watch is not None:
            self.watch.recomputing(self._number(region))

    def owns(self, region: Recomputable, *, is_whole: bool) -> None:
        """Remember a region whose recomputed tensors the session holds, all of them or those of a part."""
        self._recomputed.add(region)
        if self.watch is not None:
            self.watch.recomputed(self._number(region), region, is_whole=is_whole)

    def _number(self, region: Recomputable) -> int:
        return next((number for number, one in enumerate(self._created) if one() is region), -1)

    def recompute(self, count: int = 1) -> int:
        """Recompute the last `count` waiting regions now, before any gradient arrives; return how many were recomputed.

        Regions are taken in the order in which backward will need them: the latest first. Only regions made inside the
        session are known to it.

        Raises:
            UnsupportedError: Another session is active in this thread.
        """
        done = 0
        # The inputs of a nested region are recomputed by the outer regions, and for this session too.
        with nullcontext() if active_session() is self else self.active():
            while done < count and self.next_number() is not None:
                self._left -= 1
                region = self._created[self._left]()
                if region is not None and region.recompute_for(self):
                    done += 1
        return done

    def next_number(self) -> int | None:
        """Return which region, counted in the order of the forward, `recompute` takes next; None if none is left."""
        while self._left:
            region = self._created[self._left - 1]()
            if region is not None and region not in self._recomputed and any(waits(one()) for one in region.slots):
                return self._left - 1
            self._left -= 1
        return None

    @contextmanager
    def input_pass(self) -> Generator[None]:
        """Treat the backward calls of the block as input passes of a stage, which weight passes follow.

        A recomputed tensor is dropped here, at its last use, if the node that unpacks it leads to weights only through
        nodes that run here. See NOTE [ What a weight pass needs ].
        """
        self.drops = True
        try:
            yield
        finally:
            self.drops = False

    def is_done_with(self) -> bool:
        """Return whether no later backward call is known to run the node that runs now."""
        done = self.drops and not leads_elsewhere()
        self._has_dropped = self._has_dropped or done
        return done

    def dropped_too_early(self) -> bool:
        """Return whether a tensor that is asked for again may have been dropped in an input pass; tell the watch."""
        if not self._has_dropped:
            return False
        self._has_dropped = False
        if self.watch is not None:
            self.watch.dropped_too_early()
        return True

    @contextmanager
    def active(self) -> Generator[Session]:
        """Let the session serve the code in the block: its regions belong to it, its backward calls share recomputes.

        Raises:
            UnsupportedError: A session is active in this thread already.
        """
        if active_session() is not None:
            raise UnsupportedError("a session is open in this thread already; sessions do not nest. Close it first.")
        open_sessions.append(self)
        stash_in_tls(_KEY, self)  # See NOTE [ How a session reaches the autograd threads ]
        try:
            yield self
        finally:
            remove_from_tls(_KEY)
            open_sessions.remove(self)

    def close(self) -> None:
        """Drop every recomputed tensor."""
        for region in list(self._recomputed):
            region.forget(self)
        self._recomputed.clear()
        self._created.clear()
        self._left = 0


def active_session() -> Session | None:
    """Return the session that the running thread, or the backward it runs for, is in."""
    return cast("Session | None", get_from_tls(_KEY)) if open_sessions and is_in_tls(_KEY) else None


@contextmanager
def session(passes: int | None = None) -> Generator[Session]:
    """Let one recompute of each region serve every backward call inside the block, overlapping ones too.

    Args:
        passes: How many backward calls run each node at most. A recomputed tensor is dropped when that many calls have
            unpacked it; without the number, and in nodes that fewer passes run, it stays until the block ends.

    Raises:
        UnsupportedError: Another session is open in this thread, or `passes` is less than 1.
    """
    with closing(Session(passes)) as own, own.active():
        yield own


# Of a session that unpacks once; the words are torch's.
UNPACKED_ONCE = (
    "torch.utils.checkpoint: Unpack is being triggered for a tensor that was already unpacked once. Performing two "
    "backward calls that overlap (i.e. require the same saved activation in order to compute gradients) is not allowed "
    "while under the torch.utils.checkpoint.GraphExecGroup context. torchremat.session() allows it."
)
