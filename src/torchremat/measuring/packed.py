"""The tensors and stored bytes behind the packed objects that autograd holds for saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from torchremat.regions.recording import Recording
from torchremat.regions.selective import cache as selection
from torchremat.stores.catalog import Apart
from torchremat.stores.in_catalog import Kept
from torchremat.stores.narrowing import Narrowable, Surrogate
from torchremat.stores.stored import Stored
from torchremat.tensors.metadata import Metadata


@dataclass(frozen=True, slots=True)
class InStore:
    """A saved tensor, or its surrogate, in a store.

    Attributes:
        claim: The claim that the store holds it for; saved tensors that share the claim are stored once.
        stored_bytes: The bytes that the store holds for that claim.
        metadata: Of the tensor.
    """

    claim: object
    stored_bytes: int
    metadata: Metadata


def behind(packed: object) -> Iterator[Tensor | InStore]:
    """Yield the tensors that a packed object keeps in memory or in a store; nothing is loaded.

    Foreign objects are opened if they are tuples, lists or dicts; any others count as keeping nothing.
    """
    match packed:
        case Tensor():
            yield packed
        case Stored():
            record = packed.record
            if record.stored_bytes:
                yield InStore(record, record.stored_bytes, packed.metadata)
            yield from record.kept
        case Kept():
            yield packed.tensor
        case Apart():
            for one in packed.parts:
                yield from behind(one)
        case Narrowable():
            yield from behind(packed.stored)
        case Surrogate():
            size = 0 if packed.bits is None else packed.bits.stored_bytes
            yield InStore(packed, size, packed.metadata)
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


def kept_by(recording: Recording) -> Iterator[Tensor | InStore]:
    """Yield the operator results that a region keeps by a policy."""
    for call in recording.calls:
        if call.selection is not None:
            for kept in call.selection.kept.values():
                yield from behind(kept.values)
