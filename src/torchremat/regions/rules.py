"""The rules by which a region holds, stops and releases, as pure functions on numbers.

The code that runs a region calls them with the saves, arguments and results that it sees, by their numbers. The
simulator of `planning` calls them with the units and storages that it knows beforehand. So predictions match the actual
run, and a rule is changed in one place.

    when                                           question                                 rule
    a call is about to run in a region             which of its arguments does it hold?     `external_inputs`
    a backward asks for a save                     from which save on is it recomputed?     `first_filled`
    a recompute begins                             at which save does it stop?              `last_needed`
    a call of a recompute has run                  which inputs and outputs are dropped?    `last_uses`, `ended`

Missing on purpose: the owners of recomputed tensors in slots (Rules 4, 7 and 8). Autograd drops these tensors with
their nodes, which the simulator models as the end of a unit's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K")


def external_inputs(inputs: Iterable[K], known: Container[K]) -> list[K]:
    """Return the inputs of a call that its region begins to hold, each once. See Rule 2.

    Args:
        inputs: Of the call.
        known: Inputs that the region holds already, and outputs of its earlier calls, which are recomputed.
    """
    return [one for one in dict.fromkeys(inputs) if one not in known]


def first_filled(asked: int, cuts: Iterable[int]) -> int:
    """Return the first save that the recompute for a request fills. See NOTE [ A recompute in parts ].

    Args:
        asked: The number of the save that a backward asks for.
        cuts: The saves that begin a part, without the first save of all.
    """
    return max((cut for cut in cuts if cut <= asked), default=0)


def last_needed(saves: int, waits: Callable[[int], bool]) -> int:
    """Return the save at which a recompute may stop: the last one that a backward waits for, -1 if none. See Rule 5.

    Args:
        saves: The number of saves in the region; saves are numbered in the order of its forward.
        waits: Whether a backward will ask for the save of this number, and the save must be recomputed.
    """
    for number in range(saves - 1, -1, -1):
        if waits(number):
            return number
    return -1


def last_uses(takes: Iterable[Iterable[K]], first: int = 0) -> dict[K, int]:
    """Return for each input of a region's calls the last call that takes it. See Rule 4.

    Args:
        takes: The inputs of each call.
        first: The number of the first call.
    """
    return {one: number for number, taken in enumerate(takes, first) for one in taken}


def ended(links: Iterable[K], last_use: Mapping[K, int], number: int) -> list[K]:
    """Return the links of a recompute that are dropped after a call: those that no later call takes. See Rule 4.

    Args:
        links: Inputs and outputs of the calls so far.
        last_use: The result of `last_uses`.
        number: The number of the call.
    """
    return [one for one in links if last_use.get(one, -1) <= number]
