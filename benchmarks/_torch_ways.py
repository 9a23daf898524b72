"""What torch itself offers for saving activation memory in eager mode, put on the models of the examples.

Each way takes a new model and changes it in place, as its documentation says to use it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import decoders
import mixtures
import models

Way = Callable[[nn.Module], None]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks that a user would checkpoint, in the order in which they run."""
    if isinstance(model, models.UNet):
        return [*model.down1, *model.down2, *model.middle, *model.up2, *model.up1]
    return list(model.blocks)


def every(step: int, first: int = 0) -> Way:
    """Checkpoint every `step`-th block, beginning with block `first`."""

    def way(model: nn.Module) -> None:
        for block in blocks_of(model)[first::step]:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    return way


def evenly(count: int) -> Way:
    """Checkpoint so many blocks, as evenly placed as they can be."""

    def way(model: nn.Module) -> None:
        blocks = blocks_of(model)
        for place in range(min(count, len(blocks))):
            block = blocks[(2 * place + 1) * len(blocks) // (2 * count)]
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)

    return way


def sequential(segments: int) -> Way:
    """`checkpoint_sequential` over the model written as a sequence."""

    def way(model: nn.Module) -> None:
        model.forward = partial(_SEQUENCES[type(model)], model, segments)

    return way


def _gpt_forward(model: models.GPT, segments: int, tokens_bt: Tensor) -> Tensor:
    places = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
    x_btd = model.embed(tokens_bt) + model.position(places)
    x_btd = checkpoint_sequential(list(model.blocks), segments, x_btd, use_reentrant=False)
    return model.head(model.norm(x_btd))


def _decoder_forward(model: decoders.Decoder, segments: int, tokens_bt: Tensor) -> Tensor:
    x_btd = checkpoint_sequential(list(model.blocks), segments, model.embed(tokens_bt), use_reentrant=False)
    return model.head(model.norm(x_btd))


def _mixture_forward(model: mixtures.Mixture, segments: int, tokens_bt: Tensor) -> tuple[Tensor, Tensor]:
    x_btd = model.embed(tokens_bt)
    functions = [lambda state, block=block: block(*state) for block in model.blocks]
    state = (x_btd, x_btd.new_zeros(()))
    x_btd, balance = checkpoint_sequential(functions, segments, state, use_reentrant=False)
    return model.head(model.norm(x_btd)), balance


def _resnet_forward(model: models.ResNet, segments: int, x: Tensor) -> Tensor:
    x = model.relu(model.norm(model.first(x)))
    x = checkpoint_sequential(model.blocks, segments, x, use_reentrant=False)
    return model.head(x.mean(dim=(2, 3)))


# A U-Net is no sequence of modules. It is one of functions on a tuple: the value on its way, and the skips so far.
State = tuple[Tensor, ...]


def _unet_forward(model: models.UNet, segments: int, x: Tensor) -> Tensor:
    def on_top(module: nn.Module) -> Callable[[State], State]:
        return lambda state: (module(state[0]), *state[1:])

    def shrink(module: nn.Module) -> Callable[[State], State]:
        return lambda state: (module(state[0]), *state)

    def grow(module: nn.Module) -> Callable[[State], State]:
        def run(state: State) -> State:
            top, skip, *rest = state
            return (torch.cat([module(F.interpolate(top, scale_factor=2.0)), skip], dim=1), *rest)

        return run

    functions = [
        *map(on_top, [model.first, *model.down1]),
        shrink(model.shrink1),
        *map(on_top, model.down2),
        shrink(model.shrink2),
        *map(on_top, model.middle),
        grow(model.grow2),
        *map(on_top, model.up2),
        grow(model.grow1),
        *map(on_top, [*model.up1, model.last]),
    ]
    return checkpoint_sequential(functions, segments, (x,), use_reentrant=False)[0]


_SEQUENCES = {
    models.GPT: _gpt_forward,
    models.ResNet: _resnet_forward,
    models.UNet: _unet_forward,
    decoders.Decoder: _decoder_forward,
    mixtures.Mixture: _mixture_forward,
}

_ATEN = torch.ops.aten
MATMULS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default})
ATTENTION = frozenset({_ATEN._scaled_dot_product_flash_attention_for_cpu.default})
CONVOLUTIONS = frozenset({_ATEN.convolution.default})


def selective(*, every: int | None) -> Way:
    """Selective checkpointing of every block: attention is kept, and of matmuls and convolutions every so many."""

    def way(model: nn.Module) -> None:
        for block in blocks_of(model):
            contexts = partial(_contexts, every)
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)

    return way


def _contexts(every: int | None) -> tuple[object, object]:
    """The contexts of one call. As in torchtitan, of the matmuls every second one is kept, and all else of the list."""
    counts = {False: 0, True: 0}

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        heavy = every is not None and (op in MATMULS or op in CONVOLUTIONS)
        if heavy and every == 2:
            counts[context.is_recompute] += 1
            heavy = counts[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if heavy or op in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


WAYS: dict[str, Way] = {
    "checkpoint every block": every(1),
    "checkpoint every 2nd block": every(2),
    "checkpoint every 4th block": every(4),
    "`checkpoint_sequential`, 2 segments": sequential(2),
    "`checkpoint_sequential`, 3 segments": sequential(3),
    "`checkpoint_sequential`, 4 segments": sequential(4),
}
# Every other block may be the even ones or the odd ones.
OFFSETS: dict[str, Way] = {
    f"checkpoint every {step}{'nd' if step == 2 else 'th'} block, from block {first + 1}": every(step, first)
    for step in (2, 4)
    for first in range(1, step)
}
SELECTIVE: dict[str, Way] = {
    "selective, matmuls, attention, convolutions kept": selective(every=1),
    "selective, every other of them kept": selective(every=2),
    "selective, attention alone kept": selective(every=None),
}
