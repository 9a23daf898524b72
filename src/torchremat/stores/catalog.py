"""The catalog: saved tensors by storage and version, with a store behind it.

`Catalog.put` is a pack hook, `unpack` the unpack hook. A tensor that autograd saves is one of

    kept       parameters and their views, buffers, small tensors, and tensors that are no plain array of bytes
    apart      a subclass that defines how it is flattened: its inner tensors are put one by one
    stored     all others; the bytes of a storage are stored once, however many aliases it has

Missing on purpose: the catalog keeps nothing alive that was put. See NOTE [ Who owns what ].
"""

from __future__ import annotations

import threading
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from torchremat._compat.autograd import current_node
from torchremat._compat.compiled_autograd import in_compiled_backward
from torchremat._compat.modes import sequence_number
from torchremat.errors import StoreError, UnsupportedError
from torchremat.stores.base import Remade, check_store
from torchremat.stores.in_catalog import InCatalog, Kept
from torchremat.stores.records import Record, RecordsByStorage
from torchremat.stores.shared import Shared, Totals
from torchremat.stores.stored import Schedule, Stored, as_in_memory
from torchremat.stores.stored_parameters import saved_view_of
from torchremat.stores.weak_bytes import is_in_running_module, is_leaf_of_model, is_plain_array
from torchremat.tensors.handles import Handle, Store
from torchremat.tensors.held import holding
from torchremat.tensors.metadata import Metadata, metadata_of
from torchremat.tensors.packed import DIFFERENTIATED, unpacked_in_graphs
from torchremat.tensors.parts import Rebuild, inner_of, rebuilding


class _UnfilledPuts(threading.local):
    """Tensors that a thread has put and whose operation may not have filled them yet."""

    record: ReferenceType[Record] | None = None
    sequence = -1


# NOTE [ What is filled after it was saved ]
# `rrelu` first saves its noise and then fills it, without a new version. A tensor that could be such a one (floating
# point, never written, without grad) is not read when it is saved, but when another node saves a tensor, when the
# catalog is told to settle, or when the tensor is asked for.


class Catalog(Remade):
    """Puts the tensors that autograd saves into a store.

    Args:
        store: Where the bytes go.
        min_bytes: Storages of fewer bytes stay where they are.
        window_bytes: How many bytes may be brought back ahead of the backward at once; None for twice the largest
            tensor, 0 for none.
        by_storage: Whether a storage is moved whole or not at all, and not before its record is settled, so that the
            moved bytes and their time are known exactly. Tensors of subclasses, and those that span less than half of
            their storage, then stay in place.

    Raises:
        UnsupportedError: `store` is not a store.
    """

    def __init__(
        self, store: Store, *, min_bytes: int = 1024, window_bytes: int | None = None, by_storage: bool = False
    ) -> None:
        check_store(store)
        self.store = store
        self.min_bytes = min_bytes
        self.by_storage = by_storage
        self._shared = Shared(store, by_storage=by_storage)
        self._schedule = Schedule(window_bytes)
        self._by_storage = RecordsByStorage()
        self._records: WeakValueDictionary[tuple[StorageWeakRef, object], Record] = WeakValueDictionary()
        self._waiting = _UnfilledPuts()
        self._lock = threading.RLock()

    @property
    def totals(self) -> Totals:
        """The counts so far."""
        return self._shared.totals

    def put(self, tensor: Tensor) -> InCatalog:
        """Return the object that autograd holds in place of a tensor.

        Raises:
            StoreError: The store is strict, and has no room.
        """
        if self._waiting.record is not None and self._waiting.sequence != sequence_number():
            self.settle()
        packed = self._put(tensor, is_complete=False)
        return packed or saved_view_of(tensor) or Kept(tensor)

    def put_complete(self, tensor: Tensor) -> InCatalog | None:
        """Return the same for an operator's output, which is complete; None if it is kept in place.

        Raises:
            StoreError: The store is strict, and has no room.
        """
        return self._put(tensor, is_complete=True)

    def _put(self, tensor: Tensor, *, is_complete: bool) -> InCatalog | None:
        packed: InCatalog | None = None
        if type(tensor) is not Tensor:
            packed = None if self.by_storage else self._store_parts(tensor)
        elif self._is_storable(tensor):
            packed = self._store(tensor, is_complete=is_complete)
        self._shared.saved(tensor, kept=packed is None)
        return packed

    def before_write(self, storage: UntypedStorage) -> None:
        """Move operator outputs that lie in this storage to other memory, so that it may be written.

        Whatever is put from this storage from now on is stored anew, since the write may or may not bump a version.
        See NOTE [ Writes that are seen coming ].

        Raises:
            StoreError: A copy must be put, but the store is strict and has no room.
        """
        memory = StorageWeakRef(storage)
        with self._lock:
            for key in [one for one in self._records if one[0] == memory]:
                self._records.pop(key, None)
        self._by_storage.before_write(storage)

    def put_mask(self, tensor: Tensor, mask: Tensor) -> Handle | None:
        """Store a mask in place of a saved tensor; return None if the store has no room."""
        handle = self.store.put(mask)
        if handle is not None:
            self._shared.narrowed(tensor, mask.nbytes)
        return handle

    def get_mask(self, handle: Handle) -> Tensor:
        """Return a mask that was stored."""
        mask = handle.get()
        self._shared.loaded(mask.nbytes)
        return mask

    def put_shape(self, tensor: Tensor) -> None:
        """Count a saved tensor of which only the shape is needed."""
        self._shared.narrowed(tensor, 0)

    def settle(self) -> None:
        """Store the tensors that were saved before they were filled."""
        # See NOTE [ What is filled after it was saved ]
        record, self._waiting.record = self._waiting.record, None
        alive = None if record is None else record()
        if alive is not None:
            alive.settle()

    def _is_storable(self, tensor: Tensor) -> bool:
        # A region passes its inputs on as leaves, whatever they are; it keeps its parameters.
        if not is_plain_array(tensor) or (not holding.now and is_leaf_of_model(tensor)):
            return False
        storage = tensor.untyped_storage()
        if self.by_storage and 2 * tensor.numel() * tensor.itemsize < storage.nbytes():
            return False
        # A tensor of zeros, or a sharded tensor whose memory is freed, has no bytes.
        return storage.nbytes() >= max(self.min_bytes, 1) and (
            tensor.requires_grad or not is_in_running_module(storage)
        )

    def _store(self, tensor: Tensor, wrapper: Tensor | None = None, *, is_complete: bool = False) -> Stored:
        """Return the stored form of a plain tensor.

        Args:
            tensor: The tensor.
            wrapper: The subclass that wraps the tensor; only the wrapper counts writes.
            is_complete: Whether no write without a new version can follow.
        """
        storage = tensor.untyped_storage()
        alias = as_in_memory(tensor)
        is_silent = not is_complete and _may_be_written_silently(tensor)
        version = tensor._version if wrapper is None else (wrapper._version, tensor._version)
        with self._lock:
            key = (StorageWeakRef(storage), version)
            record = None if is_silent else self._records.get(key)
            if record is None:
                record = Record(alias, self._shared, self._by_storage, is_watched=wrapper is None)
                if not is_silent:
                    self._records[key] = record
            else:
                record.watch(alias)
            stored = Stored(tensor, record, self._schedule)
        if is_complete:
            record.complete(storage)
        if self.by_storage and not holding.now:
            record.add_later(stored.place, alias)
        elif wrapper is None and not (is_complete or holding.now) and _may_be_filled_later(tensor):
            record.add_later(stored.place, alias)
            self._waiting.record, self._waiting.sequence = ref(record), sequence_number()
        else:
            record.add(stored.place, alias, watched=wrapper)
        return stored

    def _store_parts(self, tensor: Tensor) -> Apart | None:
        """Return a flattened tensor of a subclass; None if it is kept in place."""
        kind = type(tensor)
        # An asynchronous collective may still be writing to the wrapped tensor.
        if not hasattr(kind, "__tensor_flatten__") or hasattr(kind, "trigger_wait"):
            return None
        if not holding.now and is_leaf_of_model(tensor):
            return None
        inner = inner_of(tensor)
        large: dict[str, Tensor] = {}
        for name, one in inner.items():
            # Offsets and the like are known by identity.
            if not isinstance(one, Tensor) or one.numel() == 0 or not (one.is_floating_point() or one.is_complex()):
                continue
            if type(one) is Tensor and self._is_storable(one):
                large[name] = one
            elif type(one) is Tensor and is_plain_array(one) and one.untyped_storage().nbytes() < self.min_bytes:
                inner[name] = one.detach().clone()  # a write to the wrapper goes unseen here
            else:
                return None
        if not large:
            return None
        stored = {name: self._store(one, tensor) for name, one in large.items()}
        return Apart(metadata_of(tensor), {**inner, **stored}, rebuilding(tensor))


class Apart(InCatalog):
    """A flattened tensor of a subclass."""

    __slots__ = ("_inner", "_metadata", "_rebuild")

    def __init__(self, metadata: Metadata, inner: dict[str, object], rebuild: Rebuild) -> None:
        self._metadata = metadata
        self._inner = inner
        self._rebuild = rebuild

    @property
    def metadata(self) -> Metadata:
        """The metadata of the tensor."""
        return self._metadata

    def let_go(self) -> None:
        """Release the inner tensors."""
        self._inner = {}

    @property
    def parts(self) -> list[object]:
        """The inner tensors, stored or themselves flattened."""
        return list(self._inner.values())

    def get(self) -> Tensor:
        """Return the tensor, rebuilt from its inner tensors."""
        inner = {name: one.get() if isinstance(one, Stored) else one for name, one in self._inner.items()}
        return self._rebuild(inner).detach()


@unpacked_in_graphs(InCatalog, "unpack_of_catalog")
def unpack(packed: InCatalog) -> Tensor:
    """Return a saved tensor: the hook that autograd calls.

    Raises:
        StoreError: The store no longer has the tensor; the message names the node.
        MutationError: The tensor was kept in place and has been written in place since.
        UnsupportedError: A compiled backward that dynamo gave up on is being differentiated.
    """
    if torch.is_grad_enabled() and in_compiled_backward():
        raise UnsupportedError(DIFFERENTIATED)
    try:
        return packed.get()
    except StoreError as error:
        raise StoreError(f"{_place_of(packed)}: {error}") from error


def _place_of(packed: InCatalog) -> str:
    node = current_node()
    what = (
        f"a tensor of shape {tuple(packed.place.size)} and {packed.place.dtype}"
        if isinstance(packed, Stored)
        else "a tensor"
    )
    if node is None:
        return f"{what} that autograd has saved"
    for name in dir(node):
        # The object is found by its attribute name: `_raw_saved_self` holds what the node exposes as `_saved_self`.
        if name.startswith("_raw_saved_") and getattr(getattr(node, name), "data", None) is packed:
            return f"{what} that {node.name()} has saved as `{name.removeprefix('_raw_saved_')}`"
    return f"{what} that {node.name()} has saved"


def _may_be_filled_later(tensor: Tensor) -> bool:
    # See NOTE [ What is filled after it was saved ]
    return not tensor.requires_grad and tensor._version == 0 and tensor.is_floating_point()


def _may_be_written_silently(tensor: Tensor) -> bool:
    # Batch normalisation writes its statistics without a new version: a copy stored earlier would be stale. They have
    # one dimension and do not require grad.
    return not tensor.requires_grad and tensor.dim() == 1 and tensor.is_floating_point()
