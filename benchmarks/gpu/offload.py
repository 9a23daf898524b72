"""What offloading to pinned memory frees, and what it takes: a chain of wide blocks, whose copies can hide."""

from __future__ import annotations

import gc
import statistics

import torch
from findings import IS_SMALL, section
from torch import Tensor, nn

import torchremat

DEVICE = torch.device("cuda", 0)
ROUNDS = 2 if IS_SMALL else 8
WIDTH, ROWS, BLOCKS = (256, 512, 4) if IS_SMALL else (16384, 8192, 12)


class Wide(nn.Module):
    """A product of a wide matrix, that takes long for what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def taken(model: nn.Module, x: Tensor, store: torchremat.Host | None) -> dict[str, float]:
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    start_bytes = torch.cuda.memory_allocated()
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begins.record()
    if store is None:
        loss = model(x).square().mean()
    else:
        with torchremat.offload(store):
            loss = model(x).square().mean()
    kept_bytes = torch.cuda.memory_allocated() - start_bytes
    loss.backward()
    ends.record()
    torch.cuda.synchronize()
    return {
        "milliseconds": begins.elapsed_time(ends),
        "kept after the forward": kept_bytes,
        "peak": torch.cuda.max_memory_allocated() - start_bytes,
        "reserved": torch.cuda.max_memory_reserved(),
    }


def offloaded() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(BLOCKS))).to(DEVICE)
    x = torch.randn(ROWS, WIDTH, device=DEVICE)
    store = torchremat.Host()
    found: dict[str, list[dict[str, float]]] = {"plain": [], "offloaded": []}
    for _ in range(ROUNDS + 1):
        found["plain"].append(taken(model, x, None))
        found["offloaded"].append(taken(model, x, store))
    medians = {
        way: {key: statistics.median(one[key] for one in each[1:]) for key in each[0]} for way, each in found.items()
    }
    plain, ours = medians["plain"], medians["offloaded"]
    return medians | {
        "freed, share of what was kept": 1 - ours["kept after the forward"] / plain["kept after the forward"],
        "time, ratio": ours["milliseconds"] / plain["milliseconds"],
        "stored": store.statistics.peak_stored_bytes,
    }


if __name__ == "__main__":
    section(wide=offloaded)
