"""The conditions of a plan: the sizes of its inputs, and all else that decides which tensors a step saves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchremat._compat.autograd import top_saved_tensor_hooks
from torchremat._compat.checkpoints import is_checkpoint_wrapper, is_hook_of_torch_checkpoint
from torchremat._compat.dynamo import is_compiled
from torchremat._compat.sharding import is_managed
from torchremat.errors import first_of
from torchremat.tensors.structure import tensors_in


@dataclass(frozen=True, kw_only=True)
class InputSizes:
    """Elements in the inputs of each root's largest call, by name."""

    elements: dict[str, int]

    def are_exceeded(self, name: str, args: object) -> str | None:
        """Return a message if the arguments of a call of root `name` are larger than planned, else None."""
        planned = self.elements.get(name)
        if planned is None:
            return None
        found = elements_in(tensors_in(args))
        if found <= planned:
            return None
        return (
            f"`{name or 'the model'}` is called with {found} input elements, the plan was made for {planned}; its "
            "budget holds for those shapes only. Plan again with the largest batch."
        )


def elements_in(tensors: Iterable[Tensor]) -> int:
    """Return the number of elements of tensors, without 0-D tensors: no other size depends on theirs."""
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions that one call of a module found.

    Attributes:
        resting: The modules that are in evaluation mode with all their submodules, outermost first.
        autocast: By device type the dtype that autocast casts to, "" where it is off; only devices of the parameters.
        dtypes: Dtypes of the parameters.
        is_sharded: Whether FSDP2 has sharded some of the module.
        is_checkpointed: Whether some of it recomputes on its own, as after `gradient_checkpointing_enable`.
        compiled: The modules that are compiled, outermost first; None in plans that are older than this.
        checkpointed_by: The cause of its own recompute, for messages.
    """

    resting: tuple[str, ...]
    autocast: dict[str, str]
    dtypes: tuple[str, ...]
    is_sharded: bool
    is_checkpointed: bool
    compiled: tuple[str, ...] | None = None
    checkpointed_by: str = field(default="", compare=False, metadata={"written": False})

    def differences(self, now: Conditions) -> list[str]:
        """Return in words how the conditions of a call differ from these."""
        told: list[str] = []
        if now.resting != self.resting:
            told.append(
                f"{_modes(self.resting)} when it was planned, {_modes(now.resting)} now: dropout and normalisation "
                "save other tensors then. Plan in training mode, after `model.train()`"
            )
        for kind in self.autocast.keys() & now.autocast.keys():
            if now.autocast[kind] != self.autocast[kind]:
                told.append(
                    f"autocast on {kind} was {self.autocast[kind] or 'off'} when it was planned, and is "
                    f"{now.autocast[kind] or 'off'} now. Let the step that is planned enter autocast, as the training "
                    "does"
                )
        if now.dtypes != self.dtypes:
            told.append(
                f"the parameters were {', '.join(self.dtypes)} when it was planned, and are {', '.join(now.dtypes)} "
                "now. Plan after the model is cast"
            )
        if now.is_sharded != self.is_sharded:
            words = "sharded since" if now.is_sharded else "not sharded any more"
            told.append(f"the model is {words}. Plan after `fully_shard`")
        if now.is_checkpointed != self.is_checkpointed:
            words = (
                f"was made to recompute by itself after planning, by {now.checkpointed_by}, and now recomputes "
                "twice. Disable that"
                if now.is_checkpointed
                else "does not recompute by itself any more. Plan again"
            )
            told.append(f"the model {words}")
        if self.compiled is not None and (since := [name for name in now.compiled or () if name not in self.compiled]):
            told.append(
                f"{_quoted(since)} {'has' if len(since) == 1 else 'have'} been compiled since, and compiled code saves "
                "other tensors. Plan after modules are compiled"
            )
        return told


def conditions_of(module: nn.Module) -> Conditions:
    """Return the conditions that a call of a module finds now."""
    parameters = list(module.parameters())
    kinds = sorted({one.device.type for one in parameters})
    return Conditions(
        resting=tuple(_outermost(module, _is_resting)),
        autocast={kind: _autocast(kind) for kind in kinds if torch.amp.is_autocast_available(kind)},
        dtypes=tuple(sorted({str(one.dtype).removeprefix("torch.") for one in parameters})),
        is_sharded=any(map(is_managed, module.modules())),
        is_checkpointed=bool(by := _checkpointed_by(module)),
        compiled=tuple(_outermost(module, is_compiled)),
        checkpointed_by=by,
    )


def _autocast(kind: str) -> str:
    if not torch.is_autocast_enabled(kind):
        return ""
    return str(torch.get_autocast_dtype(kind)).removeprefix("torch.")


def _checkpointed_by(module: nn.Module) -> str:
    if any(getattr(one, "gradient_checkpointing", False) is True for one in module.modules()):
        return "`gradient_checkpointing_enable()` or the like"
    if any(map(is_checkpoint_wrapper, module.modules())):
        return "`checkpoint_wrapper` or `apply_activation_checkpointing`"
    hooks = top_saved_tensor_hooks(True)
    return "`torch.utils.checkpoint` around it" if hooks and is_hook_of_torch_checkpoint(hooks[0]) else ""


def _outermost(module: nn.Module, holds: Callable[[nn.Module], bool], name: str = "") -> Generator[str]:
    """Yield the names of the modules of which something holds, without those inside of others."""
    if holds(module):
        yield name
        return
    for child, inner in module.named_children():
        yield from _outermost(inner, holds, f"{name}.{child}" if name else child)


def _is_resting(module: nn.Module) -> bool:
    return not any(one.training for one in module.modules())


def _modes(resting: tuple[str, ...]) -> str:
    if not resting:
        return "all in training mode"
    if resting == ("",):
        return "all in evaluation mode"
    return f"{_quoted(resting)} in evaluation mode"


def _quoted(names: Sequence[str]) -> str:
    return first_of([f"`{name}`" for name in names])
