"""What a region's forward sees of its modules: parameters, buffers, and whether they train.

A recompute has to see the same. What the forward itself changes (BatchNorm statistics) is kept and shown to the
recompute; what anybody replaces (`functional_call`, a new `Parameter`) is put back for it; what anybody writes in place
is gone, and an error names it.

    state                          between forward and recompute         the recompute
    buffer                         changed by the forward                sees a clone from before
    parameter or buffer            replaced by another tensor            sees the one from before
    small buffer                   written in place                      sees a clone from before
    parameter or large buffer      written in place                      raises MutationError
    `training`                     flipped                               sees the flag from before

Missing on purpose: writes that bump no version: those of `.data`, and of kernels that are not torch's. Native BatchNorm
does not bump the versions of its buffers, so that a write by another forward is seen in training, where they are kept,
and not in evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchremat._compat.sharding import has_fsdp, is_hook_of_fsdp, is_managed
from torchremat.ambient.locks import EXCHANGING
from torchremat.regions.optimizers import listen_to_optimizers
from torchremat.regions.sharding import WatchedShard, watch
from torchremat.tensors.copies import again

_ScriptModule = torch.jit.ScriptModule
T = TypeVar("T")
_WATCHES = "_torchremat_only_watches"

_Holder = MutableMapping[str, Any]  # of tensors and None; a module's own attributes hold other things as well

# NOTE [ Which buffers a forward changes ]
# Versions cannot tell: native BatchNorm does not bump that of `running_mean`. So the first forward of a module in a
# training state is watched by value, all of its buffers cloned and compared, and what it changed is remembered per
# module; from then on only those are cloned, and small ones, since a module may change one every tenth time. In modules
# that the user has named every forward is a first one. Norms that may not change their statistics the first time, with
# a momentum of 0 that grows, are known by their class.
#
# NOTE [ Hooks that compute weights ]
# The hooks of the outermost modules run outside of the region. Those of `weight_norm` and `spectral_norm` compute a
# weight, a plain attribute then, and write to buffers that the forward itself does not read. So the attribute is the
# forward's for the recompute, and all buffers are kept.
_changed: WeakKeyDictionary[nn.Module, dict[bool, frozenset[str]]] = WeakKeyDictionary()
_SMALL_BYTES = 16 << 10
_NORMS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


class ChangedStateError(Exception):
    """A parameter or buffer was written in place."""

    def __init__(self, name: str, before: int, now: int, *, by_forward: bool = False) -> None:
        super().__init__(name, before, now)
        self.name = name
        self.before = before
        self.now = now
        self.by_forward = by_forward

    def message(self, region: str) -> str:
        """Return the words for it, given those for the region."""
        if self.by_forward:
            return (
                f"{region}: its forward wrote `{self.name}` in place, a large buffer that it had left alone the "
                "first time, so that there is no copy of what it was. Write out of place, or name the module "
                "in `guard=[...]`, so that all of its buffers are copied before each forward."
            )
        return (
            f"{region}: its parameter or buffer `{self.name}` was changed in place between forward and recompute: "
            f"version {self.before} then, {self.now} now. Recomputing would give wrong gradients. Run backward before "
            "`optimizer.step()` or whatever else writes to it."
        )


class _Kept(NamedTuple):
    """A buffer, and what it was before the forward."""

    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    before: Tensor


class ModuleState:
    """The state of some modules, as a forward saw it."""

    __slots__ = (
        "_copies",
        "_kept",
        "_large",
        "_modules",
        "_named",
        "_shards",
        "_small",
        "_training",
        "_unknown",
        "_watched",
        "_written",
        "generators",
    )

    def __init__(self, modules: list[nn.Module], named: Sequence[nn.Module] = ()) -> None:
        self._modules = modules
        self._training: list[tuple[nn.Module, bool]] = []
        self._watched: list[tuple[_Holder, str, Tensor, int]] = []
        self._kept: list[_Kept] = []
        self._unknown: list[nn.Module] = []
        self._small: list[_Kept] = []
        self._copies: dict[int, Tensor] = {}  # of small buffers that the forward has left alone, by their id
        self._large: list[tuple[Tensor, int]] = []
        self._written: set[int] = set()  # those of them, by id, that the forward itself has written
        self._named = {inner for module in named for inner in module.modules()} if named else ()
        self._shards: list[WatchedShard] = []
        pending = list(modules)
        if pending:
            listen_to_optimizers()  # See NOTE [ Optimizers that bump no version ]
        seen: set[nn.Module] = set()
        training = self._training
        may_be_managed = has_fsdp()
        self.generators: list[torch.Generator] = []
        while pending:
            module = pending.pop()
            if module in seen:
                continue
            seen.add(module)
            training.append((module, module.training))
            # Torch's own modules have none, and looking for one takes as long as all the rest.
            if type(module).__module__[:9] != "torch.nn." and torch.Generator in map(type, module.__dict__.values()):
                self.generators += [one for one in module.__dict__.values() if type(one) is torch.Generator]
            if isinstance(module, _ScriptModule):
                # Its state is C++'s: it can be watched, and not be exchanged.
                self._watch(dict(module.named_parameters(recurse=False)))
                self._watch(dict(module.named_buffers(recurse=False)))
            else:
                if module._parameters:
                    self._watch(module._parameters)
                    if may_be_managed and is_managed(module):
                        self._shards += watch(module)
                if module._buffers:
                    self._keep(module)
            if module._modules:
                pending += [child for child in module._modules.values() if child is not None]
        for module in modules:
            # See NOTE [ Hooks that compute weights ]
            if _computes_weights(module):
                own = {name: one for name, one in module.__dict__.items() if isinstance(one, Tensor)}
                self._watch(module.__dict__, own)

    def _watch(self, holder: _Holder, tensors: _Holder | None = None) -> None:
        watched = self._watched
        for name, tensor in (holder if tensors is None else tensors).items():
            if tensor is None:
                continue
            try:
                watched.append((holder, name, tensor, tensor._version))
            except RuntimeError:  # an inference tensor has no version, and cannot be written in a forward with grad
                continue
            if type(tensor) is nn.Parameter or type(tensor) is Tensor:
                continue
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
                watched.pop()  # the forward is about to make it

    def _keep(self, module: nn.Module) -> None:
        names = None if module in self._named else _changed.get(module, {}).get(module.training)
        if isinstance(module, _NORMS) and module.training:
            names = module._buffers.keys()
        elif module in self._modules and _computes_weights(module):
            names = module._buffers.keys()  # See NOTE [ Hooks that compute weights ]
        elif names is None:
            self._unknown.append(module)
        for name, buffer in module._buffers.items():
            if buffer is None or isinstance(buffer, UninitializedBuffer):
                continue
            if names is None or name in names:
                version = 0 if buffer.is_inference() else buffer._version
                self._kept.append(_Kept(module, name, buffer, version, buffer.detach().clone()))
            elif buffer.nbytes <= _SMALL_BYTES and not buffer.is_inference():
                self._small.append(_Kept(module, name, buffer, buffer._version, buffer.detach().clone()))
            else:
                self._watch(module._buffers, {name: buffer})
                if not buffer.is_inference():
                    self._large.append((buffer, buffer._version))

    def settle(self) -> None:
        """Keep only the buffers that the forward has changed."""
        self._written = {id(buffer) for buffer, version in self._large if buffer._version != version}
        for one in self._small:
            if one.buffer._version != one.version or one.module._buffers.get(one.name) is not one.buffer:
                self._kept.append(one)
            else:
                self._leave(one)
        self._small = []
        if self._unknown:
            self._settle_unknown()
        if self._kept:
            self._let_buffers_go()

    def _settle_unknown(self) -> None:
        # See NOTE [ Which buffers a forward changes ]
        changed: dict[nn.Module, set[str]] = {module: set() for module in self._unknown}
        kept, self._kept, self._unknown = self._kept, [], []
        for one in kept:
            now = one.module._buffers.get(one.name)
            if one.module not in changed or now is not one.buffer or not _equal(one.buffer, one.before):
                self._kept.append(one)
                changed.get(one.module, set[str]()).add(one.name)
            elif not one.buffer.is_inference():
                self._leave(one)
        for module, names in changed.items():
            _changed.setdefault(module, {})[module.training] = frozenset(names)

    def _let_buffers_go(self) -> None:
        """Hold no buffer that was changed, which in a region within a recompute is itself a copy made for that.

        Of buffers that share a storage, a recompute has to see copies that share one as well.
        """
        buffers = [one.buffer for one in self._kept]
        if not all(type(one) is Tensor and one.layout is torch.strided for one in buffers):
            return
        storages = {one.untyped_storage().data_ptr() for one in buffers}
        if len(storages) == len(self._kept) and 0 not in storages:
            self._kept = [one._replace(buffer=one.before) for one in self._kept]

    def _leave(self, one: _Kept) -> None:
        """Take a buffer that the forward has left alone, and that another forward may change."""
        self._watched.append((one.module._buffers, one.name, one.buffer, one.version))
        if one.buffer.nbytes <= _SMALL_BYTES:
            self._copies[id(one.buffer)] = one.before

    @property
    def has_shards(self) -> bool:
        """Whether FSDP2 manages some of the parameters."""
        return bool(self._shards)

    def parameters(self) -> list[Tensor]:
        """Return the parameters and watched buffers."""
        return [tensor for _, _, tensor, _ in self._watched]

    def replace(self, by: Callable[[Tensor], Tensor]) -> None:
        """Let each parameter and watched buffer be the one that `by` makes of it."""
        new = [(holder, name, tensor, by(tensor), version) for holder, name, tensor, version in self._watched]
        self._watched = [
            (holder, name, now, version if now is before else now._version)
            for holder, name, before, now, version in new
        ]

    def are_here(self) -> bool:
        """Return whether the modules are as the forward saw them, so that nothing has to be restored.

        Raises:
            ChangedStateError: A parameter or buffer was written in place.
            UnsupportedError: A parameter is sharded now, and was not.
        """
        if self._shards:
            self._check_shards()
        same = not self._kept and not self._small
        for holder, name, tensor, version in self._watched:
            if tensor._version != version:
                if id(tensor) in self._copies:
                    same = False
                    continue
                by_forward = id(tensor) in self._written
                raise ChangedStateError(self._name(holder, name), version, tensor._version, by_forward=by_forward)
            if holder.get(name) is not tensor:
                same = False
        for module, flag in self._training:
            if module.training is not flag:
                same = False
        return same

    def _check_shards(self) -> None:
        for one in self._shards:
            now = one.version_now()
            name = one.shard.name or self._name(one.module._parameters, one.name)
            if now is not None:
                raise ChangedStateError(name, one.version, now)
            one.check_gathered(name)

    def restore(self, stack: ExitStack) -> None:
        """Let the modules be as the forward saw them until `stack` is closed.

        Buffers are exchanged, not written: a `copy_` into a buffer makes every node that saved it raise.
        """
        stack.enter_context(EXCHANGING)
        kept = [*self._kept, *self._small]  # the latter while the forward still runs
        clones = again([one.buffer for one in kept], [one.before for one in kept])
        for one, clone in zip(kept, clones, strict=True):
            _exchange(stack, one.module._buffers, one.name, clone)
        for holder, name, tensor, version in self._watched:
            now = holder.get(name)
            if tensor._version != version:
                _exchange(stack, holder, name, self._copies[id(tensor)].clone())
            elif now is not tensor and _is_plain(now) and _is_plain(tensor):
                _exchange(stack, holder, name, tensor)
        for module, flag in self._training:
            if module.training is not flag:
                stack.callback(setattr, module, "training", module.training)
                module.training = flag

    def _name(self, holder: _Holder, name: str) -> str:
        for outer in self._modules:
            prefix = cast("str", getattr(outer.__dict__.get("forward"), "name", ""))  # of a wrapped module
            for inner_name, module in outer.named_modules(prefix=prefix):
                if any(one is holder for one in (module._parameters, module._buffers, module.__dict__)):
                    return f"{inner_name}.{name}" if inner_name else name
        return name


def only_watches(hook: T) -> T:
    """Return a forward pre-hook, which from now on no region takes for one that computes weights."""
    setattr(hook, _WATCHES, True)
    return hook


def _computes_weights(module: nn.Module) -> bool:
    # See NOTE [ Hooks that compute weights ]
    hooks = module._forward_pre_hooks
    return bool(hooks) and not all(hasattr(hook, _WATCHES) or is_hook_of_fsdp(hook) for hook in hooks.values())


def _equal(now: Tensor, before: Tensor) -> bool:
    if now.device.type == "meta":
        return False
    return now.shape == before.shape and now.dtype == before.dtype and torch.equal(now, before)


def _is_plain(tensor: Tensor | None) -> bool:
    # Whoever exchanges sharded tensors for whole ones (FSDP) does so in the recompute as well.
    return tensor is None or type(tensor) is Tensor or type(tensor) is nn.Parameter


def _exchange(stack: ExitStack, holder: _Holder, name: str, tensor: Tensor) -> None:
    if name in holder:
        stack.callback(holder.__setitem__, name, holder[name])
    else:
        stack.callback(holder.pop, name, None)
    holder[name] = tensor
