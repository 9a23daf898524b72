"""The pieces of a storage that a store has, and how they become bytes in memory again."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import ReferenceType

import torch
from torch import Tensor, UntypedStorage

from torchremat._compat.accelerators import Stream, accelerator_of
from torchremat._compat.streams import current_stream, record_stream
from torchremat.errors import StoreError
from torchremat.stores.geometry import TensorPlace
from torchremat.stores.in_catalog import Kept
from torchremat.stores.weak_bytes import WeakBytes
from torchremat.tensors.handles import Handle

# CPU kernels distinguish addresses by the width of a vector, device kernels by that of a memory transaction.
_ALIGNMENT = 64
_DEVICE_ALIGNMENT = 256
WORST_ITEMSIZE = 16  # of complex128


@dataclass(eq=False, slots=True)
class Piece:
    """Some bytes of a storage that a store has.

    Attributes:
        handle: The store's claim on them.
        start: The first byte.
        stop: The byte after the last.
        dtype: The dtype of the tensor that the store was given.
        count: How many elements that tensor has.
        size: The shape of a pattern with gaps; None if no byte is missing.
        stride: Its strides.
        given: The memory of a copy that replaced the tensor, since the tensor was about to be written.
    """

    handle: Handle
    start: int
    stop: int
    dtype: torch.dtype
    count: int
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()
    given: ReferenceType[UntypedStorage] | None = None

    def load(self) -> Tensor:
        """Return the tensor that the store was given, flat."""
        tensor = self.handle.get()
        if isinstance(self.handle, Kept):
            return tensor
        if tensor.dtype != self.dtype or tensor.numel() != self.count or not tensor.is_contiguous():
            raise StoreError(
                f"{type(self.handle).__qualname__}.get() gave {tensor.numel()} elements of {tensor.dtype}, strides "
                f"{tensor.stride()}; a contiguous tensor of {self.count} elements of {self.dtype} was stored."
            )
        return tensor.detach()


@dataclass(eq=False, slots=True, weakref_slot=True)
class ByteSpan:
    """Pieces that share bytes, or that a saved tensor spans; they come back in one buffer.

    Attributes:
        pieces: In any order.
        hot: The buffer, while it is alive.
        held: By backward: the buffer, and the saved tensors that this backward has not asked for yet.
        is_coming: Whether the store was told to bring the bytes back.
    """

    start: int
    stop: int
    pieces: list[Piece]
    hot: WeakBytes | None = None
    held: dict[int, tuple[Tensor | UntypedStorage, set[ReferenceType[TensorPlace]]]] = field(
        default_factory=dict[int, "tuple[Tensor | UntypedStorage, set[ReferenceType[TensorPlace]]]"]
    )
    is_coming: bool = False
    # On a device: the stream that loaded it, and the event when that was done.
    _loaded: tuple[Stream, torch.Event] | None = None

    @property
    def is_hot(self) -> bool:
        """Whether the buffer is alive."""
        return self.hot is not None and self.hot.storage() is not None

    @property
    def stored_bytes(self) -> int:
        """How many bytes are brought back."""
        return sum(piece.count * piece.dtype.itemsize for piece in self.pieces)

    def prefetch(self) -> int:
        """Let the store begin to bring the bytes back; return how many that will be."""
        if self.is_coming or self.is_hot:
            return 0
        self.is_coming = True
        for piece in self.pieces:
            piece.handle.prefetch()
        return self.stored_bytes

    def wait(self, tensor: Tensor) -> None:
        """Let the current stream use a view of the buffer, which another stream may have loaded."""
        if self._loaded is not None:
            stream, event = self._loaded
            current = current_stream(tensor.device)
            if current != stream:
                current.wait_event(event)
                record_stream(tensor, current)

    def load(self, start_address: int, device: torch.device) -> Tensor:
        """Bring the bytes back, and return the buffer that holds them.

        Args:
            start_address: Where the storage began, 0 if that address was not aligned for every dtype.
            device: Where it was.
        """
        base = self._load(start_address, device)
        if device.type != "cpu":
            stream = current_stream(device)
            self._loaded = stream, accelerator_of(device).event(stream)
        return base

    def _load(self, start_address: int, device: torch.device) -> Tensor:
        first = self.pieces[0]
        alignment = _ALIGNMENT if device.type == "cpu" else _DEVICE_ALIGNMENT
        shift = (start_address + self.start) % alignment
        self.is_coming = False
        if len(self.pieces) == 1 and first.size is None:
            base = first.load()
            at = int(base.storage_offset()) * base.dtype.itemsize
            if base.data_ptr() % alignment == shift and (at - self.start) % WORST_ITEMSIZE == 0:
                self.hot = WeakBytes(base, at - self.start)
                return base
            pieces = [(first, base)]
        else:
            pieces = [(piece, piece.load()) for piece in self.pieces]
        # Whole elements of every type, at an address aligned like the original: kernels choose by it.
        count = -(-(shift + self.stop - self.start) // WORST_ITEMSIZE) * WORST_ITEMSIZE
        buffer = torch.empty(count, dtype=torch.uint8, device=device)
        for piece, loaded in pieces:
            place = shift + piece.start - self.start
            if piece.size is None:
                buffer[place : place + piece.stop - piece.start].copy_(loaded.reshape(-1).view(torch.uint8))
            else:
                whole = buffer.view(piece.dtype)
                into = whole.as_strided(piece.size, piece.stride, place // piece.dtype.itemsize)
                into.copy_(loaded.view(piece.size))
        self.hot = WeakBytes(buffer, shift - self.start)
        return buffer


def cut(tensor: Tensor, start: int, stop: int, part: tuple[int, int]) -> Tensor:
    """Return some bytes of a tensor's span, contiguous, in its dtype if they are whole elements."""
    if part == (start, stop) and tensor.is_contiguous():
        return tensor
    itemsize = tensor.dtype.itemsize
    whole = tensor.as_strided(((stop - start) // itemsize,), (1,), start // itemsize)
    left, right = part[0] - start, part[1] - start
    if left % itemsize or right % itemsize:
        return whole.view(torch.uint8)[left:right]
    return whole[left // itemsize : right // itemsize]


def covers(piece: Piece, place: TensorPlace) -> bool:
    """Return whether a piece covers all of a saved tensor."""
    if piece.size is None:
        return piece.start <= place.start and place.stop <= piece.stop
    same = piece.start == place.start and piece.stop == place.stop and piece.dtype == place.dtype
    return same and piece.size == place.without_repeats and piece.stride == place.stride
