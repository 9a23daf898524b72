"""Bytes live in addition to the values of a joint list, where more is known of one split than the list says.

A compiler makes copies to other layouts, keeps a parameter's copy until the backward has read it, and never
materializes fused values. All of that changes little when a little more or less is saved. So the difference between the
known bytes and the list's, operator by operator, makes the list exact for this split and better for splits near it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torchremat.schedules.joint import NOTHING_BESIDE, Beside, Joint, Split, live


def beside_values(joint: Joint, found: Split, forward: Mapping[str, int], backward: Mapping[str, int]) -> Beside:
    """Return the bytes live in addition to the values of a list.

    Args:
        joint: The list; its own `beside` does not count.
        found: A split of it.
        forward: By the names of operators, the bytes live while they run in the forward of this split. An operator
            without an entry takes the entry of the one before it.
        backward: The same for its backward.
    """
    first, second = live(replace(joint, beside=NOTHING_BESIDE), found.saved, found.forward, found.backward)
    late = dict(_differences(joint, found.backward, backward, second))
    again = {index: size for index, size in late.items() if index not in joint.of_backward}
    in_place = {index: size for index, size in late.items() if index in joint.of_backward}
    return Beside(first={**dict(_differences(joint, found.forward, forward, first)), **in_place}, again=again)


def _differences(
    joint: Joint, indices: Sequence[int], known: Mapping[str, int], said: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, int]]:
    """Yield how far known bytes exceed the list's, for each operator, or else for the one before it."""
    more = {name: known[name] - size for size, name in said if name in known}
    last = 0
    for index in indices:
        last = more.get(joint.operators[index].name, last)
        yield index, last
