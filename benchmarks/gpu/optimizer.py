"""What a training step takes with gradients released, and AdamW's state and the parameters in host memory."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable

import torch
from findings import IS_SMALL, section
from torch import Tensor, nn, optim
from torch.nn import functional as F

import torchremat
from models import GPT

DEVICE = torch.device("cuda", 0)
STEPS = 2 if IS_SMALL else 5
SIZES = (
    {"blocks": 3, "width": 64, "heads": 2, "context": 32}
    if IS_SMALL
    else {"blocks": 24, "width": 2048, "heads": 16, "context": 1024}
)
BATCH = 2
Prepare = Callable[[nn.Module, optim.Optimizer], None]


def plain(model: nn.Module, optimizer: optim.Optimizer) -> None:
    """Change nothing."""


def released(model: nn.Module, optimizer: optim.Optimizer) -> None:
    torchremat.release_gradients(model, optimizer)


def with_state(model: nn.Module, optimizer: optim.Optimizer) -> None:
    released(model, optimizer)
    torchremat.offload_optimizer(optimizer, torchremat.Host())


def with_all(model: nn.Module, optimizer: optim.Optimizer) -> None:
    with_state(model, optimizer)
    torchremat.offload_parameters(model, optimizer, torchremat.Host())


def trained(prepare: Prepare) -> tuple[dict[str, float], list[Tensor]]:
    """What the steps of a way take after the first one, and the parameters that they end with."""
    torch.manual_seed(0)
    model = GPT(**SIZES).to(DEVICE)
    optimizer = optim.AdamW(model.parameters())
    tokens = torch.randint(256, (BATCH, SIZES["context"] + 1), device=DEVICE)
    prepare(model, optimizer)
    milliseconds: list[float] = []
    for number in range(STEPS + 1):
        if number == 1:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        milliseconds.append(1000 * (time.perf_counter() - start_s))
    found = {
        "milliseconds": statistics.median(milliseconds[1:]),
        "peak": torch.cuda.max_memory_allocated(),
        "between steps": torch.cuda.memory_allocated(),
    }
    return found, [parameter.detach().cpu() for parameter in model.parameters()]


def optimizers() -> object:
    # Attention's backward differs from run to run with other kernels.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    ways: dict[str, Prepare] = {"plain": plain, "released": released, "state": with_state, "parameters": with_all}
    found: dict[str, object] = {}
    expected: list[Tensor] = []
    for name, prepare in ways.items():
        gc.collect()
        torch.cuda.empty_cache()
        figures, parameters = trained(prepare)
        expected = expected or parameters
        equal = all(map(torch.equal, parameters, expected))
        found[name] = figures | {"equal": equal}
    return found | {"parameters, bytes": sum(one.nbytes for one in expected)}


if __name__ == "__main__":
    section(wide=optimizers)
