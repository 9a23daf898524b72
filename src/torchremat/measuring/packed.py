"""What is behind the objects that autograd holds in the place of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from torchremat.regions.region import Region
from torchremat.regions.selective import cache as selection
from torchremat.stores.catalog import Apart
from torchremat.stores.kept import Kept
from torchremat.stores.narrowing import Narrowable, Surrogate
from torchremat.stores.stored import Stored
from torchremat.tensors.metadata import Metadata


@dataclass(frozen=True, slots=True)
class InStore:
    """A saved tensor, or an image of it, that a store has.

    Attributes:
        claim: What the store has it for; saved tensors that share it are stored once.
        stored_bytes: What the store holds for that.
        metadata: Of the tensor.
    """

    claim: object
    stored_bytes: int
    metadata: Metadata


def behind(packed: object) -> Iterator[Tensor | InStore]:
    """Yield the tensors that a packed object keeps in memory, and what it has in a store; nothing is loaded.

    Objects of others are opened if they are tuples, lists or dicts; what else they may be keeps nothing that is known.
    """
    match packed:
        case Tensor():
            yield packed
        case Stored():
            record = packed.record
            if record.stored_bytes:
                metadata = (packed.size, packed.dtype, record.device, packed.stride)
                yield InStore(record, record.stored_bytes, metadata)
            yield from record.kept
        case Kept():
            yield packed.tensor
        case Apart():
            for one in packed.parts:
                yield from behind(one)
        case Narrowable():
            yield from behind(packed.stored)
        case Surrogate():
            place = packed.geometry
            size = 0 if packed.bits is None else packed.bits.stored_bytes
            yield InStore(packed, size, (place.shape, place.dtype, place.device, place.strides))
        case selection.KeptValue():
            yield packed.tensor
        case selection.StoredOutput():
            yield from behind(packed.packed)
        case tuple() | list():
            for one in cast("list[object]", packed):
                yield from behind(one)
        case dict():
            for one in cast("dict[object, object]", packed).values():
                yield from behind(one)
        case _:
            return


def kept_by(region: Region) -> Iterator[Tensor | InStore]:
    """Yield what a region keeps of its operators' results by a policy."""
    for call in region.made:
        if call.selection is not None:
            for kept in call.selection.kept.values():
                yield from behind(kept.values)
