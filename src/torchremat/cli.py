"""The command line: measure, look into, plan, verify and fit the training step that a factory returns.

The factory is named `module:function`; the folder that the command runs in is searched first. It takes no arguments
and returns a model and a step, and an optimizer if it likes. Exit codes: 1 if something is wrong with the model, the
step, the budget or the plan, 2 if something is wrong with the command.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import typer
from rich.console import Console
from torch import nn

from torchremat.errors import DeviceWarning, TorchrematError
from torchremat.measuring.keeping import saved
from torchremat.measuring.measurement import measure
from torchremat.measuring.step import loss_of, run_backward
from torchremat.planning.budgets import margin_of, percentage_of
from torchremat.planning.elsewhere.devices import device_of
from torchremat.planning.fitting import fit_with
from torchremat.planning.frontiers import MOST_POINTS
from torchremat.planning.planner import Planner
from torchremat.planning.plans import Plan
from torchremat.planning.profiles.optimizers import step_alone
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.progress import Observer
from torchremat.planning.verification import Report, verify
from torchremat.reports.bars import progress_bar
from torchremat.reports.tables import frontier_table
from torchremat.stores.disk import Disk
from torchremat.stores.host import Host
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import format_bytes, parse_bytes

_SHAPE = "(model, step) or (model, step, optimizer)"

app = typer.Typer(
    help="Give a PyTorch model a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out, _err = Console(), Console(stderr=True)


class TargetError(Exception):
    """A command that names something which is not there or not fit for it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """What a factory returned."""

    model: nn.Module
    step: Step
    optimizer: torch.optim.Optimizer | None

    def train_once(self) -> None:
        """Run one training step if there is an optimizer, so that its state is there, and counted, from now on."""
        if self.optimizer is not None:
            run_backward(loss_of(self.step(self.model)))
            step_alone(self.optimizer, self.optimizer.step)
            self.optimizer.zero_grad()


def load(target: str) -> Subject:
    """Return what the factory `module:function` makes.

    Raises:
        TargetError: There is no such module or function, or it returns something else.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{target!r}: `module:factory` is needed, like `train:build`.")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        raise TargetError(f"{module_name!r}: the name of a module is needed, like `train`, not of a file.")
    found: object = _imported(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"module {module_name!r} has no {path!r}.{_offered(module_name)}")
        found = getattr(found, name)
    if not callable(found):
        raise TargetError(f"{target} is no function but a {type(found).__name__}; it has to return {_SHAPE}.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{target} is called without arguments, which it does not take: {error}.") from error
    except ValueError:  # some callables of C have no signature
        pass
    return _subject(target, cast("Callable[[], object]", found)())


def _imported(name: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this module imports may be missing just as well; that is the user's own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(f"there is no module {error.name!r} here or among what is installed.") from error


def _offered(module_name: str) -> str:
    """Return a sentence with the functions that a module defines."""
    names = [
        name
        for name, value in vars(sys.modules[module_name]).items()
        if callable(value) and getattr(value, "__module__", None) == module_name and not name.startswith("_")
    ]
    return f" It defines {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}." if names else ""


def _subject(target: str, made: object) -> Subject:
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else ()
    if len(parts) not in (2, 3):
        raise TargetError(f"{target} returned {_described(made)}; {_SHAPE} is needed.")
    model, step, optimizer = (*parts, None)[:3]
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned {_described(made)}; the first has to be a torch.nn.Module.")
    if not callable(step):
        raise TargetError(f"{target} returned {_described(made)}; the second has to be a function, step(model).")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(f"{target} returned {_described(made)}; the third has to be a torch.optim.Optimizer.")
    return Subject(model=model, step=cast("Step", step), optimizer=optimizer)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        kinds = ", ".join(type(part).__name__ for part in cast("tuple[object, ...]", made))
        return f"a tuple ({kinds})"
    return "None (is a `return` missing?)" if made is None else f"a {type(made).__name__}"


@contextmanager
def _working(doing: str) -> Generator[None]:
    """Say what is being done, and what is wrong."""
    with _saying_errors(), _err.status(doing):
        yield


@contextmanager
def _saying_errors() -> Generator[None]:
    """Turn errors into a message and an exit code; what user code raises goes through."""
    try:
        yield
    except TorchrematError as error:
        _say(f"{type(error).__name__}: {error}")
        raise typer.Exit(1) from error
    except TargetError as error:
        _say(f"Error: {error}")
        raise typer.Exit(2) from error


def _say(text: str) -> None:
    """Print to stderr, beside what was asked for."""
    _err.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(found: object) -> None:
    """Print what was asked for."""
    _out.print(str(found), markup=False, highlight=False, soft_wrap=True)


Target = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=f"A function that returns {_SHAPE}.")]
Budget = Annotated[str, typer.Option(help="Peak of a training step: bytes, 6GiB, 800MB, or 60% of the plain peak.")]
Margin = Annotated[str, typer.Option(help="Part of the budget to leave free, like 1GiB.")]
Costs = Annotated[Cost, typer.Option(help="What to minimise.")]
On = Annotated[Literal["meta"] | None, typer.Option(help="meta: run nothing, plan for a device that is not here.")]
Described = Annotated[
    str | None,
    typer.Option(
        help="Whose bytes count; that of the first parameter if not given. With --on meta: a name like h100, or a file."
    ),
]
SaveDevice = Annotated[Path | None, typer.Option(help="File to describe this device in, for plans with --on meta.")]
Device = Annotated[str | None, typer.Option(help="Whose bytes count; that of the first parameter if not given.")]
Stores = Annotated[
    list[str] | None,
    typer.Option(help="Where saved tensors may wait: disk or host. Give it once for each; for verify as for plan."),
]
Out = Annotated[Path | None, typer.Option(help="File to write the plan to, as JSON.")]
Plot = Annotated[Path | None, typer.Option(help="Image to draw: live bytes over the step. The ending says which kind.")]


@app.command("measure")
def measure_command(target: Target, plot: Plot = None, device: Device = None) -> None:
    """Print what a training step takes: peak, seconds, flops."""
    with _working("measuring"):
        _check_files(plot)
        own, place = load(target), _device(device)
        own.train_once()
        found = measure(own.step, own.model, optimizer=own.optimizer, device=place)
    _show(found)
    with _working("drawing"):
        _write(plot, found.plot)


@app.command("saved")
def saved_command(
    target: Target,
    top: Annotated[int, typer.Option(min=1, help="How many rows of each table to print.")] = 10,
    out: Annotated[Path | None, typer.Option(help="File to write all of the report to, as JSON.")] = None,
) -> None:
    """Print what autograd keeps of a training step at the end of its forward: which bytes, saved where."""
    with _working("looking"):
        _check_files(out)
        own = load(target)
        found = saved(own.step, own.model)
    _show(found.text(top))
    with _working("writing"):
        _write(out, found.save)


@app.command("plan")
def plan_command(
    target: Target,
    budget: Budget,
    out: Out = None,
    plot: Plot = None,
    cost: Costs = "seconds",
    margin: Margin = "0",
    device: Described = None,
    on: On = None,
    save_device: SaveDevice = None,
    store: Stores = None,
) -> None:
    """Print the fastest plan found that is predicted to stay within a budget."""
    with _saying_errors(), progress_bar(_err) as progress:
        _check_files(out, plot, save_device)
        size, free = _budget(budget), margin_of(_number(margin))
        planner = _planner(target, device, cost, on, progress, _stores(store))
        found = planner.plan(size, margin=free)
        text = str(found)  # works the certificate out
        if save_device is not None:
            planner.save_device(save_device)
    _show(text)
    _keep(found, out, plot)


def _planner(
    target: str, device: str | None, cost: Cost, on: On, show: Observer, stores: Sequence[Store] = ()
) -> Planner:
    """Return a planner; what it warns of is said in one line."""
    place = _device(device) if on is None else device_of(device)  # what is wrong with it is said before a model is made
    own = load(target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeviceWarning)
        planner = Planner(
            own.model, own.step, optimizer=own.optimizer, device=place, cost=cost, stores=stores, on=on, progress=show
        )
    for one in caught:
        _say(f"{one.category.__name__}: {one.message}")
    return planner


@app.command("frontier")
def frontier_command(
    target: Target,
    points: Annotated[int, typer.Option(min=2, help="For how many budgets plans are sought.")] = MOST_POINTS,
    out: Annotated[Path | None, typer.Option(help="File to write the points to, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image to draw: peak against time.")] = None,
    cost: Costs = "seconds",
    device: Described = None,
    on: On = None,
) -> None:
    """Print peak against time over all budgets, with the budget to pass for each point."""
    with _saying_errors(), progress_bar(_err) as progress:
        _check_files(out, plot)
        found = _planner(target, device, cost, on, progress).frontier(points=points)
    _out.print(frontier_table(found))
    for remark in found.remarks:
        _show(remark)
    with _working("writing"):
        _write(out, found.save)
        _write(plot, found.plot)


@app.command("verify")
def verify_command(
    target: Target,
    plan: Annotated[Path, typer.Option(help="A plan file.")],
    device: Device = None,
    store: Stores = None,
) -> None:
    """Run a step with a plan and one without; exit code 1 if they differ, or if the peak is above the plan's budget."""
    with _working("verifying"):
        found = Plan.load(plan)
        own, place = load(target), _device(device)
        found.apply(own.model, stores=_stores(store))
        report = verify(own.model, own.step, optimizer=own.optimizer, device=place)
    _show(report)
    _judge(found, report)


@app.command("fit")
def fit_command(
    target: Target,
    budget: Budget,
    out: Out = None,
    plot: Plot = None,
    cost: Costs = "seconds",
    margin: Margin = "0",
    device: Device = None,
    store: Stores = None,
) -> None:
    """Plan, and confirm the plan by real steps with and without it; exit code 1 as in verify."""
    with _working("fitting"):
        _check_files(out, plot)
        size, free = _budget(budget), margin_of(_number(margin))
        own, place, stores = load(target), _device(device), _stores(store)
        planner = Planner(own.model, own.step, optimizer=own.optimizer, device=place, cost=cost, stores=stores)
        found = fit_with(planner, own.model, own.step, budget=size, optimizer=own.optimizer, margin=free)
        report = verify(own.model, own.step, optimizer=own.optimizer, device=place)
    _show(found)
    _show("")
    _show(report)
    _keep(found, out, plot)
    _judge(found, report)


def _budget(text: str) -> int | str:
    """Return a budget, which is checked before any work is done."""
    budget = _number(text)
    if percentage_of(budget) is None:
        parse_bytes(budget)
    return budget


def _number(text: str) -> int | str:
    """Return digits as the number that they are; all else is for the library to read."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 40 else text


def _device(text: str | None) -> torch.device | None:
    try:
        return None if text is None else torch.device(text)
    except RuntimeError as error:
        raise TargetError(f"--device {text!r} is no device, like cpu or cuda:0.") from error


def _stores(names: list[str] | None) -> list[Store]:
    kinds: dict[str, Callable[[], Store]] = {"disk": Disk, "host": Host}
    for name in names or ():
        if name not in kinds:
            raise TargetError(f"--store {name!r}: allowed are {' and '.join(kinds)}.")
    return [kinds[name]() for name in names or ()]


def _check_files(*paths: Path | None) -> None:
    """Raise before any work is done if a file could not be written after it."""
    for path in paths:
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise TargetError(f"{path} cannot be written: {path.parent} is no folder, or it is one itself.")


def _keep(found: Plan, out: Path | None, plot: Path | None) -> None:
    with _working("writing"):
        _write(out, found.save)
        _write(plot, found.plot)


def _write(path: Path | None, write: Callable[[Path], None]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise TargetError(f"{path} cannot be written: {error}.") from error
    _say(f"wrote {path}")


def _judge(plan: Plan, report: Report) -> None:
    """Exit with 1 if a step under the plan was not what it has to be."""
    peak_bytes = max(report.peak_bytes, plan.optimizer_peak_bytes or 0)
    if peak_bytes > plan.budget_bytes:
        _say(f"The peak of {format_bytes(peak_bytes)} is above the budget of {format_bytes(plan.budget_bytes)}.")
    if report.is_exact is False or peak_bytes > plan.budget_bytes:
        raise typer.Exit(1)


def main() -> None:
    """Run the command line."""
    # torch reports each start of its profiler, which measures the bytes, on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    app()
