"""What one region adds to a step on the device: of the host, whose calls are all there is for small tensors."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

import torch
from findings import IS_SMALL, section
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchremat

DEVICE = torch.device("cuda", 0)
STEPS, ROUNDS = (5, 2) if IS_SMALL else (200, 11)


def _sines(x: Tensor) -> Tensor:
    for _ in range(4):
        x = x.sin()
    return x


def _layers() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to(DEVICE)


def added(function: Callable[[Tensor], Tensor]) -> object:
    """Microseconds of a step, by the host's clock around all of them and a wait, ways in turn."""
    x = torch.rand(16, 16, device=DEVICE, requires_grad=True)

    def by_hand() -> None:
        with torch.no_grad():
            function(x)
        function(x).sum().backward()

    ways = {
        "by hand": by_hand,
        "torch": lambda: checkpoint(function, x, use_reentrant=False).sum().backward(),
        "torch, rng kept out": lambda: (
            checkpoint(function, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
        ),
        "ours": lambda: torchremat.checkpoint(function, x).sum().backward(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            for _ in range(STEPS):
                way()
            torch.cuda.synchronize()
            if turn:
                seconds[name].append((time.perf_counter() - start_s) / STEPS * 1e6)
    gc.enable()
    medians = {name: round(statistics.median(times), 1) for name, times in seconds.items()}
    ours, theirs = medians["ours"] - medians["by hand"], medians["torch"] - medians["by hand"]
    return medians | {"ratio of what is added": round(ours / theirs, 3)}


if __name__ == "__main__":
    section(
        sines=lambda: added(_sines),
        layers=lambda: added(_layers()),
        dropout=lambda: added(nn.Dropout(0.1)),
        encoder=lambda: added(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to(DEVICE)),
    )
