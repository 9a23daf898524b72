"""Tensors kept in place: autograd's own way, with its version check."""

from __future__ import annotations

from torch import Tensor

from torchremat.stores.held import InCatalog
from torchremat.tensors.copies import apart
from torchremat.tensors.metadata import Metadata, metadata_of
from torchremat.tensors.versioned import Versioned


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
