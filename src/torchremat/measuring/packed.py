"""What is behind the objects that autograd holds in the place of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor

from torchremat.regions import selection
from torchremat.regions.region import Region
from torchremat.stores.catalog import Apart
from torchremat.stores.kept import Kept
from torchremat.stores.stored import Stored


def behind(packed: object) -> Iterator[Tensor | Stored]:
    """Yield the tensors that a packed object keeps in memory, and what it has in a store; nothing is loaded.

    Objects of others are opened if they are tuples, lists or dicts; what else they may be keeps nothing that is known.
    """
    match packed:
        case Tensor():
            yield packed
        case Stored():
            if packed.record.stored_bytes:
                yield packed
            yield from packed.record.kept
        case Kept():
            yield packed.tensor
        case Apart():
            for one in packed.parts:
                yield from behind(one)
        case selection.Value():
            yield packed.tensor
        case selection.Stored():
            yield from behind(packed.packed)
        case tuple() | list():
            for one in cast("list[object]", packed):
                yield from behind(one)
        case dict():
            for one in cast("dict[object, object]", packed).values():
                yield from behind(one)
        case _:
            return


def kept_by(region: Region) -> Iterator[Tensor | Stored]:
    """Yield what a region keeps of its operators' results by a policy."""
    for call in region.made:
        if call.selection is not None:
            for kept in call.selection.kept.values():
                yield from behind(kept.values)
