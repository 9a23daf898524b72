"""The saved tensors of a block of code, put into a store until backward asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ContextDecorator
from functools import partial
from typing import Protocol, runtime_checkable

from torch import Tensor

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat._compat.dynamo import outside_graphs
from torchremat.ambient.hidden import hiding
from torchremat.errors import UnsupportedError
from torchremat.stores.base import land
from torchremat.stores.catalog import Catalog, unpack
from torchremat.stores.in_catalog import InCatalog
from torchremat.stores.narrowing import SlotWatch, narrows
from torchremat.tensors.handles import Store

# NOTE [ Inside of a region ]
# Only the innermost hooks are called. If only a store's hooks were called, a region around them would not know of the
# save, and would neither recompute it nor count it in a recompute. So the region's hook is called as well: it owns the
# slot, and the slot holds the stored object. Such a slot is not recomputed. Backward's slots are out of reach there, so
# nothing is narrowed.


@runtime_checkable
class Servable(Protocol):
    """An object that a region packs: it may hold a tensor of its own."""

    def served(self, value: InCatalog, /) -> object:
        """Return the object that takes its place and holds the tensor."""
        ...


def offload(store: Store, *, min_bytes: int = 1024, window_bytes: int | None = None) -> Offload:
    """Return a context manager that puts saved tensors into a store. Usable as a decorator.

    Gradients are those of the plain run, bit for bit, unless the store is lossy. Parameters, buffers and small tensors
    stay in place. The context may be entered several times, nested and in several threads; of two that are nested the
    inner one takes the saved tensors. Regions inside of it put their inputs into the store, and their saved tensors are
    recomputed. Inside of a region, the block's saved tensors are stored and not recomputed.

    Args:
        store: The store for the tensors.
        min_bytes: Tensors of storages with fewer bytes stay in place.
        window_bytes: How many bytes may be brought back ahead of the backward at once; None for twice the largest
            tensor, 0 for none.

    Raises:
        UnsupportedError: On entering, inside of a region of `torch.utils.checkpoint`.
    """
    return Offload(Catalog(store, min_bytes=min_bytes, window_bytes=window_bytes))


class Offload(ContextDecorator):
    """The context manager that `offload` returns.

    Attributes:
        catalog: The saved tensors, and where they are.
    """

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    @property
    def saved_bytes(self) -> int:
        """How many bytes autograd has saved so far, each alias counted."""
        return self.catalog.totals.saved_bytes

    @property
    def copied_out_bytes(self) -> int:
        """How many bytes the store has taken so far, each byte of a storage once, before any encoding."""
        return self.catalog.totals.copied_out_bytes

    @property
    def copied_in_bytes(self) -> int:
        """How many bytes were brought back so far."""
        return self.catalog.totals.copied_in_bytes

    @property
    def narrowed_bytes(self) -> int:
        """How many of the saved bytes backward does not need, as a mask or the shape suffices; see `Compressed`."""
        return self.catalog.totals.narrowed_bytes

    @property
    def refused_bytes(self) -> int:
        """How many bytes found no room in the store; they stayed in place."""
        return self.catalog.totals.refused_bytes

    @outside_graphs
    def __enter__(self) -> Offload:
        """Begin.

        Raises:
            UnsupportedError: The code runs in a region of `torch.utils.checkpoint`, which would recompute nothing.
        """
        hooks = top_saved_tensor_hooks(True)
        module = "" if hooks is None else str(getattr(hooks[1], "__module__", ""))
        if module == "torch.utils.checkpoint":
            raise UnsupportedError(
                "offload cannot be entered inside of a region of torch.utils.checkpoint: what it takes would no longer "
                "be recomputed. Put offload around the region, or use torchremat.checkpoint."
            )
        watch = None
        if hooks is not None and module.startswith(REGIONS):
            # See NOTE [ Inside of a region ]
            push_saved_tensor_hooks(partial(self._serve, _of_region(hooks[0])), hooks[1])
        elif narrows(self.catalog.store):
            watch = SlotWatch(self.catalog)
            push_saved_tensor_hooks(watch.pack, unpack)
            watch.__enter__()
        else:
            push_saved_tensor_hooks(self.catalog.put, unpack)
        _entered.watches.append(watch)
        return self

    def _serve(self, pack: Callable[[Tensor], object], tensor: Tensor) -> object:
        slot = pack(tensor)
        # A recompute has none.
        if not isinstance(slot, Servable):
            return slot
        with hiding():
            return slot.served(self.catalog.put(tensor))

    @outside_graphs
    def __exit__(self, kind: object, *_: object) -> None:
        """End; saved tensors stay in the store until their graph goes."""
        watch = _entered.watches.pop()
        if watch is not None:
            watch.__exit__(None, None, None)
        pop_saved_tensor_hooks()
        if kind is None:
            with hiding():
                self.catalog.settle()
                land(self.catalog.store, all_of_it=False)

    def __repr__(self) -> str:
        return f"<offload to {self.catalog.store!r}: {self.copied_out_bytes} bytes out, {self.copied_in_bytes} back>"


def _of_region(pack: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    """Return the hook of a region itself, also if given the one that an outer `offload` has put in front of it."""
    while isinstance(pack, partial) and getattr(pack.func, "__func__", None) is Offload._serve:
        pack = pack.args[0]
    return pack


REGIONS = "torchremat.regions."  # where the saved-tensor hooks of regions are


class _EnteredOffloads(threading.local):
    """The watches that a thread has entered, None where a store does not narrow; the last is the innermost."""

    def __init__(self) -> None:
        self.watches: list[SlotWatch | None] = []


_entered = _EnteredOffloads()
