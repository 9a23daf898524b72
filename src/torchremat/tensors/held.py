"""One tensor that a region keeps for its recompute.

A region's inputs are saved tensors of whatever encloses the region (Rule 2). If saved-tensor hooks are active (of an
outer region, of `save_on_cpu`, of user code), the tensor goes through them; otherwise a detached alias of it is kept
together with its version, since inside of hooks autograd's own version check is lost.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast
from weakref import ref

from torch import Tensor, nn

from torchremat._compat.autograd import set_grad_mode, top_saved_tensor_hooks
from torchremat._compat.modes import without_torch_function
from torchremat.tensors.metadata import metadata_of, version_of, with_strides
from torchremat.tensors.parts import attributes_of

if TYPE_CHECKING:
    from torchremat._compat.autograd import Unpack


class _Holding(threading.local):
    now = False


# Whether, in this thread, hooks are being given a tensor that a region holds, and not one that an operation saves.
holding = _Holding()


class HeldTensor:
    """A tensor at a version.

    NOTE [ Why an alias ]
    The alias has no `grad_fn`. If the tensor itself were kept, an in-place operation inside the region would make its
    `grad_fn` a node of the region's own graph, whose packed objects own the region: a cycle through C++ that no
    collector sees. Parameters cannot be written in place under grad mode; they are kept as they are, so that a
    recompute gets the same parameter object as the forward. (Keeping leaves in general would be wrong: a tensor that is
    no leaf in a forward is a leaf in the recompute of the region around it, which has to pack the same tensors.) A
    tensor that does not require grad is handed out itself as long as other code keeps it alive: that code may compare
    it by `is`.
    """

    __slots__ = ("_alias", "_attributes", "_kept", "_metadata", "_original", "_unpack", "requires_grad", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.requires_grad = tensor.requires_grad
        self._unpack = None
        self._alias = None
        self._original = None
        self._attributes = None  # a parameter's attributes are restored with its module's
        if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
            self._kept: object = tensor  # See NOTE [ Why an alias ]
            self.version = version_of(tensor)
            return
        if tensor.__dict__:
            # Not the parts of a wrapper: these are its memory, which hooks may be about to move.
            self._attributes = attributes_of(tensor) or None
        hooks = top_saved_tensor_hooks(True)
        if type(self) is HeldTensor and hooks is None and type(tensor) is Tensor:
            alias = tensor.detach()  # as below, except for two calls
            self.version = version_of(tensor)
        else:
            alias = self.detached(tensor, hooks is not None and self.requires_grad)
            self.version = self.version_in(alias)
        if hooks is None:
            self._kept = alias
            if not self.requires_grad:
                self._original = ref(tensor)
            return
        pack, self._unpack = hooks
        self._metadata = metadata_of(tensor)
        # Hooks that return the tensor they were given are equivalent to none: the version must still be checked then.
        self._alias = ref(alias)
        # A hook's own computation is not part of the graph; autograd calls hooks without grad as well.
        holding.now = True
        set_grad_mode(False)  # a region's forward has it on
        try:
            self._kept = pack(alias)
        finally:
            set_grad_mode(True)
            holding.now = False

    @property
    def kept(self) -> object:
        """The tensor, or the object that the hooks around the region have made of it."""
        return self._kept

    def unpack(self) -> Tensor:
        """Return the tensor for a recompute, a new leaf, or the same parameter; grad mode is on.

        Raises:
            ChangedError: The tensor was written in place since.
        """
        tensor: Tensor = self._kept  # pyright: ignore[reportAssignmentType]: or the object that a hook has made of it
        if self._unpack is not None:
            set_grad_mode(False)
            try:
                tensor = self._unpack(self._kept)
                tensor = with_strides(tensor, self._metadata)
            finally:
                set_grad_mode(True)
        if self._alias is None or self._alias() is tensor:
            now = version_of(tensor) if type(self) is HeldTensor else self.version_in(tensor)
            if now != self.version:
                raise ChangedError(self.version, now)
        if type(tensor) is not Tensor and self._alias is None and isinstance(tensor, nn.Parameter):
            return tensor
        original = None if self._original is None else self._original()
        if original is not None and not original.requires_grad and self._has_attributes(original):
            return original
        alias = self.detached(tensor, self.requires_grad)
        if self._attributes:
            # The parts of a wrapper are attributes as well, and an alias has its own parts.
            own = cast("dict[str, object]", alias.__dict__)
            for name in self._attributes.keys() - own.keys():
                own[name] = self._attributes[name]
        return alias

    def _has_attributes(self, tensor: Tensor) -> bool:
        now, then = attributes_of(tensor) if tensor.__dict__ else {}, self._attributes or {}
        return now.keys() == then.keys() and all(now[name] is one for name, one in then.items())

    @property
    def is_hooked(self) -> bool:
        """Whether hooks have packed the tensor."""
        return self._unpack is not None

    def alias(self) -> Tensor | None:
        """Return the kept alias, if it exists, hooks have not packed it, and it was not written since."""
        alias = self._kept
        if type(self) is not HeldTensor or type(alias) is not Tensor or self._unpack is not None:
            return None
        return alias if self.version_in(alias) == self.version else None

    def hand_over(self, packed: object, unpack: Unpack) -> None:
        """Keep the object that hooks have made of the alias, and no longer the alias."""
        alias = self._kept
        assert isinstance(alias, Tensor)
        self._metadata = metadata_of(alias)
        self._alias = ref(alias)
        self._original = None  # a write to it would go unseen
        self._unpack = unpack
        self._kept = packed

    def detached(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """Return an alias of the tensor without its graph."""
        if type(tensor) is Tensor:
            alias = tensor.detach()
            return alias.requires_grad_() if requires_grad else alias
        kind = type(tensor)
        # A subclass's handling of operators is user code, which follows the current modes and settings.
        with without_torch_function():
            alias = tensor.detach()
            if type(alias) is not kind:
                alias = alias.as_subclass(kind)
            return alias.requires_grad_() if requires_grad else alias

    def version_in(self, alias: Tensor) -> int:
        """Return the version of the tensor that an alias represents."""
        return version_of(alias)


class ChangedError(Exception):
    """A held tensor was written in place; the code that unpacks it knows its name."""

    def __init__(self, before: int, now: int) -> None:
        super().__init__(before, now)
        self.before = before
        self.now = now
