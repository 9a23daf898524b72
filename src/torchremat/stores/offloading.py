"""What autograd saves in a block of code, put into a store until backward asks for it."""

from __future__ import annotations

from contextlib import ContextDecorator
from typing import TYPE_CHECKING

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat._compat.graphs import outside_graphs
from torchremat.errors import UnsupportedError
from torchremat.stores.catalog import Catalog, unpack

if TYPE_CHECKING:
    from torchremat.saved.handles import Store


def offload(store: Store, *, min_bytes: int = 1024, window_bytes: int | None = None) -> Offload:
    """Return a context manager in which what autograd saves goes into a store. Usable as a decorator.

    Gradients are those of the plain run, bit for bit, unless the store is one that loses bits. Parameters, buffers and
    small tensors stay where they are. It may be entered several times, one inside of the other and in several threads;
    of two that are nested the inner one takes what is saved. Regions inside of it put their inputs into the store, and
    what they save is recomputed.

    Args:
        store: Where the bytes go.
        min_bytes: Tensors of storages with fewer bytes stay where they are.
        window_bytes: How many bytes may be brought back ahead of the backward at once; None for twice the largest
            tensor, 0 for none.

    Raises:
        UnsupportedError: On entering, inside of a region.
    """
    return Offload(Catalog(store, min_bytes=min_bytes, window_bytes=window_bytes))


class Offload(ContextDecorator):
    """What `offload` returns.

    Attributes:
        catalog: What was saved, where it is.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    @property
    def saved_bytes(self) -> int:
        """How many bytes autograd has saved so far, aliases each for itself."""
        return self.catalog.totals.saved_bytes

    @property
    def copied_out_bytes(self) -> int:
        """How many bytes the store has taken so far, each byte of a storage once."""
        return self.catalog.totals.copied_out_bytes

    @property
    def copied_in_bytes(self) -> int:
        """How many bytes were brought back so far."""
        return self.catalog.totals.copied_in_bytes

    @property
    def refused_bytes(self) -> int:
        """How many bytes the store had no room for; they stayed where they were."""
        return self.catalog.totals.refused_bytes

    @outside_graphs
    def __enter__(self) -> Offload:
        """Begin.

        Raises:
            UnsupportedError: The code runs in a region, which would have nothing left to recompute.
        """
        _refuse_regions()
        push_saved_tensor_hooks(self.catalog.put, unpack)
        return self

    @outside_graphs
    def __exit__(self, kind: object, *_: object) -> None:
        """End; what was saved stays in the store until its graph goes."""
        pop_saved_tensor_hooks()
        if kind is None:
            self.catalog.settle()

    def __repr__(self) -> str:
        return f"<offload to {self.catalog.store!r}: {self.copied_out_bytes} bytes out, {self.copied_in_bytes} back>"


def _refuse_regions() -> None:
    hooks = top_saved_tensor_hooks(True)
    module = "" if hooks is None else str(getattr(hooks[1], "__module__", ""))
    if module.startswith(_RECOMPUTING):
        raise UnsupportedError(
            "offload cannot be entered inside of a region: what it takes would no longer be recomputed. Put offload "
            "around the region, whose inputs then go to the store."
        )


# Those whose hooks recompute: our regions, and torch's.
_RECOMPUTING = ("torchremat.regions.", "torch.utils.checkpoint")
