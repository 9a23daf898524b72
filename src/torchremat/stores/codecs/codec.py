"""The interface of a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """The metadata that a decoder needs in addition to the payload.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype.
        numbers: Further numbers that the codec needs to decode.
    """

    shape: torch.Size
    dtype: torch.dtype
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in fewer bytes.

    Attributes:
        payload: The stored tensor: contiguous, at least one element, separate memory, on the device of the tensor.
        form: The metadata kept with it.
    """

    payload: Tensor
    form: Form


@runtime_checkable
class Codec(Protocol):
    """Writes tensors in fewer bytes, and reads them again bit for bit. Its methods are called from several threads."""

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return the tensor in fewer bytes, or None if the codec cannot shorten it.

        Args:
            tensor: Contiguous, without graph, any shape and dtype, at least one element. The codec only reads it.
        """
        ...

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the tensor: contiguous, fresh memory, on the device of the payload.

        Args:
            payload: The payload that `encode` returned, or a copy of it. The codec only reads it.
            form: The form that `encode` returned.
        """
        ...


@runtime_checkable
class LossyCodec(Codec, Protocol):
    """A codec that returns other numbers, within the error that it declares.

    Infinities and NaNs come back as such, or the codec declines the tensor. Reports name the codec by its `repr`.
    """

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error that each element can have, in the same shape, as float64.

        An element that is not finite has the bound 0: it comes back as it is.
        """
        ...
