"""`respect_saved_tensors_hooks`: outputs kept by a policy go through the saved-tensor hooks around the region.

Hooks see the tensors that autograd saves, and outputs kept by a policy are not among them: `save_on_cpu` around a
selective region leaves them where they are. With this option a pair of hooks is a store, and the policy keeps outputs
in it.
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
        pack: Packs a tensor into an object.
        unpack: Makes the tensor from that object again.
    """

    pack: Pack
    unpack: Unpack

    def put(self, tensor: Tensor) -> _PackedByHooks:
        """Hand a tensor to the hooks."""
        return _PackedByHooks(self.pack(tensor), self.unpack, tensor.nbytes, ref(tensor), version_of(tensor))


@dataclass(frozen=True, slots=True)
class _PackedByHooks:
    """A tensor as packed by hooks.

    Attributes:
        packed: The packed object.
        unpack: The hook that makes the tensor from it.
        stored_bytes: The tensor's bytes; the size of the packed object is unknown.
        given: The tensor that the hooks were given, as long as it is alive.
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
            MutationError: The hooks kept the same memory that they were given, and it was written in place since.
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
        """No-op: hooks are asked once, and answer at once."""


class IntoHooks:
    """A policy that keeps in hooks the outputs that another policy keeps; outputs for a store still go to the store.

    Args:
        policy: The other one.
        hooks: The hooks.
    """

    def __init__(self, policy: Policy, hooks: Hooks) -> None:
        self._policy = policy
        self._kept = stored_in(hooks)

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        """Return the decision on the output of `op`."""
        decision = decision_of(self._policy(ctx, op, *args, **kwargs), self._policy)
        return self._kept if decision is SAVE else decision

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._policy, name)  # the attributes that say how it wants to be asked

    def __repr__(self) -> str:
        return describe(self._policy)


def hooks_around() -> Hooks | None:
    """Return the user's saved-tensor hooks that are active in this thread; hooks of regions are skipped."""
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
