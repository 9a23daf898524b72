"""One tensor that a region keeps for its recompute.

A region's inputs are saved tensors of whatever encloses the region (rule 2): if saved-tensor hooks are active, of an outer
region, of `save_on_cpu`, of anybody, the tensor goes through them; otherwise a detached alias of it is kept together with its
version, since with hooks around autograd's own version check is lost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchremat._compat import top_saved_tensor_hooks


class SavedTensor:
    """A tensor at a version.

    NOTE [ Why an alias ]
    The alias has no `grad_fn`. If the tensor itself were kept, an in-place operation inside the region would make its
    `grad_fn` a node of the region's own graph, whose packed objects own the region: a cycle through C++ that no collector
    sees. Leaves that require grad cannot be written in place under grad mode; they are kept as they are, so that a
    recompute is called with the very parameter that the forward was called with.
    """

    __slots__ = ("_hooked", "_kept", "_unpack", "requires_grad", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self.version: int | None = None if tensor.is_inference() else tensor._version
        self._unpack = None
        if self.requires_grad and tensor.is_leaf:
            self._kept: object = tensor  # See NOTE [ Why an alias ]
            return
        alias = tensor.detach()
        hooks = top_saved_tensor_hooks(True)
        if hooks is None:
            self._kept = alias
            return
        pack, self._unpack = hooks
        # Whatever a hook computes is none of the graph's business; autograd calls hooks without grad as well.
        with torch.no_grad():
            self._kept = pack(alias)

    def is_changed(self) -> int | None:
        """Return the version that the tensor has now if it is another than at the start, else None."""
        if self._unpack is not None or self.version is None:
            return None
        now = self._kept._version  # pyright: ignore[reportAttributeAccessIssue]
        return None if now == self.version else now

    def unpack(self) -> Tensor:
        """Return the tensor for a recompute: a leaf of its own, or the same leaf as in the forward."""
        tensor = self._kept
        if self._unpack is not None:
            with torch.no_grad():
                tensor = self._unpack(tensor)
        assert isinstance(tensor, Tensor)
        if tensor.requires_grad and tensor.is_leaf and self._unpack is None:
            return tensor
        # Without grad mode: `detach()` under hooks would be recorded.
        return tensor.detach().requires_grad_(self.requires_grad)
