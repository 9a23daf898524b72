"""The objects that autograd holds for a catalog, and the simplest of them: a tensor kept in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from torch import Tensor

from torchremat.errors import MutationError, bug
from torchremat.tensors.copies import apart
from torchremat.tensors.metadata import Metadata, metadata_of
from torchremat.tensors.packed import Owner, Packed
from torchremat.tensors.versioned import Versioned


class InCatalog(Packed):
    """The object that autograd holds in place of a tensor that was put into a catalog."""

    __slots__ = ()

    @abstractmethod
    def get(self) -> Tensor:
        """Return the tensor, without graph."""

    def let_go(self) -> None:
        """Release everything that was put, since no further call asks for it; here nothing was."""

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
    """Metadata without a tensor: for a compiled graph to remember, or of a tensor whose values were lost.

    Args:
        metadata: The metadata of the tensor.
        lost: Why the values were lost; empty for what a compiled graph remembers.
    """

    __slots__ = ("_lost", "_metadata")

    def __init__(self, metadata: Metadata, lost: str = "") -> None:
        self._metadata = metadata
        self._lost = lost

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self._metadata

    def get(self) -> Tensor:
        """Refuse.

        Raises:
            MutationError: The tensor was written after it was saved, by the operation that saves it.
        """
        if self._lost:
            raise MutationError(self._lost)
        raise bug("a compiled graph has asked what it was traced with for a saved tensor")


class Kept(InCatalog):
    """A tensor that stays in place, at a version; a handle of no bytes.

    Autograd does not check versions of tensors that hooks pack, so this class does.

    Args:
        tensor: The tensor; an alias without its graph is held.
        watched: The tensor whose version counts the writes, if it is another one: the subclass that wraps this tensor.
        version: The version at which it was saved, if it may have been written since.
    """

    __slots__ = ("_alias", "_watched")

    def __init__(self, tensor: Tensor, watched: Tensor | None = None, version: int | None = None) -> None:
        self._alias = tensor.detach()
        self._watched = Versioned(self._alias if watched is None else watched.detach(), version)

    @property
    def stored_bytes(self) -> int:
        """How many bytes a store holds for it: none."""
        return 0

    @property
    def tensor(self) -> Tensor:
        """The tensor, written since or not."""
        return self._alias

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            MutationError: The tensor was written in place since.
        """
        if self._watched.is_written:
            raise self._watched.written(self._alias)
        return self._alias

    def before_write(self) -> None:
        """Keep a copy instead. See NOTE [ Who may write to what was put ]."""
        if not self._watched.is_written:
            self._alias = apart(self._alias)
            self._watched = Versioned(self._alias)

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return metadata_of(self._alias)

    def let_go(self) -> None:
        """Release the tensor."""
        del self._alias, self._watched

    def prefetch(self) -> None:
        """Do nothing: the tensor is in place."""
