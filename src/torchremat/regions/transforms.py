"""Regions under torch.func and under forward-mode differentiation.

A transform of torch.func wraps tensors for its level, and differentiates them with autograd at that level. If a region
runs in `grad`, `vjp` or `jacrev`, the backward that asks for its saved tensors runs before the transform ends: inputs,
closures and parameters are wrapped as in the forward, and the region can be recomputed at that level.

    transforms when the region ran      in backward             result
    grad                                grad                    recomputed
    grad                                none (vjp)              recomputed in its own `grad`
    grad                                vmap (jacrev)           the same, with the vmap set aside
    vmap, grad                          vmap, grad              recomputed
    vmap, jvp, grad                     vmap, jvp, vmap         recomputed, tangents included (hessian)
    grad, grad                          grad, grad              recomputed
    grad, grad                          grad                    UnsupportedError: see below
    grad, vmap; grad, jvp               grad                    UnsupportedError
    vmap; jvp                           none                    UnsupportedError
    none, in a dual_level               none                    recomputed, tangents included

Torch disables saved-tensor hooks in reverse-mode transforms, as hooks that compute would be called in the middle of an
operation. The hooks of a region only count, so they are still set there, for the time of the call.

NOTE [ One level loses its graph ]
`Tensor.detach` detaches at every level: a tangent, or the graph of a transform further out, would be lost. So a tensor
is detached by wrapping its inner tensor afresh, which keeps the graphs of the levels further out. These are not the
graphs of the forward, though, so a gradient that reaches them would be summed in another order, if at all: a hook on
each refuses it.

Missing on purpose: entering `vmap` and `jvp` again after they end, and tensors in the closure of a function whose
backward runs after its transform has ended (tensors of modules are found).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NoReturn

from torch import Tensor
from torch.autograd import forward_ad

from torchremat._compat.transforms import (
    REVERSE,
    has_dual_level,
    hooks_under_transforms,
    innermost_transform,
    is_dead,
    is_transformed,
    pop_grad,
    pop_transform,
    push_grad,
    push_transform,
    require_grad,
    running_transforms,
    transform_level_of,
    unwrapped,
    wrap_for_grad,
)
from torchremat.errors import CheckpointError, UnsupportedError
from torchremat.regions.calls import Body, CallArguments
from torchremat.regions.recompute import RegionRecompute
from torchremat.regions.region import Choose, Region
from torchremat.regions.settings import Settings
from torchremat.regions.slots import Key, Slot
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.metadata import version_of


def new_region(settings: Settings, label: object = None) -> Region:
    """Return a region for calls that are made now, under the transforms that run now."""
    return _TransformedRegion(settings, label) if is_transformed() else Region(settings, label)


class _HeldAtLevel(HeldTensor):
    """An input that is held at its level, with its tangent."""

    __slots__ = ("_level", "_tangent")

    def __init__(self, tensor: Tensor) -> None:
        self._level = _level_to_detach(tensor)
        self._tangent: HeldTensor | Tensor | None = None
        super().__init__(tensor)
        if self._level < 0 and innermost_transform() is None:
            tangent = forward_ad.unpack_dual(tensor).tangent
            # Without a graph it is kept as it is: torch.autograd.functional batches it in a way that cannot detach.
            self._tangent = HeldTensor(tangent) if tangent is not None and tangent.requires_grad else tangent

    def detached(self, tensor: Tensor, requires_grad: bool) -> Tensor:
        """Return an alias of the tensor without its graph at the region's level of differentiation."""
        if self._level < 0 and innermost_transform() is None:
            return super().detached(tensor, requires_grad)
        if self._level < 0:
            return tensor  # a constant of the innermost transform
        alias = wrap_for_grad(_inner(tensor), self._level)
        return require_grad(alias) if requires_grad else alias

    def version_in(self, alias: Tensor) -> int:
        """Return the version of the tensor behind an alias: a wrapper counts only its own writes."""
        return version_of(_inner(alias)) if self._level >= 0 else version_of(alias)

    def unpack(self) -> Tensor:
        """Return the tensor for a recompute, with its tangent."""
        tensor = super().unpack()
        if self._tangent is None:
            return tensor
        tangent = self._tangent.unpack() if isinstance(self._tangent, HeldTensor) else self._tangent
        return forward_ad.make_dual(tensor, tangent)


class _TransformedRegion(Region):
    """A region that runs under transforms, and is recomputed under the same ones."""

    __slots__ = ("_is_dual", "_lower", "_transforms")

    derives = False
    serves = False  # kept outputs are the inner tensors of the wrappers that autograd saves at a level

    held_tensor = _HeldAtLevel

    def __init__(self, settings: Settings, label: object = None) -> None:
        super().__init__(settings, label)
        self._transforms = _transforms()
        self._is_dual = has_dual_level()
        self._lower: set[int] = set()  # slots of tensors that autograd saves at a level further out

    def call(
        self,
        body: Body,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        roots: Sequence[object],
        *,
        last: bool = True,
        given: CallArguments | None = None,
        choose: Choose | None = None,
    ) -> object:
        """Run `body` as the next call of the region. See `Region.call`."""
        with hooks_under_transforms():
            return super().call(body, args, kwargs, roots, last=last, given=given, choose=choose)

    def _pack(self, tensor: Tensor) -> object:
        if self._transforms and _level_to_detach(tensor) < 0:
            self._lower.add(len(self.slots))
        return super()._pack(tensor)

    def unpack(self, slot: Slot, *, alone: bool = False) -> Tensor:
        """Return the tensor of a slot. See `Region.unpack`."""
        if slot.index in self._lower:
            _refuse(self._name_at(slot.index), self._transforms)
        return super().unpack(slot, alone=alone)

    def _recompute(
        self, key: Key | None, only: int | range | None, *, explains: bool = True, returns: bool = False
    ) -> RegionRecompute:
        now = _transforms()
        shared = min(len(now), len(self._transforms))
        while now[:shared] != self._transforms[:shared]:
            shared -= 1
        over = self._transforms[shared:]
        if over and (len(over) > 1 or not _is_reverse(over[0])):
            _refuse(self.name(0), self._transforms)
        with ExitStack() as stack:
            stack.enter_context(_set_aside(len(now) - shared))
            stack.enter_context(hooks_under_transforms())
            if self._is_dual and not has_dual_level():
                stack.enter_context(forward_ad.dual_level())
            again = self._recompute_again if over else super()._recompute
            found = again(key, only, explains=explains, returns=returns)
        if key is not None:
            for index in self._lower:
                if (slot := self.slots[index]()) is not None:
                    slot.drop(key)
        return found

    def _recompute_again(
        self, key: Key | None, only: int | range | None, *, explains: bool, returns: bool
    ) -> RegionRecompute:
        """Recompute in its own `grad`, which replaces the one that has ended."""
        level = push_grad()
        try:
            for call in self.calls:
                call.world.replace(lambda tensor: _revived(tensor, level))
            return super()._recompute(key, only, explains=explains, returns=returns)
        except CheckpointError:
            raise UnsupportedError(
                f"{self.name(0)} ran in a torch.func.vjp, jacrev or hessian that is over, and its recompute "
                "differs: the function depends on tensors that are differentiated and are not its arguments. Pass them "
                "as arguments (of a `torchremat.loop`: in its carry), or use torch.func.grad, which calls backward "
                "before it is over."
            ) from None
        finally:
            pop_grad()

    @staticmethod
    def detached(tensor: Tensor) -> Tensor:
        """Return the tensor without its graph at the innermost level. See NOTE [ One level loses its graph ]."""
        if innermost_transform() is None:
            return tensor.detach()
        if _level_to_detach(tensor) < 0:
            return tensor  # not ours: a slot of a level further out
        return _detached(tensor, refuses=True)


def _transforms() -> list[tuple[str, int]]:
    """Return the transforms that run, outermost first."""
    return [(str(one.key()), one.level()) for one in running_transforms() or ()]


def _is_reverse(transform: tuple[str, int]) -> bool:
    return transform[0] == str(REVERSE)


def _inner(tensor: Tensor) -> Tensor:
    """Return the tensor in a wrapper, also after its transform has ended; return other tensors unchanged."""
    return unwrapped(tensor) if is_dead(tensor) or transform_level_of(tensor) >= 0 else tensor


def _revived(tensor: Tensor, level: int) -> Tensor:
    """Return a wrapper whose transform has ended as a wrapper of this level."""
    if not is_dead(tensor):
        return tensor
    alias = wrap_for_grad(_inner(tensor), level)
    return require_grad(alias) if tensor.requires_grad else alias


def _level_to_detach(tensor: Tensor) -> int:
    """Return the innermost transform's level if it is differentiated in reverse there and wraps the tensor, else -1."""
    innermost = innermost_transform()
    if innermost is None or innermost.key() != REVERSE or transform_level_of(tensor) != innermost.level():
        return -1
    return innermost.level()


def _detached(tensor: Tensor, *, refuses: bool = False) -> Tensor:
    # See NOTE [ One level loses its graph ]
    inner = unwrapped(tensor)
    if refuses:
        further = inner
        while True:
            if further.requires_grad:
                further.register_hook(_refuse_gradient)
            if transform_level_of(further) < 0:
                break
            further = unwrapped(further)
    return wrap_for_grad(inner, transform_level_of(tensor))


@contextmanager
def _set_aside(count: int) -> Generator[None]:
    """Suspend the innermost transforms in the block."""
    popped = [pop_transform() for _ in range(count)]
    try:
        yield
    finally:
        for one in reversed(popped):
            push_transform(one)


def _refuse_gradient(_: Tensor) -> NoReturn:
    raise UnsupportedError(f"a region under torch.func: {_OVER}")


def _refuse(name: str, transforms: list[tuple[str, int]]) -> NoReturn:
    words = ", ".join(kind.rpartition(".")[2].lower() for kind, _ in transforms) or "forward-mode differentiation"
    raise UnsupportedError(f"{name} ran under torch.func ({words}, outermost first): {_OVER}")


_OVER = (
    "a gradient is asked for when the innermost transform is over, so the region cannot be recomputed as it ran. Put "
    "the region around the transform (`checkpoint(lambda x: torch.func.vmap(f)(x), x)`); for second derivatives use "
    "`torch.func.hessian` or `jacfwd` around `grad`, or `torch.autograd.grad(..., create_graph=True)`."
)
