"""The rules by which a region holds, stops and lets go, as pure functions on numbers.

What runs a region calls them with what it sees: saves, arguments and results by their numbers. The simulator of
`planning` calls them with what it knows beforehand: units and storages. So what is predicted is what will be done, and
a rule is changed in one place.

    when                                           who asks                                 rule
    a call is about to run in a region             which of its arguments does it hold?     `external_inputs`
    a recompute begins                             at which save does it stop?              `last_needed`
    a call of a recompute has run                  what that it took or made goes?          `last_uses`, `ended`

Missing on purpose: whose the recomputed tensors in slots are (Rules 4, 7 and 8). Autograd drops these with their nodes,
which the simulator knows as the end of a unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")


def external_inputs(inputs: Iterable[K], known: Container[K]) -> list[K]:
    """Return what of the inputs of a call its region begins to hold, each once. See Rule 2.

    Args:
        inputs: Of the call.
        known: What the region holds already, and what an earlier call of it has made, which is recomputed.
    """
    return [one for one in dict.fromkeys(inputs) if one not in known]


def last_needed(saves: int, waits: Callable[[int], bool]) -> int:
    """Return the save at which a recompute may stop: the last one that a backward waits for, -1 if none. See Rule 5.

    Args:
        saves: How many there are in the region, in the order of its forward.
        waits: Whether a backward will ask for the save of this number, and it has to be recomputed.
    """
    for number in range(saves - 1, -1, -1):
        if waits(number):
            return number
    return -1


def last_uses(takes: Iterable[Iterable[K]], first: int = 0) -> dict[K, int]:
    """Return for all that the calls of a region take the last call that takes it. See Rule 4.

    Args:
        takes: What each of the calls takes.
        first: The number of the first one.
    """
    return {one: number for number, taken in enumerate(takes, first) for one in taken}


def ended(links: Iterable[K], last_use: Mapping[K, int], number: int) -> list[K]:
    """Return which links of a recompute go when a call has run: what no later call takes. See Rule 4.

    Args:
        links: What calls were given and have made so far.
        last_use: As `last_uses` has it.
        number: Of the call.
    """
    return [one for one in links if last_use.get(one, -1) <= number]
