"""What tests note while something runs, recomputes included."""

from collections import Counter

from torchremat.extend import only_watches


@only_watches
class Log(list):
    """A list that no recompute takes for state of the forward: what is noted in a recompute stays noted."""


@only_watches
class Hidden(dict):
    """Values that the code of a region reads and no recompute restores: a state that nobody sees."""


@only_watches
class Tally(Counter):
    """Counters of the same kind, by name."""


class Count:
    """A counter of the same kind."""

    def __init__(self):
        self._log = Log()

    def up(self):
        """Count one more."""
        self._log.append(None)

    @property
    def value(self):
        return len(self._log)
