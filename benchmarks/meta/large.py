"""Plan a decoder for a device that is not here, in a process of its own; prints what that took as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch

import decoders
import torchremat

DEVICE, BUDGET = "h100", "80GB"


def plan(blocks: int, batch: int, context: int) -> dict[str, object]:
    torch.set_num_threads(1)
    with torch.device("meta"):
        model, step = decoders.decoder_step(replace(decoders.Config(), blocks=blocks), batch=batch, context=context)
    optimizer = torch.optim.AdamW(model.parameters())
    planner = torchremat.Planner(model, step, optimizer=optimizer, certify=True, on="meta", device=DEVICE)
    profiled_s = time.process_time()
    found = planner.plan(BUDGET)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": batch * context,
        "cpu_s": time.process_time(),
        "profile_s": profiled_s,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "before_bytes": sum(found.before_bytes.values()),
        "plain_peak_bytes": found.plain_peak_bytes,
        "peak_bytes": found.peak_bytes,
        "floor_bytes": found.floor_bytes,
        "budget_bytes": found.budget_bytes,
        "recomputed_share": found.recomputed_flops / found.flops,
        "slowdown": found.slowdown,
        "units": len(found.units),
        "in_part": sum(len(one.units) for one in found.held),
        "gap": found.certificate.gap,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(plan(*map(int, sys.argv[1:]))))
