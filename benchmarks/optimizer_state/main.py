"""What a step needs, and takes, with its gradients released in the backward and its optimizer's state in a store."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import ratio, seconds_in_turn
from _tables import bar, markdown, mib, publish, yes
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat
from models import GPT
from torchremat import Disk, offload_optimizer, release_gradients
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.optimizers import parameters_of

ROUNDS = 7
BATCHES = 12, 2  # the demo's, and one whose step is short
RELEASED_MOST, WRITTEN_MOST = 1.03, 1.10


@dataclass(kw_only=True, eq=False)
class Way:
    """One way to train."""

    model: nn.Module
    rows: Tensor
    optimizer: torch.optim.Optimizer = field(init=False)
    disk: Disk | None = None

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.rows, self.model).backward()
        self.optimizer.step()

    def peak_bytes(self) -> int:
        """The most that is live in a step: forward, backward and the optimizer's."""
        self.step()
        self.optimizer.zero_grad()
        entries = [entry for state in dict.values(self.optimizer.state) for entry in dict.values(state)]
        here = [one for one in self.model.parameters() if type(one) is nn.Parameter]  # not in a store
        held = [*here, self.rows, *(one for one in entries if isinstance(one, Tensor))]
        with record_allocations(torch.device("cpu")) as recorder:
            self.step()
        return sum(one.nbytes for one in held) + recorder.trace.peak_bytes


def loss_of(rows: Tensor, model: nn.Module) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def ways(make: Callable[[], nn.Module], rows: Tensor) -> dict[str, Way]:
    found = {name: Way(model=make(), rows=rows) for name in ("plain", "released", "state on disk", "both")}
    for name in ("released", "both"):
        release_gradients(found[name].model, found[name].optimizer)
    for name in ("state on disk", "both"):
        found[name].disk = Disk()
        offload_optimizer(found[name].optimizer, found[name].disk)
    return found


def disk_seconds(tensors: list[Tensor], rounds: int) -> float:
    """The least that the disk has taken to write and read the state of these parameters, and nothing else."""
    took: list[float] = []
    for _ in range(rounds):
        disk = Disk()
        start_s = time.perf_counter()
        handles = [disk.put(one) for one in tensors for _ in range(2)]
        for handle in handles:
            handle.settle()
        for handle in handles:
            handle.get()
        took.append(time.perf_counter() - start_s)
    return min(took)


def run(smoke: bool) -> dict[str, object]:
    sizes = {"blocks": 2, "width": 32, "context": 16} if smoke else {"blocks": 12, "width": 256, "context": 256}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return GPT(**sizes)

    batches = {batch: _batch(make, batch, sizes["context"], 2 if smoke else ROUNDS) for batch in BATCHES}
    return {
        "parameter_bytes": sum(one.nbytes for one in make().parameters()),
        "batches": batches,
        "smallest": _smallest(make, _rows(BATCHES[0], sizes["context"])),
        "bars": [one for batch, found in batches.items() for one in _bars(batch, found)],
    }


def _rows(batch: int, context: int) -> Tensor:
    return torch.randint(256, (batch, context + 1), generator=torch.Generator().manual_seed(0))


def _smallest(make: Callable[[], nn.Module], rows: Tensor) -> dict[str, dict[str, object]]:
    """The plans for the smallest budgets, by what may leave memory; each is run, and compared with the plain steps."""
    plain = Way(model=make(), rows=rows)
    for _ in range(3):
        plain.step()
    found: dict[str, dict[str, object]] = {}
    options: dict[str, object] = {}
    for name, option in (
        ("gradients", "release_gradients"),
        ("and state", "optimizer_store"),
        ("and parameters", "parameter_store"),
    ):
        options[option] = True if option == "release_gradients" else Disk()
        way = Way(model=make(), rows=rows)
        plan = torchremat.plan(way.model, partial(loss_of, rows), budget="min", optimizer=way.optimizer, **options)
        plan.apply(way.model)
        way.step()
        found[name] = {
            "predicted_bytes": plan.peak_bytes,
            "slowdown": plan.slowdown,
            "peak_bytes": way.peak_bytes(),
            "equal": all(map(torch.equal, way.model.parameters(), plain.model.parameters())),
        }
        plan.remove(way.model)
    return found


def _batch(make: Callable[[], nn.Module], batch: int, context: int, rounds: int) -> dict[str, object]:
    """Peaks and times of all ways for one size of batch."""
    rows = _rows(batch, context)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    planner = torchremat.Planner(model, partial(loss_of, rows), optimizer=optimizer)
    plan = planner.plan(planner.floor_bytes)
    gradients = sum(one.nbytes for one in parameters_of([optimizer]))

    def planned() -> nn.Module:
        found = make()
        plan.apply(found)
        return found

    table: dict[str, dict[str, object]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchremat.PlanWarning)  # the plan has counted state that is on the disk
        for name, way in ways(planned, rows).items():
            table[name] = {"peak_bytes": way.peak_bytes()}
    # A plan counts gradients as they are while they accumulate: all of them, from the beginning.
    table["released"]["predicted_bytes"] = plan.peak_bytes - gradients
    runs = ways(make, rows)
    seconds = seconds_in_turn({name: way.step for name, way in runs.items()}, rounds)
    plain = [one.detach() for one in runs["plain"].model.parameters()]
    for name, way in runs.items():
        took = sorted(seconds[name])
        table[name] |= {
            "seconds": took[len(took) // 2],
            "ratio": asdict(ratio(seconds[name], seconds["plain"])),
            "equal": all(map(torch.equal, way.model.parameters(), plain)),
        }
    return {"plan_bytes": plan.peak_bytes, "disk_seconds": disk_seconds(plain, 3), "ways": table}


def _bars(batch: int, found: dict[str, object]) -> list[dict[str, object]]:
    released, stored, plain = (found["ways"][name] for name in ("released", "state on disk", "plain"))
    off = abs(released["peak_bytes"] / released["predicted_bytes"] - 1)
    allowed = 1 + WRITTEN_MOST * found["disk_seconds"] / plain["seconds"]
    equal = all(one["equal"] for one in found["ways"].values())
    return [
        bar(f"batch {batch}, released: the peak is the predicted one, to 0.1%", f"{off:.3%}", off <= 0.001),
        bar(f"batch {batch}: parameters after {ROUNDS + 1} steps are those of the plain loop", "all equal", equal),
        bar(
            f"batch {batch}: released takes at most {RELEASED_MOST} of the plain time",
            f"{released['ratio']['median']:.3f}",
            released["ratio"]["median"] <= RELEASED_MOST,
        ),
        bar(
            f"batch {batch}: state on disk takes at most the time of its bytes on this disk more, and 10%",
            f"{stored['ratio']['median']:.2f} of {allowed:.2f}",
            stored["ratio"]["median"] <= allowed,
        ),
    ]


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for batch, found in results["batches"].items():
        for name, one in found["ways"].items():
            spread = one["ratio"]
            rows.append(
                [
                    str(batch),
                    name,
                    mib(one["peak_bytes"]),
                    mib(one["predicted_bytes"]) if "predicted_bytes" in one else "",
                    f"{1e3 * one['seconds']:.0f}",
                    f"{spread['median']:.3f} ({spread['low']:.2f}-{spread['high']:.2f})",
                    yes(one["equal"]),
                ]
            )
    head = ["batch", "", "peak, MiB", "predicted, MiB", "ms", "ratio to plain", "equal"]
    smallest = [
        [name, mib(one["predicted_bytes"]), mib(one["peak_bytes"]), f"{one['slowdown']:.2f}", yes(one["equal"])]
        for name, one in results["smallest"].items()
    ]
    leaves = ["may leave memory", "predicted, MiB", "measured, MiB", "predicted time", "equal"]
    return {"ways": markdown(head, rows), "smallest": markdown(leaves, smallest)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
