"""Trackers, in which skips wait between their stash and their pop.

Each thread has a current tracker, which the skippable modules use. Outside of a pipe it is a plain one. In a pipe, each
run of a microbatch on a stage, a cell, has its own tracker, so that nothing is left from one run to the next:

    cell(value, incoming) ──► output, outgoing        incoming: the skips that are popped here and come from elsewhere
                                                      outgoing: those that are stashed here and popped elsewhere

So skips enter and leave the cell's region as its inputs and outputs: the graph has an edge from the stage that stashes
to the one that pops, the stages between are not involved, and a recompute finds its skips among its inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from torchremat.errors import SkipError
from torchremat.pipeline.skip.layouts import Key, Namespace, SkipLayout
from torchremat.regions.carriers import Carrier, carried, has_left_reentrant, reentrant


class SkipTracker:
    """Keeps the skips of one microbatch until they are popped.

    In a region that holds only one end of a skip, a recompute neither puts anything here nor takes it: it pops the
    value that its forward has popped.

    Args:
        is_lasting: Whether the tracker existed before any running recompute.
    """

    def __init__(self, *, is_lasting: bool = False) -> None:
        self._carrier: Carrier[Key] = Carrier(is_lasting=is_lasting)

    def save(self, namespace: Namespace | None, name: str, value: object) -> None:
        """Keep a skip."""
        self._carrier.put((namespace, name), carried(value))

    def load(self, namespace: Namespace | None, name: str) -> object:
        """Return a skip and forget it.

        Raises:
            SkipError: It has not been stashed, or has been popped already.
        """
        try:
            return self._carrier.take((namespace, name), f"pop({name!r})")
        except KeyError:
            raise _not_stashed(namespace, name) from None


class CellTracker(SkipTracker):
    """Keeps the skips of one run of a microbatch on a stage.

    Args:
        layout: Source and target stage of each skip.
        stage: The stage.
        incoming: The skips that this stage pops and another stage has stashed.
    """

    def __init__(self, layout: SkipLayout, stage: int, incoming: Mapping[Key, object]) -> None:
        super().__init__()
        self._leaves = {key for key, (source, target) in layout.routes.items() if source == stage != target}
        for key, value in incoming.items():
            self._carrier.put(key, carried(value))

    @property
    def waiting(self) -> dict[Key, object]:
        """The skips that wait now: before the stage runs, the incoming ones."""
        return {key: one.value for key, one in self._carrier.left().items()}

    @property
    def outgoing(self) -> dict[Key, object]:
        """The skips that this stage has stashed so far and another stage pops.

        Raises:
            UnsupportedError: One was stashed in a reentrant region.
        """
        leaving = {key: one for key, one in self._carrier.left().items() if key in self._leaves}
        for (_, name), one in leaving.items():
            if has_left_reentrant(one):
                raise reentrant(f"stash({name!r})")
        return {key: one.value for key, one in leaving.items()}


def _not_stashed(namespace: Namespace | None, name: str) -> SkipError:
    where = "" if namespace is None else f" in {namespace}"
    return SkipError(
        f"{name!r} has not been stashed{where}, or it has been popped already. Let the module that stashes it run "
        "before the one that pops it, in the same thread and once for each pop."
    )


class _Current(threading.local):
    """The current tracker of a thread."""

    def __init__(self) -> None:
        self.tracker: SkipTracker = SkipTracker(is_lasting=True)


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """Return the tracker that skippable modules use in this thread."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Generator[None]:
    """Let a tracker be the current one in this thread."""
    had, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = had
