"""A store that holds tensors in fewer bytes, in another store."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from torchremat.errors import UnsupportedError
from torchremat.stores.base import Content, Remade, StoreStatistics, content_of, settle, statistics_of
from torchremat.stores.codecs.codec import Codec, Form, LossyCodec
from torchremat.stores.codecs.lossless import MaskBits, NarrowIndices, TwoValues
from torchremat.stores.keep import Keep
from torchremat.tensors.handles import Handle, Store

_LOSSLESS: tuple[Codec, ...] = (MaskBits(), NarrowIndices(), TwoValues())


class Compressed(Remade):
    """A store that encodes a tensor and hands the result to another store.

    Masks, indices, and floats of two values are held in fewer bytes and come back bit for bit. Other floats pass
    through unchanged unless a lossy codec is named: gradients then differ from those of the plain run, by the bound
    that the codec declares for each saved tensor. Tensors other than floats never lose anything.

    Inside `offload`, a tensor of which backward needs only a mask or the shape is held as a mask or a shape. See
    `SlotWatch`

    Args:
        store: Where the encoded tensors go; `Keep()` if None, so that they stay on the device.
        lossy: The codec for floats, one of `BFloat16`, `Float8`, `Int8`, or a `LossyCodec` of your own.

    Raises:
        UnsupportedError: `store` is not a store, or `lossy` is not a lossy codec.
    """

    def __init__(self, store: Store | None = None, *, lossy: LossyCodec | None = None) -> None:
        if lossy is not None and (isinstance(lossy, type) or not isinstance(cast("object", lossy), LossyCodec)):
            raise UnsupportedError(
                f"lossy={lossy!r} is not a lossy codec: it needs encode, decode and bound. Use "
                "torchremat.codecs.BFloat16(), Float8() or Int8(), or None to lose nothing."
            )
        if store is not None and not callable(getattr(store, "put", None)):
            raise UnsupportedError(f"Compressed(...): expected a store, got {store!r}.")
        self.store = Keep() if store is None else store
        self.lossy = lossy
        self._codecs = _LOSSLESS if lossy is None else (*_LOSSLESS, lossy)

    @property
    def statistics(self) -> StoreStatistics | None:
        """The counts of the inner store, in encoded bytes; None if it has no counts."""
        return statistics_of(self.store)

    @property
    def strict(self) -> bool:
        """Whether the inner store raises if it has no room."""
        return bool(getattr(self.store, "strict", False))

    def put(self, tensor: Tensor) -> Handle | None:
        """Encode a tensor and put the payload into the inner store; return None if that has no room.

        Raises:
            StoreError: The inner store has no room or failed, and is strict.
        """
        content = None if tensor.is_contiguous() else content_of(tensor)
        flat = tensor if content is None else content.line(tensor)
        for codec in self._codecs:
            if codec is self.lossy and not tensor.dtype.is_floating_point:
                continue
            encoded = codec.encode(flat)
            if encoded is not None:
                handle = self.store.put(encoded.payload)
                return None if handle is None else EncodedHandle(handle, codec, encoded.form, content)
        return self.store.put(tensor)

    def __repr__(self) -> str:
        lossy = "" if self.lossy is None else f", lossy={self.lossy!r}"
        return f"Compressed({self.store!r}{lossy})"


class EncodedHandle:
    """An encoded tensor, by the handle of its payload."""

    __slots__ = ("__weakref__", "_codec", "_content", "_form", "_handle")

    def __init__(self, handle: Handle, codec: Codec, form: Form, content: Content | None = None) -> None:
        self._handle = handle
        self._codec = codec
        self._form = form
        self._content = content  # of a tensor that was not contiguous. See NOTE [ In a line ]

    @property
    def stored_bytes(self) -> int:
        """How many bytes the inner store holds for it."""
        return self._handle.stored_bytes

    def get(self) -> Tensor:
        """Return the tensor, decoded on the device that it came from."""
        tensor = self._codec.decode(self._handle.get(), self._form)
        return tensor if self._content is None else self._content.back(tensor)

    def prefetch(self) -> None:
        """Begin to bring the encoded tensor back."""
        self._handle.prefetch()

    def before_write(self) -> None:
        """Do nothing: the payload is memory that no other code knows. See NOTE [ Who may write to what was put ]."""

    def settle(self) -> None:
        """Wait until the encoded tensor has reached the inner store."""
        settle(self._handle)
