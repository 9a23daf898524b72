"""Values that reach code in a region other than by its arguments: put at one place of a forward, taken at another.

A recompute runs only the places that are inside its region.

    put and taken in the region      a recompute puts its own, and takes it
    taken in the region alone        the region holds the taken value, like an input; a recompute gets that
    put in the region alone          the value that a recompute puts is dropped when the recompute ends

Gradients need no code: the graph of the forward has the edge from one place to the other.

Missing on purpose: an inner region holds such a value itself; it does not get it from the region around it, which could
recompute it (Rule 2).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from torchremat.errors import UnsupportedError
from torchremat.regions.calls import Call, Frozen
from torchremat.regions.reentrant import is_in_reentrant_forward
from torchremat.regions.threads import Carried, thread

K = TypeVar("K", bound=Hashable)


def carried(value: object) -> Carried:
    """Return a value as put here."""
    return Carried(value, tuple(thread.now.calls), is_in_reentrant_forward())


class Carrier(Generic[K]):
    """A container where values are put and taken, by key; each is taken once.

    A recompute does not touch values from before it, unless the carrier was made in that recompute.

    Args:
        is_lasting: Whether to behave as if made outside of any recompute.
    """

    def __init__(self, *, is_lasting: bool = False) -> None:
        self._made_in = None if is_lasting else thread.now.carried
        self._values: dict[K, Carried] = {}

    def put(self, key: K, one: Carried) -> None:
        """Put a value; it replaces one that waits under this key."""
        _tell(one.value)
        if self._is_apart():
            self._apart()[self, key] = one
        else:
            self._values[key] = one

    def take(self, key: K, words: str) -> object:
        """Return the value of a key and remove it.

        Args:
            key: The key.
            words: The words for the taker, for messages.

        Raises:
            KeyError: No value waits under this key.
            MutationError: In a recompute, when it was written in place since the forward took it.
            UnsupportedError: The value enters or leaves a reentrant region.
        """
        if not self._is_apart():
            one = self._values.pop(key)
        elif (self, key) in self._apart():
            one = self._apart().pop((self, key))
        else:
            kept = next(thread.now.frozen.get((Carrier, key), iter(())), None)
            if kept is None:
                raise KeyError(key)
            one = Carried(kept.thaw(words), (), is_reentrant=False)
        self._hold(key, one, words)
        _tell(one.value)
        return one.value

    def left(self) -> dict[K, Carried]:
        """Return the values that have been put and not taken."""
        return dict(self._values)

    def _is_apart(self) -> bool:
        return thread.now.carried is not None and thread.now.carried is not self._made_in

    def _apart(self) -> dict[tuple[object, object], Carried]:
        assert thread.now.carried is not None
        return thread.now.carried

    def _hold(self, key: K, one: Carried, words: str) -> None:
        """Let the calls in their first run here hold a value that their recomputes would not put again."""
        calls = [call for call in thread.now.calls if not any(_recomputes(call, other) for other in one.calls)]
        if has_left_reentrant(one) or (calls and is_in_reentrant_forward()):
            raise reentrant(words)
        if calls:
            kept = Frozen(one.value)
            for call in calls:
                call.freeze((Carrier, key), kept)


def _tell(value: object) -> None:
    if thread.on_carried is not None:
        thread.on_carried(value)


def _recomputes(call: Call, other: Call) -> bool:
    """Return whether one call never reruns without a rerun of the other before it."""
    return call is other or (call.region is not None and call.region is other.region)


def has_left_reentrant(one: Carried) -> bool:
    """Return whether a value was put in a reentrant region that has ended."""
    return one.is_reentrant and any(all(call is not other for other in thread.now.calls) for call in one.calls)


def reentrant(words: str) -> UnsupportedError:
    """Return the error for a value that enters or leaves a reentrant region; `words` say where."""
    return UnsupportedError(
        f"{words}: its value enters or leaves a reentrant region, where no gradient could reach it. Pass "
        "use_reentrant=False."
    )
