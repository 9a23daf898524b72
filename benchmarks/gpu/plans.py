"""What a plan says of a step on the device, and what the device's counters say of it then; with and without a store."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from findings import IS_SMALL, section
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat
from models import GPT, ResNet
from probes.memory import peaks_on_device

DEVICE = torch.device("cuda", 0)
SHARES = ("80% of activations", "50% of activations")
Subject = tuple[nn.Module, Callable[[nn.Module], Tensor]]


def gpt(dtype: torch.dtype | None = None, dropout: float = 0.0) -> Subject:
    torch.manual_seed(0)
    sizes = {"blocks": 3, "width": 64, "context": 64} if IS_SMALL else {"blocks": 8, "width": 512, "context": 512}
    model = GPT(heads=sizes["width"] // 32, dropout=dropout, **sizes).to(DEVICE)
    tokens = torch.randint(256, (2 if IS_SMALL else 16, sizes["context"] + 1), device=DEVICE)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, step


def resnet() -> Subject:
    torch.manual_seed(0)
    model = ResNet().to(DEVICE)
    batch, side = (2, 32) if IS_SMALL else (64, 224)
    images, labels = torch.randn(batch, 3, side, side, device=DEVICE), torch.randint(10, (batch,), device=DEVICE)
    return model, lambda model: F.cross_entropy(model(images), labels)


def planned(make: Callable[[], Subject], *, store: bool = False, optimizer: bool = False) -> object:
    model, step = make()
    options = {"stores": (torchremat.Host(),)} if store else {}
    if optimizer:
        options["optimizer"] = torch.optim.AdamW(model.parameters())
    found: dict[str, object] = {"plain": peaks_on_device(model, step)}
    start_s = time.perf_counter()
    planner = torchremat.Planner(model, step, **options)
    found["profiling, seconds"] = round(time.perf_counter() - start_s, 2)
    for share in SHARES:
        start_s = time.perf_counter()
        plan = planner.plan(share)
        took_s = time.perf_counter() - start_s
        plan.apply(model)
        report = torchremat.verify(model, step)
        found[share] = peaks_on_device(model, step) | {
            "predicted": plan.peak_bytes,
            "plain predicted": plan.plain_peak_bytes,
            "exact": report.is_exact,
            "noise": [str(one) for one in report.noise[:2]],
            "differences": [str(one) for one in report.differences[:2]],
            "planning, seconds": round(took_s, 2),
        }
        plan.remove(model)
    return found


if __name__ == "__main__":
    section(
        gpt=lambda: planned(gpt),
        autocast=lambda: planned(lambda: gpt(torch.bfloat16, dropout=0.1)),
        resnet=lambda: planned(resnet),
        stored=lambda: planned(gpt, store=True),
        optimizer=lambda: planned(gpt, optimizer=True),
    )
