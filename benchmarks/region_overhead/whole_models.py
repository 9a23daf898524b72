"""What regions add to a training step of a model of real layers, whose optimizer steps.

Functions of a few operators hide what a region looks at: a real layer reaches modules, parameters, buffers, options and
code, and an optimizer writes to parameters between steps. The layers are tiny, so that the host is all there is.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from _steps import ratio
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2Model, LlamaConfig, LlamaModel

import torchremat

LAYERS = 6
WIDTH = 16
_HEADS, _TOKENS, _VOCABULARY = 2, 8, 64


@dataclass(frozen=True)
class Subject:
    """A model, the layers of it that are regions, and the loss of a step."""

    model: nn.Module
    layers: list[nn.Module]
    loss: Callable[[], Tensor]


class _Stack(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Bottleneck(nn.Module):
    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(channels, channels, size, padding=size // 2) for size in (1, 3, 1)]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(channels) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = torch.relu(norm(convolution(y)))
        return x + y


def _stacked(make: Callable[[], nn.Module], *shape: int) -> Subject:
    model, x = _Stack(make), torch.rand(shape)
    return Subject(model, list(model.layers), lambda: model(x).sum())


def _llama() -> Subject:
    config = LlamaConfig(
        vocab_size=_VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=_HEADS, num_key_value_heads=_HEADS, use_cache=False,
    )  # fmt: skip
    model, tokens = LlamaModel(config).train(), torch.randint(0, _VOCABULARY, (1, _TOKENS))
    return Subject(model, list(model.layers), lambda: model(input_ids=tokens).last_hidden_state.sum())


def _gpt2() -> Subject:
    config = GPT2Config(
        vocab_size=_VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=_HEADS, n_positions=2 * _TOKENS, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model, tokens = GPT2Model(config).train(), torch.randint(0, _VOCABULARY, (1, _TOKENS))
    return Subject(model, list(model.h), lambda: model(input_ids=tokens).last_hidden_state.sum())


# By name, with the most that a region may add of what torch's adds.
SUBJECTS: dict[str, tuple[Callable[[], Subject], float]] = {
    "Llama layer": (_llama, 0.5),
    "GPT-2 block": (_gpt2, 0.5),
    "TransformerEncoderLayer": (
        lambda: _stacked(
            lambda: nn.TransformerEncoderLayer(WIDTH, _HEADS, 2 * WIDTH, batch_first=True), 2, _TOKENS, WIDTH
        ),
        0.45,
    ),
    "bottleneck with batch norms": (lambda: _stacked(_Bottleneck, 2, 8, 4, 4), 0.6),
    "Linear, Tanh, Linear": (
        lambda: _stacked(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), 2, WIDTH),
        0.4,
    ),
}


def _twice(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    function(*args, **kwargs)
    return function(*args, **kwargs)


@contextmanager
def _by(region: Callable[..., object] | None, layers: list[nn.Module]) -> Iterator[None]:
    """Let the layers run in calls of a function; plainly if it is None."""
    for layer in layers if region is not None else ():
        layer.forward = functools.partial(region, layer.forward)
    try:
        yield
    finally:
        for layer in layers if region is not None else ():
            del layer.forward


@contextmanager
def _wrapped(subject: Subject) -> Iterator[None]:
    torchremat.wrap(subject.model, lambda _, module: any(module is layer for layer in subject.layers))
    try:
        yield
    finally:
        torchremat.unwrap(subject.model)


def added(subject: Subject, rounds: int, steps: int) -> dict[str, object]:
    """Run the ways in turn; seconds are those of this thread in one step, and what each adds to two forwards."""
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        subject.loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    ways = {
        "plain": lambda: _by(None, subject.layers),
        "twice": lambda: _by(_twice, subject.layers),
        "torch": lambda: _by(functools.partial(checkpoint, use_reentrant=False), subject.layers),
        "wrap": lambda: _wrapped(subject),
        "checkpoint": lambda: _by(torchremat.checkpoint, subject.layers),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                with way():
                    took = [_seconds(step) for _ in range(steps + 3)][3:]
                seconds[name].append(statistics.median(took))
            gc.collect()
    finally:
        gc.enable()
    over = {
        name: [(took - base) / len(subject.layers) for took, base in zip(seconds[name], seconds["twice"], strict=True)]
        for name in ("torch", "wrap", "checkpoint")
    }
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "added_s": {name: statistics.median(each) for name, each in over.items()},
        "ratio": {name: asdict(ratio(over[name], over["torch"])) for name in ("wrap", "checkpoint")},
    }


def _seconds(step: Callable[[], None]) -> float:
    start_ns = time.thread_time_ns()
    step()
    return (time.thread_time_ns() - start_ns) / 1e9
