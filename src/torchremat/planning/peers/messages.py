"""Messages that processes leave for each other in the store by which torch.distributed has brought them together.

A store is no collective: it takes any set of processes, in any order, while others of them are inside of a collective
of a step; and it tells who has not come. Small things go through it: numbers, profiles, plans.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable, Mapping
from typing import cast

from torchremat._compat.collectives import store_of_all
from torchremat.errors import StepError, first_of

_PREFIX = "torchremat"
_PIECE_BYTES = 4 << 20  # of a message: a TCPStore takes 8 MiB at once
# Between two looks. All processes ask one store, and most answers are there at once.
_SHORTEST_S, _LONGEST_S = 2e-4, 0.1


class Messages:
    """The messages of this process, and those of the others.

    Attributes:
        patience_s: Seconds until a process that has left no message is given up: as long as torch itself waits, the
            timeout that `init_process_group` was given.
    """

    def __init__(self) -> None:
        self._store = store_of_all()
        self.patience_s = self._store.timeout.total_seconds()

    def put(self, key: str, value: object) -> None:
        """Leave a message; it can be pickled."""
        whole = pickle.dumps(value)
        pieces = [whole[at : at + _PIECE_BYTES] for at in range(0, len(whole), _PIECE_BYTES)]
        for number, piece in enumerate(pieces[1:], 1):
            self._store.set(f"{_PREFIX}/{key}/{number}", piece)
        self._store.set(f"{_PREFIX}/{key}/0", len(pieces).to_bytes(4, "big") + pieces[0])

    def drop(self, key: str) -> None:
        """Take a message of this process back, if there is one and the store can."""
        try:
            for number in range(self._pieces(key)):
                self._store.delete_key(f"{_PREFIX}/{key}/{number}")
        except (NotImplementedError, RuntimeError):
            return  # it stays, and nobody asks for it

    def get(self, keys: Mapping[int, str], *, left: Mapping[int, str], doing: str) -> dict[int, object]:
        """Return the message of each of some processes, once all are there.

        Args:
            keys: The key of each, by rank.
            left: The keys at which a process says that it does not come any more, and why, likewise.
            doing: What the processes do together, for a message.

        Raises:
            StepError: One of them has left, or does not come; or the store is gone, with the process that had it.
        """
        try:
            self._wait(keys, left, doing)
            return {rank: self._read(key) for rank, key in keys.items()}
        except RuntimeError as error:
            raise StepError(
                f"{doing}: the store of torch.distributed does not answer ({error}). The process that has it, mostly "
                "process 0, has probably ended: look for its error."
            ) from error

    def _wait(self, keys: Mapping[int, str], left: Mapping[int, str], doing: str) -> None:
        ends_s, pause_s = time.monotonic() + self.patience_s, _SHORTEST_S
        waits = dict(keys)
        while waits := {rank: key for rank, key in waits.items() if not self._has(key)}:
            for rank in waits:
                if rank in left and self._has(left[rank]):
                    raise StepError(f"{doing}: process {rank} has left it. {self._read(left[rank])}")
            if time.monotonic() > ends_s:
                raise StepError(
                    f"{doing}: {_named(waits)} did not come within {self.patience_s:g} s, the timeout of "
                    "`init_process_group`. Processes that communicate in a step plan, fit, verify and apply together: "
                    "call it in each of them, not in one alone; and look there for an error."
                )
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _LONGEST_S)

    def _has(self, key: str) -> bool:
        return self._store.check([f"{_PREFIX}/{key}/0"])

    def _pieces(self, key: str) -> int:
        return int.from_bytes(self._store.get(f"{_PREFIX}/{key}/0")[:4], "big") if self._has(key) else 0

    def _read(self, key: str) -> object:
        first = self._store.get(f"{_PREFIX}/{key}/0")
        others = (self._store.get(f"{_PREFIX}/{key}/{number}") for number in range(1, int.from_bytes(first[:4], "big")))
        return cast("object", pickle.loads(b"".join((first[4:], *others))))


def _named(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"process{'es' if len(found) > 1 else ''} {first_of([*map(str, found)], 8)}"
