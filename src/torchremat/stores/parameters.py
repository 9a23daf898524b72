"""Tensors that the model keeps alive anyway: parameters and buffers, found through the modules being called."""

from __future__ import annotations

from torch import Tensor, UntypedStorage, nn

from torchremat.frames import running_modules


def is_leaf_of_model(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, any other leaf that requires grad, or a view of either.

    `nn.Linear` saves `weight.t()`, which is neither a leaf nor a `Parameter`.
    """
    base = tensor._base
    return _is_leaf(tensor) or (base is not None and _is_leaf(base))


def _is_leaf(tensor: Tensor) -> bool:
    return (tensor.is_leaf and tensor.requires_grad) or isinstance(tensor, nn.Parameter)


def is_in_running_module(storage: UntypedStorage) -> bool:
    """Return whether a storage belongs to a buffer or parameter that a module being called now has itself."""
    address = storage.data_ptr()
    for module in running_modules():
        for tensor in (*module.buffers(recurse=False), *module.parameters(recurse=False)):
            # Both are alive, so equal addresses mean the same storage.
            if type(tensor) in _PLAIN and tensor.untyped_storage().data_ptr() == address != 0:
                return True
    return False


_PLAIN = (Tensor, nn.Parameter)
