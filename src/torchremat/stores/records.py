"""One record per storage and version: the bytes that a store has of it, and how they come back.

    storage    |----- a -----|          |--- b ---|     the tensors that autograd has saved of it
                   |------- c ------|                   c adds the bytes that a lacks
    byte spans [p0            p1    ]   [p2       ]     spans that share bytes; each comes back as one buffer
    pieces      p0, p1, p2                              the tensors that the store was given, each byte once

A tensor with gaps, a column of a matrix, is a piece of its own without the gaps; its byte span covers them.

NOTE [ Who owns what ]
    autograd    its packed objects, `Stored`
    Stored      its record, and its place, by which the record knows it
    record      its pieces, which own the store's handles, see NOTE [ Who owns a stored tensor ]
    record      loaded buffers, while other saved tensors need them, see NOTE [ How long what is loaded is held ]
    weakly      the catalog its records, a record the storage that it was made of and its loaded buffers
So bytes that autograd frees are freed, down to the store's own.
"""

from __future__ import annotations

import threading
from functools import partial
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.autograd import at_end_of_backward, current_graph_task
from torchremat.errors import MutationError
from torchremat.stores.geometry import TensorPlace, missing
from torchremat.stores.in_catalog import Kept
from torchremat.stores.pieces import WORST_ITEMSIZE, ByteSpan, Piece, covers, cut
from torchremat.stores.shared import Shared
from torchremat.stores.weak_bytes import WeakBytes
from torchremat.tensors.handles import Handle, Protecting
from torchremat.tensors.versioned import Versioned


class RecordsByStorage:
    """The records of a catalog that give out the bytes of a storage, which other code may be about to write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: WeakKeyDictionary[UntypedStorage, WeakSet[Record]] = WeakKeyDictionary()

    def add(self, storage: UntypedStorage, record: Record) -> None:
        """Register a record."""
        with self._lock:
            self._records.setdefault(storage, WeakSet()).add(record)

    def before_write(self, storage: UntypedStorage) -> None:
        """Have every record move its bytes out of a storage, which is about to be written."""
        with self._lock:
            known = list(self._records.pop(storage, ()))
        for record in known:
            record.before_write(storage)


class Record:
    """The bytes that a store has of one storage at one version.

    Args:
        tensor: The first tensor that autograd saves of it, without its graph.
        by_storage: Gets the record for each storage whose writes it must be told of.
        is_watched: Whether writes to the storage are counted by `tensor`.
    """

    __slots__ = (
        "__weakref__", "_aliases", "_by_storage", "_device", "_is_complete", "_lock", "_origin", "_shared", "_spans",
        "_start_address", "_waiting",
    )  # fmt: skip

    def __init__(
        self, tensor: Tensor, shared: Shared, by_storage: RecordsByStorage, *, is_watched: bool = True
    ) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        # Memory of other code may begin at any address; no buffer of ours can.
        self._start_address = address if address % WORST_ITEMSIZE == 0 else 0
        self._device = tensor.device
        self._origin = WeakBytes(tensor) if is_watched else None
        self._is_complete = False
        self._spans: list[ByteSpan] = []
        self._aliases: list[ReferenceType[TensorPlace]] = []
        self._waiting: list[tuple[Versioned, ReferenceType[TensorPlace]]] = []
        self._shared = shared
        self._by_storage = by_storage
        self._lock = threading.RLock()

    @property
    def device(self) -> torch.device:
        """The device to which its tensors come back."""
        return self._device

    # ------------------------------------------------------------------------------------------------------ forward

    def add(self, place: TensorPlace, tensor: Tensor, *, watched: Tensor | None = None) -> None:
        """Store the bytes of a tensor that are not stored yet."""
        with self._lock:
            self._note(place)
            self._store(place, tensor, watched, None)

    def watch(self, tensor: Tensor) -> None:
        """Count the writes to one more tensor of the storage."""
        with self._lock:
            if self._origin is not None:
                self._origin.watch(tensor)

    def complete(self, storage: UntypedStorage) -> None:
        """Subscribe to writes to the storage that it is made of. See NOTE [ Writes that are seen coming ]."""
        with self._lock:
            self._is_complete = True
            self._by_storage.add(storage, self)

    # NOTE [ Writes that are seen coming ]
    # An operator's output is complete when it is put, and each recompute needs its values as they were then. So the
    # code that observes a region's operators announces each write before it happens; cf.
    # the NOTE [ Who may write to what was put ]. The same holds for a recompute that is about to write to a tensor that
    # a record gave it, which others are given as well. Tensors that autograd saves are not protected: autograd must see
    # the write, or raise, as it would without a store.

    def before_write(self, storage: UntypedStorage) -> None:
        """Move everything out of this memory, which is about to be written."""
        with self._lock:
            self._origin = None
            for span in self._spans:
                span.hot = None
                span.held.clear()
                for piece in span.pieces:
                    self._own(piece, storage)

    def _own(self, piece: Piece, storage: UntypedStorage) -> None:
        if isinstance(piece.handle, Protecting):
            piece.handle.before_write()
            return
        if piece.given is not None and piece.given() is not storage:
            return  # the store has a copy that no other code knows, or its own encoding
        try:
            copy = piece.handle.get().clone()
        except MutationError:
            return  # it was written before, and `get` will raise
        piece.given = ref(copy.untyped_storage())
        handle = self._shared.put(copy)
        piece.handle = Kept(copy) if handle is None else handle

    def add_later(self, place: TensorPlace, tensor: Tensor) -> None:
        """Store the bytes of a tensor when `settle` is called, at the latest when the tensor is asked for."""
        with self._lock:
            self._note(place)
            self._waiting.append((Versioned(tensor), ref(place)))

    def settle(self) -> None:
        """Store the tensors that were added to be stored later."""
        with self._lock:
            while self._waiting:
                saved, alive = self._waiting[0]
                place = alive()
                if place is not None:
                    self._store(place, saved.tensor, None, saved.version)
                del self._waiting[0]  # only now, as the store has not raised

    def _note(self, place: TensorPlace) -> None:
        if len(self._aliases) >= 16:
            self._aliases = [alive for alive in self._aliases if alive() is not None]
        self._aliases.append(ref(place))

    def _store(self, place: TensorPlace, tensor: Tensor, watched: Tensor | None, version: int | None) -> None:
        start, stop = place.start, place.stop
        if self._shared.by_storage:
            tensor = _whole(tensor)
            start, stop = 0, tensor.nbytes
        if self._shared.by_storage or not place.has_gaps:
            covered = [(one.start, one.stop) for one in self._pieces() if one.size is None]
            gaps = missing(start, stop, covered) if covered else [(start, stop)]
            pieces = [self._put(cut(tensor, start, stop, one), one, watched, version) for one in gaps]
        elif any(covers(one, place) for one in self._pieces()):
            pieces = []
        else:
            single = tensor.as_strided(place.without_repeats, place.stride, place.offset)
            # The store is given a copy of ours, so that nothing else writes to it.
            piece = self._put(single.contiguous(), (start, stop), watched, version, source=single)
            piece.size, piece.stride = single.shape, place.stride
            pieces = [piece]
        if pieces:
            self._join(start, stop, pieces)

    def _put(
        self,
        tensor: Tensor,
        span: tuple[int, int],
        watched: Tensor | None,
        version: int | None,
        source: Tensor | None = None,
    ) -> Piece:
        source = tensor if source is None else source
        if version is not None and source._version != version:
            # Written after it was saved and before it could be stored: treat it as kept.
            handle: Handle | None = Kept(source, version=version)
        else:
            # The wrapped tensor does not count a wrapper's writes: a store that reads it later would not notice one.
            handle = self._shared.put(tensor if watched is None or source is not tensor else tensor.clone())
            if handle is None:
                handle = Kept(source, watched)
        return Piece(handle, *span, tensor.dtype, tensor.numel())

    def _pieces(self) -> list[Piece]:
        return [piece for span in self._spans for piece in span.pieces]

    def _join(self, start: int, stop: int, pieces: list[Piece]) -> None:
        """Merge the pieces and the byte spans that they touch into one byte span."""
        met = [span for span in self._spans if span.start < stop and start < span.stop]
        if met:
            start = min(start, *[span.start for span in met])
            stop = max(stop, *[span.stop for span in met])
            self._spans = [span for span in self._spans if span not in met]
        self._spans.append(ByteSpan(start, stop, [*(piece for span in met for piece in span.pieces), *pieces]))

    @property
    def handles(self) -> list[Handle]:
        """The store's claims on its bytes."""
        with self._lock:
            return [piece.handle for piece in self._pieces()]

    @property
    def stored_bytes(self) -> int:
        """How many bytes the store holds for it."""
        with self._lock:
            return sum(piece.handle.stored_bytes for piece in self._pieces())

    @property
    def kept(self) -> list[Tensor]:
        """The tensors that stayed in place, as the store had no room or they are still to be stored."""
        with self._lock:
            found = [piece.handle.tensor for piece in self._pieces() if isinstance(piece.handle, Kept)]
            return found + [saved.tensor for saved, _ in self._waiting]

    # ----------------------------------------------------------------------------------------------------- backward

    def get(self, place: TensorPlace) -> Tensor:
        """Return a saved tensor, loaded if its bytes are not in memory."""
        with self._lock:
            if self._waiting:
                self.settle()
            span = self._span_of(place)
            where = self._origin
            storage = None if where is None else where.storage()
            if storage is None:
                where = span.hot
                storage = None if where is None else where.storage()
            if storage is None:
                storage, where = self._load(span).untyped_storage(), span.hot
                if self._is_complete:
                    self._by_storage.add(storage, self)
            _note_asked(span, current_graph_task(), place)
            assert where is not None
            found = where.view(storage, place)
            if where is span.hot:
                span.wait(found)
            return found

    def _span_of(self, place: TensorPlace) -> ByteSpan:
        return next(one for one in self._spans if one.start <= place.start and place.stop <= one.stop)

    def prefetch(self, place: TensorPlace) -> int:
        """Let the store begin to bring a saved tensor back; return how many bytes that will be."""
        # A thread that unpacks it now needs no prefetch.
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            if self._waiting or (self._origin is not None and self._origin.storage() is not None):
                return 0
            return self._span_of(place).prefetch()
        finally:
            self._lock.release()

    def begin(self) -> None:
        """Let the store begin to bring everything back for the running backward, or hold the storage if it is alive."""
        with self._lock:
            if self._stays():
                return
            for span in self._spans:
                span.prefetch()

    def bring(self) -> None:
        """Bring everything back, and hold it for the running backward."""
        with self._lock:
            if self._stays():
                return
            for span in self._spans:
                if not span.is_hot:
                    self._load(span)

    def _stays(self) -> bool:
        """Hold the storage that it was made of, if that is still alive."""
        self.settle()
        storage = None if self._origin is None else self._origin.storage()
        if storage is None:
            return False
        for span in self._spans:
            self._hold(span, storage)
        return True

    def forget(self, key: int) -> None:
        """Release everything that the backward of that number has loaded."""
        with self._lock:
            for span in self._spans:
                span.held.pop(key, None)

    # NOTE [ How long what is loaded is held ]
    # Each byte comes back once per backward: a loaded buffer is held until the backward that loaded it has asked for
    # every saved tensor of the record that is still alive; at the latest until that backward ends. From then on only
    # the nodes that use the buffer hold it.

    def _load(self, span: ByteSpan) -> Tensor:
        self._shared.loaded(span.stored_bytes)
        base = span.load(self._start_address, self._device)
        self._hold(span, base)
        return base

    def _hold(self, span: ByteSpan, base: Tensor | UntypedStorage) -> None:
        task = current_graph_task()
        if task >= 0:
            if task not in span.held:
                at_end_of_backward(partial(_release, ref(span), task))
            span.held[task] = (
                base,
                {alive for alive in self._aliases if (one := alive()) is not None and self._span_of(one) is span},
            )


def _whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor's storage, in its dtype."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _note_asked(span: ByteSpan, task: int, place: TensorPlace) -> None:
    held = span.held.get(task)
    if held is not None:
        held[1].discard(ref(place))
        if all(alive() is None for alive in held[1]):
            del span.held[task]  # See NOTE [ How long what is loaded is held ]


def _release(span: ReferenceType[ByteSpan], task: int) -> None:
    alive = span()
    if alive is not None:
        alive.held.pop(task, None)
