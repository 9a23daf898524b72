"""Train a byte-level GPT on real text, plain and inside four memory budgets, and compare the runs bit for bit.

The text is the source of the Python standard library. Plan files and the memory curves of one step go to `out/`. The
exit code is 1, and the last lines say why, if a budget is exceeded, a prediction is more than 1% off, or a single bit
of a loss or of a final parameter differs from the plain run.
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat
from models import GPT

STEPS = 20
BATCH = 12
CONTEXT = 256
SHARES = (0.75, 0.50, 0.30)
SLOWEST = 2.0
OUT = Path("out")
MIB = 2**20


def read_text(limit_bytes: int = 4 * MIB) -> Tensor:
    """The first bytes of the standard library's modules, in alphabetical order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batches(text: Tensor) -> list[Tensor]:
    """One batch of rows of `CONTEXT + 1` bytes per step, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - CONTEXT, (STEPS, BATCH), generator=generator)
    return [torch.stack([text[i : i + CONTEXT + 1] for i in row.tolist()]).long() for row in starts]


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def build() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(blocks=12, width=256, context=CONTEXT)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str
    plan: torchremat.Plan | None
    losses: list[Tensor]
    parameters: list[Tensor]
    step_s: float
    measured: torchremat.Measurement


def train(name: str, plan: torchremat.Plan | None, batches: list[Tensor], progress: Progress) -> Run:
    """Train a new model for all batches, then measure one step more."""
    model, optimizer = build()
    if plan is not None:
        plan.apply(model)

    losses, seconds = [], []
    task = progress.add_task(name, total=len(batches))
    for rows in batches:
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, rows)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.detach())
        progress.update(task, advance=1, description=f"{name}, loss {loss.item():.3f}")

    parameters = [p.detach().clone() for p in model.parameters()]
    measured = torchremat.measure(lambda model: loss_of(model, batches[0]), model, optimizer=optimizer)
    return Run(
        name=name,
        plan=plan,
        losses=losses,
        parameters=parameters,
        step_s=statistics.median(seconds),
        measured=measured,
    )


def make_plan(batches: list[Tensor], budget_bytes: int) -> torchremat.Plan:
    model, optimizer = build()
    return torchremat.plan(model, lambda model: loss_of(model, batches[0]), budget=budget_bytes, optimizer=optimizer)


def smallest_plan(batches: list[Tensor], plain: Run) -> torchremat.Plan:
    """The plan with the smallest peak whose predicted step takes at most `SLOWEST` times as long as the plain one."""
    low, high = 0, plain.measured.peak_bytes
    best = make_plan(batches, high)
    while high - low > MIB:
        middle = (low + high) // 2
        try:
            plan = make_plan(batches, middle)
        except torchremat.BudgetError:
            low = middle
            continue
        if plan.slowdown <= SLOWEST:
            best, high = plan, middle
        else:
            low = middle
    return best


def peak_problems(run: Run) -> list[str]:
    """How a planned run broke its budget or its prediction, in sentences."""
    plan, peak_bytes = run.plan, run.measured.peak_bytes
    found = []
    if peak_bytes > plan.budget_bytes:
        found.append(f"measured peak {peak_bytes:,} B is above the budget of {plan.budget_bytes:,} B")
    if abs(peak_bytes - plan.peak_bytes) > 0.01 * plan.peak_bytes:
        found.append(f"measured peak {peak_bytes:,} B is more than 1% off the prediction of {plan.peak_bytes:,} B")
    return found


def bit_problems(plain: Run, run: Run) -> list[str]:
    """What a planned run computed that the plain run did not, in sentences."""
    losses = [torch.equal(a, b) for a, b in zip(plain.losses, run.losses, strict=True)]
    parameters = [torch.equal(a, b) for a, b in zip(plain.parameters, run.parameters, strict=True)]
    found = []
    if not all(losses):
        found.append(
            f"{losses.count(False)} losses differ from the plain run, first that of step {losses.index(False)}"
        )
    if not all(parameters):
        found.append(f"{parameters.count(False)} of {len(parameters)} final parameters differ from the plain run")
    return found


def show(plain: Run, runs: list[Run]) -> Table:
    title = f"GPT, 12 blocks, width 256, context {CONTEXT}, batch {BATCH}: {STEPS} steps of AdamW"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("")
    units = {
        "budget": "MiB",
        "predicted": "MiB",
        "measured": "MiB",
        "recomputed": "GFLOP",
        "step": "s",
        "against": "plain",
    }
    for name, unit in units.items():
        table.add_column(f"{name}\n{unit}", justify="right")
    table.add_column("training")
    for run in [plain, *runs]:
        plan = run.plan
        table.add_row(
            run.name,
            "-" if plan is None else f"{plan.budget_bytes / MIB:.1f}",
            "-" if plan is None else f"{plan.peak_bytes / MIB:.1f}",
            f"{run.measured.peak_bytes / MIB:.1f}",
            f"{run.measured.recomputed_flops / 1e9:.1f}",
            f"{run.step_s:.2f}",
            f"{run.step_s / plain.step_s:.2f}",
            "-" if plan is None else "differs" if bit_problems(plain, run) else "equal",
        )
    return table


def main() -> int:
    console = Console()
    OUT.mkdir(exist_ok=True)
    batches = draw_batches(read_text())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        plain = train("plain", None, batches, progress)
        plans = {f"{share:.0%}": make_plan(batches, int(share * plain.measured.peak_bytes)) for share in SHARES}
        plans["smallest"] = smallest_plan(batches, plain)
        runs = [train(name, plan, batches, progress) for name, plan in plans.items()]

    for run in runs:
        run.plan.save(OUT / f"plan-{run.name.rstrip('%')}.json")
    runs[-1].plan.plot(OUT / "memory.png")
    console.print(show(plain, runs))

    found = [f"{run.name}: {text}" for run in runs for text in [*peak_problems(run), *bit_problems(plain, run)]]
    for sentence in found:
        console.print(f"[bold red]FAILED[/] {sentence}", soft_wrap=True)
    if not found:
        console.print(f"Every loss and every final parameter is bit-identical to the plain run. See {OUT}/.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
