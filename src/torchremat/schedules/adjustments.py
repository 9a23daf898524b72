"""What lies in memory beside the values of a joint list, where more is known of one split than the list says.

A compiler makes copies to other layouts, keeps the one of a parameter until the backward has read it, and never makes
what it fuses. All of that stays much the same when a little more or less is saved. So the difference of what is known
from what the list says, operator by operator, makes the list right for this split and better for others near it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchremat.schedules.joint import NOTHING_BESIDE, Beside, Joint, Split, live


def beside_values(joint: Joint, found: Split, forward: Mapping[str, int], backward: Mapping[str, int]) -> Beside:
    """Return what is there beside the values of a list.

    Args:
        joint: The list; what it says itself is there beside them does not count.
        found: A split of it.
        forward: By the names of operators, the bytes that are live while they run in the forward of this split. One
            that is not named is taken for the one before it.
        backward: The same of its backward.
    """
    first, second = live(replace(joint, beside=NOTHING_BESIDE), found.saved, found.forward, found.backward)
    late = dict(_differences(joint, found.backward, backward, second))
    again = {index: size for index, size in late.items() if index not in joint.of_backward}
    in_place = {index: size for index, size in late.items() if index in joint.of_backward}
    return Beside(first={**dict(_differences(joint, found.forward, forward, first)), **in_place}, again=again)


def _differences(
    joint: Joint, indices: Sequence[int], known: Mapping[str, int], said: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, int]]:
    """By how much what is known is more than what the list says, of each operator or else of the one before it."""
    more = {name: known[name] - size for size, name in said if name in known}
    last = 0
    for index in indices:
        last = more.get(joint.operators[index].name, last)
        yield index, last
