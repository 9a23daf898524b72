"""Long loops: four workloads in a twentieth of what autograd saves, and schedules against the checkpoint by hand."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))

from _tables import bar, markdown, mib, publish, yes

import torchremat
from torchremat.schedules.binomial import OnlineBorders, advances, first_borders
from torchremat.schedules.hierarchies import Hierarchy, StoreCost
from torchremat.schedules.loop_schedules import LoopSchedule, within_bytes

SHARE = 20


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A loop, and what is differentiated.

    Attributes:
        body: Of the loop.
        carry: What it begins with.
        xs: What it scans.
        steps: Its length.
        loss: Of the last carry.
        leaves: What gradients are asked for.
    """

    body: Callable[[Any, Any], tuple[Any, None]]
    carry: Any
    xs: Any
    steps: int
    loss: Callable[[Any], Tensor]
    leaves: list[Tensor]

    def plain(self) -> Tensor:
        carry = self.carry
        for index in range(self.steps):
            x = None if self.xs is None else tuple(one[index] for one in self.xs)
            carry, _ = self.body(carry, x)
        return self.loss(carry)

    def loop(self, **options: Any) -> Tensor:
        carry, _ = torchremat.loop(self.body, self.carry, self.xs, length=self.steps, **options)
        return self.loss(carry)

    def by_hand(self) -> Tensor:
        """torch's checkpoint around every square root of the steps."""
        root = math.isqrt(self.steps)

        def several(carry: Any, first: int) -> Any:
            for index in range(first, min(first + root, self.steps)):
                x = None if self.xs is None else tuple(one[index] for one in self.xs)
                carry, _ = self.body(carry, x)
            return carry

        carry = self.carry
        for first in range(0, self.steps, root):
            carry = checkpoint(several, carry, first, use_reentrant=False)
        return self.loss(carry)


def language_model(steps: int) -> Workload:
    width, batch, characters = 64, 16, 64
    embed, cell, head = nn.Embedding(characters, width), nn.GRUCell(width, width), nn.Linear(width, characters)
    text = torch.randint(characters, (steps + 1, batch))

    def body(carry: Any, x: Any) -> Any:
        state, loss = carry
        state = cell(embed(x[0]), state)
        return (state, loss + nn.functional.cross_entropy(head(state), x[1])), None

    return Workload(
        body=body,
        carry=(torch.zeros(batch, width), torch.zeros(())),
        xs=(text[:-1], text[1:]),
        steps=steps,
        loss=lambda carry: carry[1] / steps,
        leaves=[*embed.parameters(), *cell.parameters(), *head.parameters()],
    )


def neural_ode(steps: int) -> Workload:
    field = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    size = 1 / steps

    def body(x: Any, _: Any) -> Any:
        a = field(x)
        b = field(x + size / 2 * a)
        c = field(x + size / 2 * b)
        return x + size / 6 * (a + 2 * b + 2 * c + field(x + size * c)), None

    return Workload(
        body=body,
        carry=torch.randn(64, 8),
        xs=None,
        steps=steps,
        loss=lambda x: x.square().mean(),
        leaves=[*field.parameters()],
    )


def sampler(steps: int) -> Workload:
    enter, down = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 16, 3, 2, 1)
    up, leave = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 3, padding=1)
    noise = torch.randn(steps, 2, 3, 32, 32)

    def body(image: Any, x: Any) -> Any:
        time_of, drawn = x
        skip = torch.relu(enter(torch.cat([image, time_of.expand(2, 1, 32, 32)], 1)))
        deep = torch.cat([skip, torch.relu(up(torch.relu(down(skip))))], 1)
        return image - leave(deep) / steps + 0.01 * drawn, None

    return Workload(
        body=body,
        carry=torch.randn(2, 3, 32, 32),
        xs=(torch.linspace(1, 0, steps), noise),
        steps=steps,
        loss=lambda image: image.square().mean(),
        leaves=[one for module in (enter, down, up, leave) for one in module.parameters()],
    )


def inner_steps(steps: int) -> Workload:
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    names = [name for name, _ in net.named_parameters()]
    rate = torch.tensor(0.05, requires_grad=True)
    x = torch.linspace(-2, 2, 200)[:, None]

    def loss_of(weights: Any) -> Tensor:
        return (functional_call(net, dict(zip(names, weights, strict=True)), (x,)) - torch.sin(2 * x)).square().mean()

    def body(weights: Any, _: Any) -> Any:
        gradients = torch.autograd.grad(loss_of(weights), weights, create_graph=True)
        return tuple(one - rate * gradient for one, gradient in zip(weights, gradients, strict=True)), None

    return Workload(
        body=body,
        carry=tuple(net.parameters()),
        xs=None,
        steps=steps,
        loss=loss_of,
        leaves=[*net.parameters(), rate],
    )


WORKLOADS: dict[str, tuple[Callable[[int], Workload], int]] = {
    "GRU language model": (language_model, 2000),
    "neural ODE, RK4": (neural_ode, 1000),
    "sampler, U-Net": (sampler, 50),
    "MAML, second order": (inner_steps, 100),
}


def saved_bytes(step: Callable[[], Tensor]) -> int:
    """Bytes of the storages that autograd has saved when the forward has ended, inputs and parameters not counted."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf or not tensor.requires_grad:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()  # its graph is alive until here, so no address comes twice
    return sum(found.values())


def timed(workload: Workload, step: Callable[[], Tensor]) -> tuple[float, list[Tensor]]:
    torch.manual_seed(0)
    start_s = time.perf_counter()
    gradients = torch.autograd.grad(step(), workload.leaves)
    return time.perf_counter() - start_s, list(gradients)


def trained(make: Callable[[int], Workload], steps: int, rounds: int) -> dict[str, object]:
    """Run a workload plainly, by hand and in a loop, in turn."""
    torch.manual_seed(0)
    workload = make(steps)
    plain_bytes = saved_bytes(workload.plain)
    schedules: list[LoopSchedule] = []
    options = {"budget": max(plain_bytes // SHARE, 1), "on_schedule": schedules.append}
    ways = {"plain": workload.plain, "loop": lambda: workload.loop(**options)}
    if workload.leaves[0] is not workload.carry and make is not inner_steps:  # torch's cannot run backward inside
        ways["by hand"] = workload.by_hand
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(rounds):
        for name, step in ways.items():
            took, gradients[name] = timed(workload, step)
            seconds[name].append(took)
    schedule = schedules[0]
    return {
        "steps": steps,
        "plain_bytes": plain_bytes,
        "loop_bytes": schedule.saved_bytes,
        "recomputed": schedule.recomputed_steps,
        "least": schedule.least_recomputed(),
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "equal": all(map(torch.equal, gradients["plain"], gradients["loop"])),
    }


def schedules(lengths: list[int]) -> list[dict[str, object]]:
    """The processor time that schedules take, and how they compare with the checkpoint by hand."""
    found = []
    for steps in lengths:
        start_s = time.process_time()
        first_borders(steps, 64)
        advances(steps, 64)
        slots_s = time.process_time() - start_s
        root = math.isqrt(steps)
        by_hand = -(-steps // root) + 8 * root
        start_s = time.process_time()
        same = within_bytes(steps, 1, 8, by_hand)
        budget_s = time.process_time() - start_s
        half = within_bytes(steps, 1, 8, by_hand // 2)
        start_s = time.process_time()
        either = within_bytes(steps, 1, 1, 31, shared_bytes=1)
        either_s = time.process_time() - start_s
        apart = within_bytes(steps, 1, 1, 31, shared_bytes=1, mixes=False)
        start_s = time.process_time()
        store = Hierarchy(steps, 4, (StoreCost(room=None, write_steps=2, read_steps=2),)).traffic()
        store_s = time.process_time() - start_s
        online = OnlineBorders(30)
        worst = 1.0
        for length in range(2, min(steps, 3000)):
            online.next()
            again = sum(advances(one, 30 - place) for place, one in enumerate(online.lengths))
            all_runs = 2 * length - 1 + again - (online.lengths[-1] - 1)
            worst = max(worst, all_runs / (advances(length, 30) + length))
        found.append(
            {
                "steps": steps,
                "slots_s": slots_s,
                "budget_s": budget_s,
                "by_hand": steps,
                "same": same.recomputed_steps,
                "half": half.recomputed_steps,
                "online": worst,
                "either_s": either_s,
                "either": either.recomputed_steps,
                "apart": apart.recomputed_steps,
                "store_s": store_s,
                "store": store.runs - steps,
                "no_store": advances(steps, 4),
            }
        )
    return found


def overhead(steps: int, rounds: int) -> dict[str, float]:
    """Seconds that a step of a loop adds, and that a region adds, to a small body."""
    w = torch.ones(16, requires_grad=True)

    def body(h: Any, _: Any) -> Any:
        return (h * w).sin().cos().tanh(), None

    def run(step: Callable[[Any], Any]) -> Tensor:
        h = torch.ones(16)
        for _ in range(steps):
            h, _ = step(h)
        return h.sum()

    ways = {
        "plain": lambda: run(lambda h: body(h, None)),
        "region": lambda: run(lambda h: torchremat.checkpoint(body, h, None)),
        "loop": lambda: torchremat.loop(body, torch.ones(16), length=steps, slots=steps)[0].sum(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, step in ways.items():
            start_s = time.perf_counter()
            step().backward()
            if turn:
                seconds[name].append((time.perf_counter() - start_s) / steps)
    plain = statistics.median(seconds["plain"])
    return {name: statistics.median(each) - plain for name, each in seconds.items() if name != "plain"}


def run(smoke: bool) -> dict[str, object]:
    workloads = {
        name: trained(make, 30 if smoke else steps, 1 if smoke else 3) for name, (make, steps) in WORKLOADS.items()
    }
    made = schedules([100] if smoke else [100, 1000, 10_000])
    added = overhead(20 if smoke else 200, 1 if smoke else 15)
    slowest_s = max(max(one["slots_s"], one["budget_s"], one["either_s"], one["store_s"]) for one in made)
    either = within_bytes(1000, 1, 1, 31, shared_bytes=1).recomputed_steps
    share = max(one["loop_bytes"] / one["plain_bytes"] for one in workloads.values())
    known = LoopSchedule(steps=1000, slots=30).recomputed_steps
    bars = [
        bar("each workload within 5% of the plain saved bytes", f"{100 * share:.1f}%", share <= 1 / SHARE),
        bar("gradients equal", "", all(one["equal"] for one in workloads.values())),
        bar("1000 steps, 30 slots: 2472 advances", f"{known}", known == 2472),
        bar("the same bytes for either kind: 2.52 forwards a step", f"{1 + either / 1000:.3f}", either <= 1522),
        bar("a schedule takes at most 50 ms", f"{1e3 * slowest_s:.1f} ms", slowest_s <= 0.05),
        bar(
            "at the peak of the checkpoint by hand never more recomputes",
            "",
            all(one["same"] <= one["by_hand"] for one in made),
        ),
        bar(
            "unknown length, 30 slots: at most 1.15 of the known one",
            f"{max(one['online'] for one in made):.3f}",
            all(one["online"] <= 1.15 for one in made),
        ),
        bar(
            "a step adds at most what a region adds",
            f"{added['loop'] / added['region']:.2f}",
            added["loop"] <= added["region"],
        ),
    ]
    return {"workloads": workloads, "schedules": made, "overhead": added, "bars": bars}


def tables(results: dict[str, Any]) -> dict[str, str]:
    rows = []
    for name, one in results["workloads"].items():
        seconds = one["seconds"]
        rows.append(
            [
                name,
                one["steps"],
                mib(one["plain_bytes"]),
                mib(one["loop_bytes"]),
                f"{100 * one['loop_bytes'] / one['plain_bytes']:.1f}%",
                f"{one['recomputed']} (least {one['least']})",
                f"{seconds['loop'] / seconds['plain']:.2f}",
                f"{seconds['by hand'] / seconds['plain']:.2f}" if "by hand" in seconds else "-",
                yes(one["equal"]),
            ]
        )
    head = ["", "steps", "plain MiB", "loop MiB", "share", "run again", "time / plain", "by hand", "gradients equal"]
    made = [
        [
            one["steps"],
            f"{1e3 * one['slots_s']:.2f}",
            f"{1e3 * one['budget_s']:.2f}",
            one["by_hand"],
            one["same"],
            one["half"],
            f"{one['online']:.3f}",
        ]
        for one in results["schedules"]
    ]
    columns = ["steps", "ms for 64 slots", "ms for a budget", "by hand", "same peak", "half of it", "unknown / known"]
    either = [
        [
            one["steps"],
            f"{1e3 * one['either_s']:.0f}",
            f"{one['apart'] / one['steps']:.3f}",
            f"{one['either'] / one['steps']:.3f}",
            f"{1e3 * one['store_s']:.0f}",
            f"{one['no_store'] / one['steps']:.3f}",
            f"{one['store'] / one['steps']:.3f}",
        ]
        for one in results["schedules"]
    ]
    kinds = ["steps", "ms for 31 units", "blocks", "either kind", "ms for a store", "4 slots", "with a store"]
    added = {name: f"{1e6 * one:.0f}" for name, one in results["overhead"].items()}
    return {
        "workloads": markdown(head, rows),
        "schedules": markdown(columns, made),
        "kinds": markdown(kinds, either),
        "overhead": markdown(
            ["microseconds added to a step", "region", "loop"], [["", added["region"], added["loop"]]]
        ),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
