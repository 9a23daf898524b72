"""`respect_saved_tensors_hooks`: what a policy keeps goes through the saved-tensor hooks around the region.

Hooks are told of what autograd saves, and what a policy keeps is not that: `save_on_cpu` around a selective region
leaves it where it is. With this option a pair of hooks is a store, and the policy keeps in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks, top_saved_tensor_hooks
from torchremat.errors import MutationError
from torchremat.regions.decisions import SAVE, Decision, OperatorContext, Policy, decision_of, describe, stored_in
from torchremat.tensors.metadata import version_of

if TYPE_CHECKING:
    from torchremat._compat.autograd import Pack, Unpack

_REGIONS = "torchremat.regions."


@dataclass(frozen=True, slots=True)
class Hooks:
    """A pair of saved-tensor hooks, as a store.

    Attributes:
        pack: Makes something of a tensor.
        unpack: Makes the tensor of that again.
    """

    pack: Pack
    unpack: Unpack

    def put(self, tensor: Tensor) -> _Packed:
        """Hand a tensor to the hooks."""
        return _Packed(self.pack(tensor), self.unpack, tensor.nbytes, ref(tensor), version_of(tensor))


@dataclass(frozen=True, slots=True)
class _Packed:
    """What hooks have made of a tensor.

    Attributes:
        packed: That.
        unpack: The hook that makes the tensor of it.
        stored_bytes: The tensor's bytes; what hooks make of them nobody knows.
        given: The tensor that they were given, as long as anybody has it.
        version: Its version then.
    """

    packed: object
    unpack: Unpack
    stored_bytes: int
    given: ReferenceType[Tensor]
    version: int

    def get(self) -> Tensor:
        """Return the tensor.

        Raises:
            MutationError: The hooks kept the very memory that they were given, and it was written in place since.
        """
        with torch.no_grad():
            tensor = self.unpack(self.packed)
        given = self.given()
        if given is None or tensor.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
            return tensor
        now = version_of(given)
        if now != self.version:
            raise MutationError(
                f"a tensor of shape {tuple(tensor.shape)} that a policy keeps was written in place: it was at version "
                f"{self.version} when the saved-tensor hooks around the region got it, and is at {now} now. They keep "
                "its memory; let them keep a copy, or make the operation out of place."
            )
        return tensor

    def prefetch(self) -> None:
        """Do nothing: hooks are asked once, and answer at once."""


class IntoHooks:
    """A policy that keeps in hooks what another one keeps; what that one puts into a store goes there.

    Args:
        policy: The other one.
        hooks: The hooks.
    """

    def __init__(self, policy: Policy, hooks: Hooks) -> None:
        self._policy = policy
        self._kept = stored_in(hooks)

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        """Return what becomes of the output of `op`."""
        decision = decision_of(self._policy(ctx, op, *args, **kwargs), self._policy)
        return self._kept if decision is SAVE else decision

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._policy, name)  # what it says of how it wants to be asked

    def __repr__(self) -> str:
        return describe(self._policy)


def hooks_around() -> Hooks | None:
    """Return the saved-tensor hooks of a user that are on in this thread; those of regions are passed by."""
    passed: list[tuple[Pack, Unpack]] = []
    try:
        while (top := top_saved_tensor_hooks(True)) is not None:
            if not str(getattr(top[1], "__module__", "")).startswith(_REGIONS):
                return Hooks(*top)
            passed.append(top)
            pop_saved_tensor_hooks()
    finally:
        for pack, unpack in reversed(passed):
            push_saved_tensor_hooks(pack, unpack)
    return None
