"""Tensors that are copied before a forward, since it may write to them.

    tensor                                       copied                          the recompute
    named by the user, `guard=[...]`             always                          sees the copy if the forward wrote it
    of a module, no parameter                    in a first forward; when it     sees the copy if it was written
                                                 was seen to change; if small
    without grad, elsewhere                      if small                        sees the copy if the forward wrote it
    named by the user that requires grad         always                          as above
    any other                                    no                              raises if it reads a written tensor

NOTE [ Which tensors a forward changes ]
Versions cannot tell: native BatchNorm does not bump the version of `running_mean`. So the first forward of a module in
a training state is watched by value: everything that the module holds by name, except parameters, is cloned and
compared, and the changed names are remembered per module. From then on only these are cloned, and small tensors, since
a module may change one every tenth time, and a module that was left out of the first forward of the one around it may
change one when it is first called. On the host the small ones are compared by value, which takes microseconds;
elsewhere it would wait for the device. Where reached code names an attribute by which a write passes the version, such
as `data`, tensors of all sizes are compared by value each time: copied, or by their bits, see `stamps.py`. In modules
that the user has named every forward counts as a first one. Norms that may leave their statistics unchanged the first
time, with a momentum of 0 that grows, are recognised by their class.

NOTE [ Hooks that compute weights ]
The hooks of the outermost modules run outside of the region. The hooks of `weight_norm` and `spectral_norm` compute a
weight, a plain attribute at that time, and write to buffers that the forward itself does not read: all buffers are
kept.

A write by other code to a tensor in a closure is an error, as in plain autograd, however small the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from torchremat._compat.accelerators import accelerator_of
from torchremat._compat.modules import WeakIdentityDict
from torchremat._compat.sharding import is_hook_of_fsdp
from torchremat.ambient.global_state import only_looks_on
from torchremat.ambient.hidden import hiding
from torchremat.state.world import World
from torchremat.tensors.copies import again, same_bits
from torchremat.tensors.metadata import version_of
from torchremat.tensors.parts import bytes_of

SMALL_BYTES = 16 << 10
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip

# The names that forwards of a module have changed, by training mode. See NOTE [ Which tensors a forward changes ]
_changed: WeakIdentityDict[nn.Module, dict[bool, frozenset[str]]] = WeakIdentityDict()


class Backup(NamedTuple):
    """A tensor, and its value before the forward.

    Attributes:
        tensor: The tensor.
        version: Its version then; -1 for an inference tensor.
        before: A copy.
        owner: The module that holds it by a name, if one does.
        name: The name, or "".
        compares: Whether only its values tell if the forward has changed it.
    """

    tensor: Tensor
    version: int
    before: Tensor
    owner: nn.Module | None
    name: str
    compares: bool

    def is_changed(self) -> bool:
        """Return whether it was written since, or may have been."""
        if version_of(self.tensor) != self.version:
            return True
        return (self.compares or self.version < 0) and not _equal(self.tensor, self.before)


class Backups:
    """Copies of the tensors that a forward may write to.

    Attributes:
        written: By id, the tensors that the forward has written; their copies stand for them.
    """

    __slots__ = ("_all", "_first", "_left", "_passes_versions", "written")

    def __init__(self, world: World) -> None:
        self._all: list[Backup] = []
        self._first: set[nn.Module] = set()
        self._left: dict[int, Tensor] = {}
        self.written: dict[int, Written] = {}
        named = world.named
        roots = [module for module in world.roots if _computes_weights(module)] if world.state else ()
        self._passes_versions = world.passes_versions
        with hiding():
            for module, name, tensor in world.state:
                self._consider(module, name, tensor, is_named=id(tensor) in named, is_hooked=module in roots)
            for tensor in world.loose:
                if id(tensor) in named or bytes_of(tensor) <= SMALL_BYTES:
                    self._copy(tensor, None, "", compares=world.passes_versions)
            if named:
                self._copy_named(world)

    def _copy_named(self, world: World) -> None:
        had = {id(one.tensor) for one in self._all}
        for tensor in world.tensors:
            if id(tensor) in world.named and id(tensor) not in had:
                self._copy(tensor, None, "", compares=False)

    def _consider(self, module: nn.Module, name: str, tensor: Tensor, *, is_named: bool, is_hooked: bool) -> None:
        if isinstance(tensor, UninitializedBuffer):
            return
        known = _changed.get(module, {}).get(module.training)
        is_norm = module.training and isinstance(module, _NORMS)
        if is_norm or is_hooked:
            self._copy(tensor, module, name, compares=False, always=True)
        elif known is None or is_named:
            self._first.add(module)
            self._copy(tensor, module, name, compares=True)
        elif name in known:
            self._copy(tensor, module, name, compares=False, always=True)
        elif bytes_of(tensor) <= SMALL_BYTES or self._passes_versions:
            compares = self._passes_versions or accelerator_of(tensor.device).is_host
            self._copy(tensor, module, name, compares=compares)

    def _copy(
        self, tensor: Tensor, owner: nn.Module | None, name: str, *, compares: bool, always: bool = False
    ) -> None:
        # A version that no tensor has makes it count as written.
        version = -2 if always else version_of(tensor)
        before = _with_attributes(tensor.detach().clone(), tensor)
        self._all.append(Backup(tensor, version, before, owner, name, compares))

    @property
    def copied(self) -> set[int]:
        """The ids of the tensors that are copied while the forward runs."""
        return {id(one.tensor) for one in self._all}

    def settle(self) -> None:
        """Keep only the copies that a recompute may need."""
        changed: dict[nn.Module, set[str]] = {module: set() for module in self._first}
        with hiding():
            for one in self._all:
                if one.is_changed():
                    self.written[id(one.tensor)] = Written(one)
                    if one.owner in changed:
                        changed[one.owner].add(one.name)
                elif one.owner is not None and bytes_of(one.tensor) <= SMALL_BYTES:
                    self._left[id(one.tensor)] = one.before
        for module, names in changed.items():
            _changed.setdefault(module, {})[module.training] = frozenset(names)
        self._all, self._first = [], set()
        self._let_go()

    def copy_again(self) -> None:
        """Replace the copies by copies of them, so that the first ones are freed."""
        self._left = {key: _with_attributes(one.clone(), one) for key, one in self._left.items()}
        for one in self.written.values():
            one.before = _with_attributes(one.before.clone(), one.before)

    def _let_go(self) -> None:
        """Release the written tensors, which in a region within a recompute are themselves copies made for it.

        Where tensors share a storage, a recompute has to see copies that share one as well.
        """
        tensors = [one.alive() for one in self.written.values()]
        if not all(type(one) is Tensor and one.layout is torch.strided for one in tensors):
            return
        storages = {one.untyped_storage().data_ptr() for one in tensors if one is not None}
        if len(storages) == len(tensors) and 0 not in storages:
            for one in self.written.values():
                one.shares = None

    def __bool__(self) -> bool:
        return bool(self._all or self.written or self._left)

    def shown(self, written_since: Iterable[int]) -> dict[int, Tensor]:
        """Return tensors for one recompute, which may write to them.

        Args:
            written_since: The ids of the tensors whose version has moved.

        Returns:
            By the id of the stand-in for each: the id of its `Written`, or its own.
        """
        found: dict[int, Tensor] = {}
        with hiding():
            if self._all:  # the forward still runs
                clones = again([one.tensor for one in self._all], [one.before for one in self._all])
                for one, clone in zip(self._all, clones, strict=True):
                    found[id(one.tensor)] = _like(clone, one.before, one.tensor.requires_grad)
            if self.written:
                each = list(self.written.values())
                shares = [one.before if one.shares is None else one.shares for one in each]
                for one, clone in zip(each, again(shares, [one.before for one in each]), strict=True):
                    found[id(one)] = _like(clone, one.before, one.requires_grad)
            for key in written_since:
                if key in self._left:
                    found[key] = _like(self._left[key].clone(), self._left[key], requires_grad=False)
        return found


class Written:
    """The stand-in for a tensor that the forward has written.

    Attributes:
        before: Its value before the forward.
        shares: The tensor itself, if it shares memory with another of them.
    """

    __slots__ = ("_tensor", "before", "requires_grad", "shares")

    def __init__(self, one: Backup) -> None:
        self.requires_grad = one.tensor.requires_grad
        self._tensor: ReferenceType[Tensor] = ref(one.tensor)
        self.before = one.before
        self.shares: Tensor | None = one.tensor

    def alive(self) -> Tensor | None:
        """Return the tensor, None if it was freed."""
        return self._tensor()


def _computes_weights(module: nn.Module) -> bool:
    # See NOTE [ Hooks that compute weights ]
    hooks = module._forward_pre_hooks
    return bool(hooks) and not all(only_looks_on(hook) or is_hook_of_fsdp(hook) for hook in hooks.values())


def _like(clone: Tensor, before: Tensor, requires_grad: bool) -> Tensor:
    if requires_grad:
        with torch.enable_grad():
            clone = clone.requires_grad_().clone()  # not a leaf, which could not be written in place
    return _with_attributes(clone, before)


def _with_attributes(clone: Tensor, tensor: Tensor) -> Tensor:
    own = cast("dict[str, object]", clone.__dict__)
    for name, value in tensor.__dict__.items():
        own.setdefault(name, value)  # the parts of a wrapper are attributes as well, and the clone has its own
    return clone


def _equal(now: Tensor, before: Tensor) -> bool:
    if now.device.type == "meta":
        return False
    return same_bits(now, before)
