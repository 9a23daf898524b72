"""Plans without running: what a 7B model takes to plan, and bytes against those of real profiles."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
from _steps import Make
from _tables import bar, markdown, mib, publish

import decoders
import models
import torchremat
from torchremat import Device, Planner
from torchremat.planning.bounds.plain_step import PlainStep

HERE = Path(__file__).parent
GIB = 2**30
# Blocks, batch, context.
LARGE = {"1 x 2048": (32, 1, 2048), "2 x 4096": (32, 2, 4096), "4 x 4096": (32, 4, 4096)}
MODELS: dict[str, Make] = {
    "GPT": models.gpt_step,
    "GPT, dropout": lambda: models.gpt_step(dropout=0.1),
    "U-Net": models.unet_step,
    "ResNet": models.resnet_step,
    "decoder": decoders.tiny_step,
}
SHARES = (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)  # of what lies between the smallest budget and the plain peak
MOST_S, MOST_BYTES = 60, 2 * GIB


def run(smoke: bool) -> dict[str, object]:
    chosen = {"GPT": lambda: models.gpt_step(blocks=2, width=32, context=32)} if smoke else MODELS
    large = {"1 x 128": (2, 1, 128)} if smoke else LARGE
    found: dict[str, object] = {
        "large": {name: planned_apart(sizes) for name, sizes in large.items()},
        "equal": {name: compared(*make()) for name, make in chosen.items()},
    }
    found["bars"] = bars(found["large"], found["equal"])
    return found


def planned_apart(sizes: tuple[int, int, int]) -> dict[str, object]:
    """Plan in a process of its own, so that its memory is the plan's alone."""
    done = subprocess.run(
        [sys.executable, HERE / "large.py", *map(str, sizes)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def compared(model, step) -> dict[str, object]:
    """Compare plans of a real profile with those made on fakes, with and without a table of measured kernels."""
    real = Planner(model, step, cost="flops", certify=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "device.json"
        real.save_device(path)
        saved = Device.load(path)
    meta = Planner(model, step, cost="flops", certify=True, on="meta", device=saved)
    assert isinstance(real.profiled.plain_step, PlainStep)  # which no plan for bytes runs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchremat.DeviceWarning)
        blind = Planner(model, step, cost="flops", on="meta", device=replace(saved, kernels={}))
    before = sum(real.plan(real.plain_peak()[0]).before_bytes.values())
    plain, floor = real.profiled.peak_of(real.solver.plain), real.floor_bytes
    budgets = [floor + int(share * (plain - floor)) for share in SHARES]
    each = [(real.plan(budget), meta.plan(budget)) for budget in budgets]
    own_bytes: Callable[[Planner], int] = lambda planner: planner.profiled.peak_of(planner.solver.plain) - before  # noqa: E731
    return {
        "plain_bytes": own_bytes(real),
        "floor_bytes": floor - before,
        "plans": len(each),
        "equal_peaks": sum(a.peak_bytes == b.peak_bytes for a, b in each),
        "equal_trees": sum((a.tree, a.held) == (b.tree, b.held) for a, b in each),
        "in_part": sum(bool(a.held) for a, _ in each),
        "equal_bounds": sum(a.certificate.bound_all == b.certificate.bound_all for a, b in each),
        "plain_error_bytes": own_bytes(meta) - own_bytes(real),
        "floor_error_bytes": meta.floor_bytes - floor,
        "plain_error_without_kernels": own_bytes(blind) / own_bytes(real) - 1,
        "floor_error_without_kernels": (blind.floor_bytes - before) / (floor - before) - 1,
    }


def bars(large: dict[str, dict[str, float]], equal: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    seconds = max(one["cpu_s"] for one in large.values())
    host = max(one["host_peak_bytes"] for one in large.values())
    plans = sum(one["plans"] for one in equal.values())
    same = sum(one["equal_peaks"] for one in equal.values())
    return [
        bar(
            "a 7B decoder is planned for 80 GB in under 60 s of CPU time", f"at most {seconds:.1f} s", seconds < MOST_S
        ),
        bar("... and in under 2 GiB of host memory", f"at most {host / GIB:.2f} GiB", host < MOST_BYTES),
        bar("bytes of a plan on fakes are those of a real profile", f"{same} of {plans} plans equal", same == plans),
    ]


def tables(results: dict[str, object]) -> dict[str, str]:
    large = [
        [
            name,
            f"{one['parameters'] / 1e9:.2f} B",
            f"{one['cpu_s']:.1f} s",
            f"{one['host_peak_bytes'] / GIB:.2f} GiB",
            f"{one['before_bytes'] / GIB:.2f}",
            f"{one['plain_peak_bytes'] / GIB:.2f}",
            f"{one['floor_bytes'] / GIB:.2f}",
            f"{one['peak_bytes'] / GIB:.2f} of {one['budget_bytes'] / GIB:.2f}",
            f"{one['recomputed_share']:.0%}",
            f"{one['slowdown']:.2f}",
            f"{one['in_part']} of {one['units']}",
            f"{one['gap']:.1%}",
        ]
        for name, one in results["large"].items()
    ]
    equal = [
        [
            name,
            mib(one["plain_bytes"]),
            mib(one["floor_bytes"]),
            f"{one['equal_peaks']} of {one['plans']}",
            f"{one['equal_trees']} of {one['plans']}",
            f"{one['in_part']}",
            f"{one['equal_bounds']} of {one['plans']}",
            f"{one['plain_error_without_kernels']:+.2%}",
            f"{one['floor_error_without_kernels']:+.2%}",
        ]
        for name, one in results["equal"].items()
    ]
    return {
        "large": markdown(
            [
                "batch",
                "parameters",
                "CPU time",
                "host memory",
                "before a step",
                "plain peak",
                "smallest budget",
                "plan",
                "recomputed",
                "time",
                "in part",
                "above the best",
            ],
            large,
        ),
        "equal": markdown(
            [
                "",
                "plain",
                "smallest",
                "equal peaks",
                "equal plans",
                "in part",
                "equal bounds",
                "plain, no kernels",
                "smallest, no kernels",
            ],
            equal,
        ),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
