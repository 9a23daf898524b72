"""The objects that autograd holds for a catalog: several kinds, with one way to unpack them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from torchremat.errors import bug
from torchremat.tensors.metadata import Metadata
from torchremat.tensors.packed import Owner, Packed


class InCatalog(Packed):
    """The object that autograd holds in place of a tensor that was put into a catalog."""

    __slots__ = ()

    @abstractmethod
    def get(self) -> Tensor:
        """Return the tensor, without graph."""

    @abstractmethod
    def let_go(self) -> None:
        """Release everything that was put, since no further call asks for it."""

    @property
    def owners(self) -> Iterable[Owner]:
        """The owners that may keep tensors to the end of a backward on behalf of this object."""
        return ()

    def hand_out(self, *, last: bool) -> Tensor:
        """Return the tensor. See `Packed.hand_out`."""
        tensor = self.get()
        if last:
            self.let_go()
        return tensor

    def emptied(self) -> Emptied:
        """Return an object of the same metadata and nothing else."""
        return Emptied(self.metadata)


class Emptied(InCatalog):
    """Metadata without a tensor, for a compiled graph to remember."""

    __slots__ = ("_metadata",)

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self._metadata

    def get(self) -> Tensor:
        """Refuse: only a compiler has this object."""
        raise bug("a compiled graph has asked what it was traced with for a saved tensor")

    def let_go(self) -> None:
        """Do nothing: it holds nothing."""
