"""The object that autograd holds in place of a tensor that a store has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from torchremat._compat.autograd import negated
from torchremat.stores.geometry import has_gaps, span_of
from torchremat.stores.held import InCatalog
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner

if TYPE_CHECKING:
    from torchremat.stores.records import Record
    from torchremat.stores.shared import Shared


class Stored(InCatalog):
    """A saved tensor: its record, and its place in the storage. Dropping it is the only way to free it.

    Attributes:
        record: The record of its storage.
        size: Its shape.
        stride: Its strides in elements.
        offset: The element of the storage at which it begins.
        dtype: Its dtype.
        is_conjugated: Whether its values are the conjugates of those in memory.
        is_negated: Whether its values are the negatives of those in memory.
        start: Its first byte in the storage.
        stop: The byte after its last.
        has_gaps: Whether it skips bytes in between.
        place: Its place in the order in which a backward is likely to ask; negative before that is known.
    """

    __slots__ = (
        "__weakref__",
        "_shared",
        "dtype",
        "has_gaps",
        "is_conjugated",
        "is_negated",
        "offset",
        "place",
        "record",
        "size",
        "start",
        "stop",
        "stride",
    )

    def __init__(self, tensor: Tensor, shared: Shared) -> None:
        self.record: Record
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.offset = int(tensor.storage_offset())
        self.dtype = tensor.dtype
        self.is_conjugated = tensor.is_conj()
        self.is_negated = tensor.is_neg()
        if tensor.is_contiguous():
            itemsize = tensor.itemsize
            self.start = self.offset * itemsize
            self.stop = self.start + tensor.numel() * itemsize
            self.has_gaps = False
        else:
            self.start, self.stop = span_of(self)
            self.has_gaps = has_gaps(self)
        self.place = -1
        self._shared = shared

    def plain(self, tensor: Tensor) -> Tensor:
        """Return an alias of the tensor with the values as they are in memory, without its graph."""
        alias = tensor.detach()
        if self.is_conjugated:
            alias = alias.conj()
        return negated(alias) if self.is_negated else alias

    def get(self) -> Tensor:
        """Return the tensor: its values, strides and alignment, without graph.

        Raises:
            StoreError: The tensor cannot be brought back.
            MutationError: The tensor was kept in place, and has been written in place since.
        """
        self._shared.schedule.asked(self)
        tensor = self.record.get(self)
        if self.is_conjugated:
            tensor = tensor.conj()
        return negated(tensor) if self.is_negated else tensor

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self.size, self.dtype, self.record.device, self.stride

    @property
    def owners(self) -> Iterable[Owner]:
        """Its record, which holds loaded buffers as long as other saved tensors need them."""
        return (self.record,)

    def let_go(self) -> None:
        """Release its record."""
        del self.record

    def prefetch(self) -> int:
        """Let the store begin to bring it back; return how many bytes that will be, 0 if nothing needs to be done."""
        return self.record.prefetch(self)
