"""Train a byte-level GPT on real text, plain and inside six memory budgets, and compare the runs bit for bit.

The text is the source of the Python standard library. All runs take each batch in turn, so that their step times can be
compared. In the last two runs plans release the gradients in the backward; in the last one AdamW's state may wait on
the disk, too.
Plan files and the memory curves of one step go to `out/`. The exit code is 1, and the last lines say why, if

    a measured peak is above its budget, or more than 1% off its prediction
    a single bit of a loss or of a final parameter differs from the plain run
    the smallest budget of plans alone takes more than twice as long as the plain run

`--smoke` does all of it on a tiny model within seconds; step times are not judged then.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import torchremat
from models import GPT
from torchremat.measuring.allocator import record_allocations
from torchremat.reports.plots import plot_measurements

MIB = 2**20
SHARES = ("75%", "50%", "30%")
SMALLEST, SLOWEST = "smallest", 2.0
HEADINGS = ("budget\nMiB", "predicted\nMiB", "measured\nMiB", "recomputed\nGFLOP", "time\ns", "against\nplain")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    blocks: int = 12
    width: int = 256
    context: int = 256
    # The smallest for which 30% of the plain peak is enough: parameters, gradients and optimizer state do not shrink.
    batch: int = 12
    steps: int = 20


SMOKE = Sizes(blocks=6, width=32, context=64, batch=16, steps=3)


def read_text(limit_bytes: int = 4 * MIB) -> Tensor:
    """The first bytes of the standard library's modules, in alphabetical order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:limit_bytes]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw_batches(text: Tensor, sizes: Sizes) -> list[Tensor]:
    """One batch of rows of `context + 1` bytes per step, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(text) - sizes.context, (sizes.steps, sizes.batch), generator=generator)
    return [torch.stack([text[i : i + sizes.context + 1] for i in row.tolist()]).long() for row in starts]


def loss_of(rows: Tensor, model: nn.Module) -> Tensor:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def build(sizes: Sizes) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT(blocks=sizes.blocks, width=sizes.width, context=sizes.context)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@dataclass(kw_only=True, eq=False)
class Run:
    """One way of training: a model of its own, with a plan or plain, and what is found out about it."""

    name: str
    plan: torchremat.Plan | None
    model: GPT
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)
    measured: torchremat.Measurement | None = None
    optimizer_peak_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.measured.peak_bytes, self.optimizer_peak_bytes)

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)

    def train(self, rows: Tensor) -> None:
        start_s = time.perf_counter()
        self.optimizer.zero_grad()
        loss = loss_of(rows, self.model)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - start_s)
        self.losses.append(loss.item())  # a float holds all bits, and pins no memory between steps as a tensor would

    def finish(self, rows: Tensor) -> None:
        """Keep the parameters, then measure one step more: the optimizer has its state by now."""
        self.parameters = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer.zero_grad()
        self.measured = torchremat.measure(self.model, partial(loss_of, rows), optimizer=self.optimizer)
        loss_of(rows, self.model).backward()
        gradient_bytes = sum(p.grad.nbytes for p in self.model.parameters() if p.grad is not None)
        with record_allocations(self.measured.device) as recorder:
            self.optimizer.step()
        self.optimizer_peak_bytes = self.measured.before_bytes + gradient_bytes + recorder.trace.peak_bytes


# What lowers the part of a step that no recompute lowers.
LOWERED = {
    "released": {"release_gradients": True},
    "on disk": {"release_gradients": True, "optimizer_store": torchremat.Disk()},
}


def make_run(name: str, plan: torchremat.Plan | None, sizes: Sizes) -> Run:
    model, optimizer = build(sizes)
    if plan is not None:
        plan.apply(model, optimizer=optimizer)
    return Run(name=name, plan=plan, model=model, optimizer=optimizer)


def planner_for(name: str, rows: Tensor, sizes: Sizes) -> torchremat.Planner:
    model, optimizer = build(sizes)
    return torchremat.Planner(model, partial(loss_of, rows), optimizer=optimizer, **LOWERED.get(name, {}))


def smallest_plan(planner: torchremat.Planner) -> torchremat.Plan:
    """The plan for the smallest budget, to a quarter MiB, under which a step is predicted to be fast enough.

    Predicted seconds are no promise, so some of what `SLOWEST` allows is left free.
    """
    low, high = planner.floor_bytes - 1, planner.plain_peak()[0]
    best = planner.plan(high)
    while high - low > MIB // 4:
        middle = (low + high) // 2
        plan = planner.plan(middle)
        if plan.slowdown <= 0.9 * SLOWEST:
            best, high = plan, middle
        else:
            low = middle
    return best


def peak_problems(run: Run) -> list[str]:
    """How a planned run broke its budget or its prediction, in sentences."""
    plan, peak_bytes = run.plan, run.peak_bytes
    found = []
    if peak_bytes > plan.budget_bytes:
        found.append(f"the measured peak of {peak_bytes:,} B is above the budget of {plan.budget_bytes:,} B")
    if abs(peak_bytes - plan.peak_bytes) > 0.01 * plan.peak_bytes:
        found.append(f"the measured peak of {peak_bytes:,} B is more than 1% off the prediction, {plan.peak_bytes:,} B")
    return found


def bit_problems(run: Run, plain: Run) -> list[str]:
    """What a planned run computed that the plain run did not, in sentences."""
    losses = [a == b for a, b in zip(plain.losses, run.losses, strict=True)]
    parameters = [torch.equal(a, b) for a, b in zip(plain.parameters, run.parameters, strict=True)]
    found = []
    if not all(losses):
        first = losses.index(False)
        found.append(f"{losses.count(False)} losses differ from the plain run's, the first in step {first}")
    if not all(parameters):
        found.append(f"{parameters.count(False)} of {len(parameters)} final parameters differ from the plain run's")
    return found


def time_problems(run: Run, plain: Run) -> list[str]:
    if run.step_s <= SLOWEST * plain.step_s:
        return []
    return [f"a step takes {run.step_s:.2f} s, more than {SLOWEST:g} times the plain {plain.step_s:.2f} s"]


def table_of(runs: list[Run], title: str) -> Table:
    """The runs as a table; the first one is the plain run."""
    plain = runs[0]
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("")
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    table.add_column("losses and\nparameters")
    for run in runs:
        plan = run.plan
        table.add_row(
            run.name,
            "-" if plan is None else f"{plan.budget_bytes / MIB:.1f}",
            "-" if plan is None else f"{plan.peak_bytes / MIB:.1f}",
            f"{run.peak_bytes / MIB:.1f}",
            f"{run.measured.recomputed_flops / 1e9:.1f}",
            f"{run.step_s:.2f}",
            f"{run.step_s / plain.step_s:.2f}",
            "-" if plan is None else "differ" if bit_problems(run, plain) else "equal",
        )
    return table


def begin(progress: Progress, name: str, total: int) -> TaskID:
    """Begin a phase, which a line tells where no bar is drawn until the end."""
    if not progress.console.is_terminal:
        progress.console.print(f"{name}, {total} in all")
    return progress.add_task(name, total=total)


def train_and_measure(sizes: Sizes, progress: Progress) -> list[Run]:
    """The finished runs, the plain one first."""
    batches = draw_batches(read_text(), sizes)
    task = begin(progress, "profile and plan", 2 + len(SHARES) + len(LOWERED))
    planner = planner_for("plain", batches[0], sizes)
    progress.advance(task)
    plans: dict[str, torchremat.Plan | None] = {"plain": None}
    for share in SHARES:
        plans[share] = planner.plan(share)
        progress.advance(task)
    plans[SMALLEST] = smallest_plan(planner)
    progress.advance(task)
    for name in LOWERED:
        plans[name] = smallest_plan(planner_for(name, batches[0], sizes))
        progress.advance(task)

    runs = [make_run(name, plan, sizes) for name, plan in plans.items()]
    task = begin(progress, "train", len(batches) * len(runs))
    for rows in batches:
        for run in runs:
            run.train(rows)
            progress.update(task, advance=1, description=f"train, loss {run.losses[-1]:.3f}")
    task = begin(progress, "measure", len(runs))
    for run in runs:
        run.finish(batches[0])
        progress.advance(task)
    return runs


def demonstrate(sizes: Sizes, out: Path, console: Console, *, judge_time: bool = True) -> list[str]:
    """Do all of it, show the table, write the files, and return what went wrong."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        plain, *planned = runs = train_and_measure(sizes, progress)

    out.mkdir(parents=True, exist_ok=True)
    for run in planned:
        run.plan.save(out / f"plan-{run.name.rstrip('%').replace(' ', '-')}.json")
    budgets = {run.name: run.plan.budget_bytes for run in planned}
    plot_measurements({run.name: run.measured for run in runs}, out / "memory.png", budgets=budgets)
    title = (
        f"GPT, {sizes.blocks} blocks, width {sizes.width}, context {sizes.context}, batch {sizes.batch}: "
        f"{sizes.steps} steps of AdamW"
    )
    console.print(table_of(runs, title))
    found = [f"{run.name}: {text}" for run in planned for text in [*peak_problems(run), *bit_problems(run, plain)]]
    smallest = next(run for run in planned if run.name == SMALLEST)
    if judge_time:
        found += [f"{smallest.name}: {text}" for text in time_problems(smallest, plain)]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny model, within seconds; step times are not judged")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the plans and the picture")
    options = parser.parse_args(arguments)

    console = Console()
    found = demonstrate(SMOKE if options.smoke else Sizes(), options.out, console, judge_time=not options.smoke)
    for sentence in found:
        console.print(f"[bold red]FAILED[/] {sentence}", soft_wrap=True)
    if not found:
        console.print(
            f"Every peak is within its budget, and every loss and every final parameter is bit-identical to the plain "
            f"run's. Plans and memory curves are in {options.out}/.",
            soft_wrap=True,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
