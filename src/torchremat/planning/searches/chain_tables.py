"""Tables of the optimal persistent schedules of a chain, for all limits that a search asks for."""

from __future__ import annotations

from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.schedules.chain import Chain
from torchremat.schedules.persistent import Persistent

# The share of the remaining time for a table.
_TABLE_SHARE = 0.5

# The highest limit of a table for a chain with loops, over that of the next finer one.
_FINER = 2


class ChainTables:
    """The optimal persistent schedules of a chain: in one table, but of a chain with loops in several.

    A long loop fits into a small part of what it needs plainly, in which the slots of a table for all limits are too
    coarse: it has tables for limits of a half each of the one before.

    Args:
        chain: The chain.
        highest_bytes: The highest limit.
        search_budget: The time limit.
    """

    def __init__(self, chain: Chain, highest_bytes: int, search_budget: SearchBudget) -> None:
        self._chain = chain
        self._highest_bytes = highest_bytes
        self._search_budget = search_budget
        self._tables: dict[int, Persistent] = {}  # by the highest limit of each
        # The most bytes that one stage needs in its backward.
        self._stage_bytes = max(stage.backward_base_bytes + stage.options[0].saved_bytes for stage in chain.stages)

    @property
    def whole(self) -> Persistent:
        """The table for all limits."""
        return self.within(self._highest_bytes)

    @property
    def lowest(self) -> Persistent:
        """The table of the lowest limits for which it has trees."""
        limit = max(1, self._stage_bytes)  # it grows by a factor
        found = self.within(limit)
        while found.lowest_slots > found.most_slots and limit < self._highest_bytes:
            limit *= _FINER
            found = self.within(limit)
        return found

    def within(self, limit_bytes: int) -> Persistent:
        """Return the table for limits up to one."""
        most_bytes, least_bytes = self._highest_bytes, max(limit_bytes, self._stage_bytes)
        while self._chain.borders and most_bytes // _FINER > least_bytes:
            most_bytes //= _FINER
        if most_bytes not in self._tables:
            self._search_budget.tell("tables")
            most_s = _TABLE_SHARE * self._search_budget.left_s
            found = Persistent(self._chain, most_bytes, most_seconds=most_s)
            self._search_budget.ran_out = self._search_budget.ran_out or not found.is_whole
            self._tables[most_bytes] = found
        return self._tables[most_bytes]
