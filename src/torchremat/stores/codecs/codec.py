"""What is asked of a codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """What a decoder must know beside the payload.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype.
        numbers: What else the codec wants to know again.
    """

    shape: torch.Size
    dtype: torch.dtype
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Encoded:
    """A tensor in fewer bytes.

    Attributes:
        payload: What is stored: contiguous, at least one element, memory of its own, on the device of the tensor.
        form: What is kept beside it.
    """

    payload: Tensor
    form: Form


@runtime_checkable
class Codec(Protocol):
    """Writes tensors in fewer bytes, and reads them again bit for bit. Its methods are called from several threads."""

    def encode(self, tensor: Tensor) -> Encoded | None:
        """Return the tensor in fewer bytes, or None if it is none that the codec can shorten.

        Args:
            tensor: Contiguous, without graph, any shape and dtype, at least one element. It is only read.
        """
        ...

    def decode(self, payload: Tensor, form: Form) -> Tensor:
        """Return the tensor: contiguous, fresh memory, on the device of the payload.

        Args:
            payload: That of `encode`, or a copy of it. It is only read.
            form: That of `encode`.
        """
        ...


@runtime_checkable
class LossyCodec(Codec, Protocol):
    """A codec that gives back other numbers, by no more than it declares.

    Infinities and NaNs come back as such, or the codec declines the tensor. `repr` names it in reports.
    """

    def bound(self, tensor: Tensor) -> Tensor:
        """Return the largest error that each element can have, in the same shape, as float64.

        An element that is not finite has the bound 0: it comes back as it is.
        """
        ...
