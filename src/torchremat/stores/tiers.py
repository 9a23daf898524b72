"""Several stores in order: the first with room takes a tensor."""

from __future__ import annotations

import threading

from torch import Tensor

from torchremat.errors import StoreError, UnsupportedError
from torchremat.stores.base import Remade, StoreStatistics, content_of, filled, land, statistics_of
from torchremat.tensors.handles import Handle, Store


class Tiers(Remade):
    """Several stores in order: the first that has room takes a tensor.

    Each has its own limit: `Tiers(Host("1GiB"), Disk(limit="100GiB"))`. A tensor for which none has room stays in
    place.

    Args:
        *stores: At least one, the fastest first. None may be strict, since a strict store raises where the next one
            should be asked.
        strict: Whether a tensor for which no store has room is an error; else it stays in place.

    Raises:
        UnsupportedError: No store was given, or one of them is strict or not a store.
    """

    def __init__(self, *stores: Store, strict: bool = False) -> None:
        if not stores:
            raise UnsupportedError("Tiers(): expected at least one store.")
        for store in stores:
            if not callable(getattr(store, "put", None)):
                raise UnsupportedError(f"Tiers(...): expected a store, got {store!r}.")
            if getattr(store, "strict", False):
                raise UnsupportedError(
                    f"Tiers(...): {store!r} is strict, so the stores after it would never be asked. Use `Tiers(..., "
                    "strict=True)` instead, which raises if none of them has room."
                )
        self.stores = stores
        self.strict = strict
        self._lock = threading.Lock()
        self._refused = 0

    @property
    def statistics(self) -> StoreStatistics:
        """The counts of all stores together so far; a single store's counts are its own `statistics`.

        `refused` counts the tensors for which no store had room. The stores need not peak at the same time, so the sum
        of their peaks is an upper bound. A store without statistics counts as zero.
        """
        all_of = [one for store in self.stores if (one := statistics_of(store)) is not None]
        limits = [one.limit_bytes for one in all_of]
        unlimited = len(limits) < len(self.stores) or None in limits
        return StoreStatistics(
            limit_bytes=None if unlimited else sum(limit for limit in limits if limit is not None),
            stored_bytes=sum(one.stored_bytes for one in all_of),
            peak_stored_bytes=sum(one.peak_stored_bytes for one in all_of),
            copied_out_bytes=sum(one.copied_out_bytes for one in all_of),
            copied_in_bytes=sum(one.copied_in_bytes for one in all_of),
            refused=self._refused,
            failed=sum(one.failed for one in all_of),
        )

    def put(self, tensor: Tensor) -> Handle | None:
        """Put a tensor into the first store that has room; None if none has.

        Raises:
            StoreError: No store has room, and `strict` is set.
        """
        for store in self.stores:
            handle = store.put(tensor)
            if handle is not None:
                return handle
        with self._lock:
            self._refused += 1
        if self.strict:
            raise StoreError(f"no room for {content_of(tensor)}: {', '.join(map(_filled, self.stores))}.")
        return None

    def land(self, *, all_of_it: bool) -> None:
        """Wait until the stores that copy from a device have released its memory; see `Host.land`."""
        for store in self.stores:
            land(store, all_of_it=all_of_it)

    def __repr__(self) -> str:
        return f"Tiers({', '.join(map(repr, self.stores))})"


def _filled(store: Store) -> str:
    statistics = statistics_of(store)
    return f"{store!r}" if statistics is None else f"{store!r} {filled(statistics)}"
