"""The bytes that a simulated step holds, counted by storage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class LiveBytes:
    """The storages that are held, and bytes that belong to no boundary storage.

    Attributes:
        bytes: Of each storage.
        held: By storage, how often it is held.
        held_bytes: Their bytes, each storage once.
        inside: Bytes that kept units saved inside, and states that regions keep.
        alive: The storages in addition to the held ones, at the last program point asked for.
    """

    def __init__(self, storage_bytes: dict[int, int]) -> None:
        self.bytes = storage_bytes
        self.held: Counter[int] = Counter()
        self.held_bytes = 0
        self.inside = 0
        self.alive: Iterable[int] = ()

    def hold(self, storages: Iterable[int]) -> None:
        """Begin to hold storages, each once more."""
        for storage in storages:
            self.held[storage] += 1
            if self.held[storage] == 1:
                self.held_bytes += self.bytes[storage]

    def release(self, storages: Iterable[int]) -> None:
        """Undo `hold`."""
        for storage in storages:
            self.held[storage] -= 1
            if not self.held[storage]:
                del self.held[storage]
                self.held_bytes -= self.bytes[storage]

    def total(self, alive: Iterable[int] = ()) -> int:
        """Bytes held, plus those of `alive`."""
        self.alive = alive
        total = self.inside + self.held_bytes
        for storage in alive:
            if storage not in self.held:
                total += self.bytes[storage]
        return total
