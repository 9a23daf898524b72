"""Reference counts of tensors and storages, which torch does not document, and classes that hold other tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import Node
from torch.utils import _pytree

from torchremat._compat.binding import private

tensor_uses: Callable[[Tensor], int] = private("Tensor._use_count", needed_for="spill")
storage_uses: Callable[[int], int] = private("_C._storage_Use_Count", needed_for="spill")

# NOTE [ Who else holds a tensor ]
# A C++ tensor counts its owners; its Python object, while it exists, is one of them, and has its own count of Python
# owners. From torch 2.10 on C++ owns the object as well, once, if any C++ owner of the tensor exists. A storage is
# counted in the same way, and each tensor in it owns it once. The caller holds the object in a list and nowhere else:
# the count of a variable differs between versions of Python.


def holders_in_torch(tensor: Tensor) -> int:
    """Return how many owners a tensor has in C++: nodes that save it, views of it."""
    return tensor_uses(tensor) - 1


def holders_of(held: Sequence[object]) -> int:
    """Return how many owners an object has in addition to the given list, which holds it alone."""
    return sys.getrefcount(held[0]) - 2  # the list and the argument


def holders_in_python(held: list[Tensor]) -> int:
    """Return how many Python owners a tensor has in addition to the given list, which holds it alone."""
    return holders_of(held) - (_are_held_by_torch()[0] if holders_in_torch(held[0]) else 0)


def tensors_in(held: list[UntypedStorage]) -> int:
    """Return how many tensors lie in a storage that only a list holds; any other owner counts as one more."""
    shared = _are_held_by_torch()[1]
    return storage_uses(held[0]._cdata) - 1 + sys.getrefcount(held[0]) - 2 - shared


@cache
def _are_held_by_torch() -> tuple[int, int]:
    """Return 1 if C++ owns the object of a tensor that it owns, 0 if it does not; and the same for a storage."""
    # See NOTE [ Who else holds a tensor ]; a view holds its base.
    with torch.inference_mode(mode=False):
        view = torch.empty(2)[1:]
    tensor, storage = [view._base], [view.untyped_storage()]
    return sys.getrefcount(tensor[0]) - 2, sys.getrefcount(storage[0]) - 2


def sequence_of(node: Node) -> int:
    """Return the number of a node; a backward runs nodes from the highest number to the lowest."""
    return cast("Callable[[], int]", getattr(node, "_sequence_nr"))()  # noqa: B009  missing in torch's types


is_wrapper_subclass: Callable[[Tensor], bool] = private(
    "utils._python_dispatch.is_traceable_wrapper_subclass", needed_for="counting the bytes of tensors"
)

_jagged: type = private("nested._internal.nested_tensor.NestedTensor", needed_for="counting flops")


def is_nested_strided(tensor: Tensor) -> bool:
    """Return whether a tensor is nested in the older layout: a kind in C++ with kernels of its own, and no shape."""
    return tensor.is_nested and tensor.layout is torch.strided


def is_jagged(kind: type) -> bool:
    """Return whether a class is that of nested tensors of the jagged layout."""
    return kind is _jagged


no_torch_function: Any = private("_C._disabled_torch_function_impl", needed_for="releasing gradients in the backward")


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor fill a range of memory without gaps, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


T = TypeVar("T", bound=Tensor)


def shell_of(kind: type[T], tensor: Tensor) -> T:
    """Return a tensor of a class that looks like another one and has no memory."""
    make = cast("Callable[..., T]", private("Tensor._make_wrapper_subclass", needed_for="releasing gradients"))
    # With a storage of its own size, what goes past operators, `share_memory_()`, would read at address 0.
    return make(kind, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device, storage_size=0)


class Registration(Protocol):
    """How torch's pytree flattens a container."""

    flatten_fn: Callable[[object], tuple[list[object], object]]
    unflatten_fn: Callable[[list[object], object], object]


registered_containers = cast("dict[type, Registration]", _pytree.SUPPORTED_NODES)
