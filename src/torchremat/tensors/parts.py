"""The plain tensors that make up a tensor, and their memory.

A wrapper subclass (a DTensor, a quantized weight) has a storage with a size but no memory; its bytes lie in the tensors
that it wraps, which `__tensor_flatten__` names. Code that counts bytes, or distinguishes tensors by their memory, uses
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor, UntypedStorage, nn

from torchremat._compat.tensors import is_wrapper_subclass
from torchremat.errors import UnsupportedError

# Classes whose memory is the tensor's own storage.
PLAIN_CLASSES = frozenset({Tensor, nn.Parameter})


# Makes a tensor of a class of wrappers from its parts, by name.
Rebuild: TypeAlias = Callable[[Mapping[str, object]], Tensor]


class _WrapperTensor(Protocol):
    def __tensor_flatten__(self) -> tuple[list[str], object]: ...


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor wraps other tensors."""
    return type(tensor) not in PLAIN_CLASSES and is_wrapper_subclass(tensor)


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that make up a wrapper, at any depth; any other tensor is its own only part."""
    if is_wrapper(tensor):
        for part in inner_of(tensor).values():
            if isinstance(part, Tensor):  # a DTensor names its mesh as well
                yield from parts_of(part)
    else:
        yield tensor


def inner_of(tensor: Tensor) -> dict[str, object]:
    """Return the parts of a wrapper, by name: tensors, and what else its class names."""
    names, _ = cast("_WrapperTensor", tensor).__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def rebuilding(tensor: Tensor) -> Rebuild:
    """Return the function that makes a wrapper like this one from such parts; it keeps nothing of this one alive."""
    _, context = cast("_WrapperTensor", tensor).__tensor_flatten__()
    kind, size, stride = cast("Any", type(tensor)), tensor.size(), tensor.stride()
    return lambda inner: kind.__tensor_unflatten__(inner, context, size, stride)


def attributes_of(tensor: Tensor) -> dict[str, object]:
    """Return the attributes that user code has set on a tensor; the parts of a wrapper, set there too, are left out."""
    attributes = dict(tensor.__dict__)
    if is_wrapper(tensor):
        for name in inner_of(tensor):
            attributes.pop(name, None)
    return attributes


def memories_of(tensor: Tensor) -> list[UntypedStorage]:
    """Return the memory of each part of a tensor, the largest first; parts whose class exposes none are left out.

    Raises:
        UnsupportedError: It wraps other tensors and does not say which.
    """
    if type(tensor) in PLAIN_CLASSES and not tensor._is_zerotensor():
        try:
            return [tensor.untyped_storage()]  # by far the most, and counting bytes asks for each tensor many times
        except (NotImplementedError, RuntimeError):
            return []
    found = [memory for one in parts_of(tensor) if (memory := _memory_of(one)) is not None]
    if len(found) > 1:
        found = list({memory._cdata: memory for memory in found}.values())
        found.sort(key=lambda memory: -memory.nbytes())
    return found


def _memory_of(tensor: Tensor) -> UntypedStorage | None:
    if tensor._is_zerotensor():  # zero tangents of forward mode: a storage with a size and no memory
        return None
    try:
        memory = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None
    if type(tensor) not in PLAIN_CLASSES and memory.device.type != "meta" and _is_empty_shell(memory):
        raise UnsupportedError(
            f"a tensor of shape {tuple(tensor.shape)} is a {type(tensor).__module__}.{type(tensor).__qualname__}: it "
            "wraps other tensors and does not tell which, so its bytes cannot be counted. Give the class "
            "`__tensor_flatten__` and `__tensor_unflatten__`, as torch asks of wrapper subclasses."
        )
    return memory


def _is_empty_shell(memory: UntypedStorage) -> bool:
    try:
        memory.data_ptr()
    except RuntimeError:
        return True
    return False


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor, of a sparse one those of its parts."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return sum(one.nbytes for one in sparse_parts(tensor) or (tensor,))


def sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the strided tensors that make up a sparse one; none for a layout without such parts."""
    tensor = tensor.detach()
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        case _:
            return ()
