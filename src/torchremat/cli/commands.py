"""The commands.

Exit codes: 1 if something is wrong with the model, the step, the budget or the plan, 2 if something is wrong with the
command, 3 if a plan is within its budget and no plain step was available for comparison.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from torchremat.cli.arguments import (
    Accumulates,
    Budget,
    Certify,
    Costs,
    Described,
    Device,
    Html,
    Margin,
    On,
    Operators,
    OptimizerStore,
    Out,
    ParameterStore,
    Plot,
    Release,
    SaveDevice,
    Stores,
    Target,
    TargetError,
    TargetStep,
    Trace,
    budget_of,
    load,
    number_of,
    options_of,
    place_of,
    step_store_of,
    stores_of,
)
from torchremat.errors import DeviceWarning, TorchrematError
from torchremat.measuring.keeping import saved
from torchremat.measuring.measurement import measure
from torchremat.planning.bars import progress_bar
from torchremat.planning.budgets import margin_of
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.planner import Planner
from torchremat.planning.profiled_step import check_request
from torchremat.planning.results.frontiers import POINTS, Frontier
from torchremat.planning.results.plans import Plan
from torchremat.planning.training.fitting import fit_with
from torchremat.planning.training.report import Report
from torchremat.planning.training.verification import verify
from torchremat.tensors.sizes import format_bytes
from torchremat.views.pictures import check_picture
from torchremat.views.viewed import check_pages

app = typer.Typer(
    help="Give a PyTorch model a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out, _err = Console(), Console(stderr=True)


def _say_version(asked: bool) -> None:
    if asked:
        _show(f"torchremat {version('torchremat')}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def command(
    *,
    is_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help=("Print the versions of torchremat and torch.")
        ),
    ] = False,
) -> None:
    """Handle the options before a command."""


@contextmanager
def _working(doing: str) -> Generator[None]:
    """Print the current activity, and errors."""
    with _saying_errors(), _err.status(doing):
        yield


@contextmanager
def _saying_errors() -> Generator[None]:
    """Turn errors into a message and an exit code; errors of user code pass through."""
    try:
        yield
    except TorchrematError as error:
        _say(f"{type(error).__name__}: {error}")
        raise typer.Exit(1) from error
    except TargetError as error:
        _say(f"Error: {error}")
        raise typer.Exit(2) from error


@contextmanager
def _saying_warnings() -> Generator[None]:
    """Hold back warnings until a block ends, in any way: a progress bar may be drawn meanwhile.

    Our warnings are one line each; warnings of the user's code show their origin, as they do without us.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DeviceWarning)
        try:
            yield
        finally:
            for one in caught:
                if issubclass(one.category, DeviceWarning):
                    _say(f"{one.category.__name__}: {one.message}")
                else:
                    text = warnings.formatwarning(one.message, one.category, one.filename, one.lineno, one.line)
                    _say(text.rstrip())


def _say(text: str) -> None:
    """Print to stderr, separate from the result."""
    _err.print(text, markup=False, highlight=False, soft_wrap=True)


def _show(result: object) -> None:
    """Print the result."""
    _out.print(str(result), markup=False, highlight=False, soft_wrap=True)


@app.command("measure")
def measure_command(
    target: Target,
    plot: Plot = None,
    html: Html = None,
    trace: Trace = None,
    device: Device = None,
    accumulates: Accumulates = False,
) -> None:
    """Print what a training step takes: peak, seconds, flops."""
    with _working("measuring"):
        _check_files(trace, plot=plot, html=html)
        subject, place = load(target), place_of(device)
        subject.train_once()
        measurement = measure(
            subject.model, subject.step, optimizer=subject.optimizer, device=place, accumulates=accumulates
        )
    _show(measurement)
    _write("drawing", (plot, measurement.plot), (html, measurement.html), (trace, measurement.trace))


@app.command("saved")
def saved_command(
    target: Target,
    top: Annotated[int, typer.Option(min=1, help="How many rows of each table to print.")] = 10,
    out: Annotated[Path | None, typer.Option(help="File for the whole report, as JSON.")] = None,
    html: Html = None,
) -> None:
    """Print what autograd keeps of a training step at the end of its forward: which bytes, saved where."""
    with _working("looking"):
        _check_files(out, html=html)
        subject = load(target)
        report = saved(subject.model, subject.step)
    _show(report.text(top))
    _write("writing", (out, report.save), (html, report.html))


@app.command("plan")
def plan_command(
    target: Target,
    budget: Budget,
    out: Out = None,
    plot: Plot = None,
    html: Html = None,
    trace: Trace = None,
    cost: Costs = "seconds",
    margin: Margin = "0",
    device: Described = None,
    on: On = None,
    save_device: SaveDevice = None,
    store: Stores = None,
    operators: Operators = True,
    release_gradients: Release = "no",
    optimizer_store: OptimizerStore = None,
    parameter_store: ParameterStore = None,
    certify: Certify = False,
    accumulates: Accumulates = False,
) -> None:
    """Print the fastest plan found that is predicted to stay within a budget."""
    with _saying_errors(), progress_bar(_err) as progress:
        _check_files(out, save_device, trace, plot=plot, html=html)
        if save_device is not None and on is not None:
            raise TargetError(f"--save-device describes the device that the step runs on: leave out --on {on}.")
        size, margin_bytes = budget_of(budget), margin_of(number_of(margin))
        trained = release_gradients, optimizer_store, parameter_store, accumulates
        options = options_of(device, on, store, progress, *trained, cost=cost, operators=operators, certify=certify)
        _, planner = _planner(target, options, size, margin_bytes)
        found = planner.plan(size, margin=margin_bytes)
        text = str(found)  # works the certificate out
        if save_device is not None:
            planner.save_device(save_device)
    _show(text)
    _write("writing", (out, found.save), (plot, found.plot), (html, found.html), (trace, found.trace))


@app.command("frontier")
def frontier_command(
    target: Target,
    points: Annotated[int, typer.Option(min=2, help="Number of budgets to plan for.")] = POINTS,
    out: Annotated[Path | None, typer.Option(help="File to write the points to, as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image to draw: peak against time.")] = None,
    html: Html = None,
    cost: Costs = "seconds",
    device: Described = None,
    on: On = None,
    store: Stores = None,
    operators: Operators = True,
    release_gradients: Release = "no",
    optimizer_store: OptimizerStore = None,
    parameter_store: ParameterStore = None,
    accumulates: Accumulates = False,
) -> None:
    """Print peak against time over all budgets, with the budget to pass for each point."""
    with _saying_errors(), progress_bar(_err) as progress:
        _check_files(out, plot=plot, html=html)
        trained = release_gradients, optimizer_store, parameter_store, accumulates
        options = options_of(device, on, store, progress, *trained, cost=cost, operators=operators)
        _, planner = _planner(target, options)
        frontier = planner.frontier(points=points)
    _out.print(frontier_table(frontier))
    for remark in frontier.remarks:
        _show(remark)
    _write("writing", (out, frontier.save), (plot, frontier.plot), (html, frontier.html))


@app.command("verify")
def verify_command(
    target: Target,
    plan: Annotated[Path, typer.Option(help="A plan file.")],
    device: Device = None,
    store: Stores = None,
    optimizer_store: OptimizerStore = None,
    parameter_store: ParameterStore = None,
) -> None:
    """Run a step with a plan and one without.

    Exit code 1 if they differ, or if the peak is above the plan's budget; 3 if the plain step does not fit into memory,
    so that nothing was compared.
    """
    with _working("verifying"):
        loaded = Plan.load(plan)
        subject, place = load(target), place_of(device)
        loaded.apply(
            subject.model,
            stores=stores_of(store),
            optimizer=subject.optimizer,
            optimizer_store=step_store_of(optimizer_store, "--optimizer-store"),
            parameter_store=step_store_of(parameter_store, "--parameter-store"),
        )
        report = verify(subject.model, subject.step, optimizer=subject.optimizer, device=place)
    _show(report)
    _judge(loaded, report)


@app.command("fit")
def fit_command(
    target: Target,
    budget: Budget,
    out: Out = None,
    plot: Plot = None,
    html: Html = None,
    trace: Trace = None,
    cost: Costs = "seconds",
    margin: Margin = "0",
    device: Device = None,
    store: Stores = None,
    operators: Operators = True,
    release_gradients: Release = "no",
    optimizer_store: OptimizerStore = None,
    parameter_store: ParameterStore = None,
    certify: Certify = False,
    accumulates: Accumulates = False,
) -> None:
    """Plan, and confirm the plan by real steps with and without it; exit codes as in verify."""
    with _saying_errors(), progress_bar(_err) as progress:
        _check_files(out, trace, plot=plot, html=html)
        size, margin_bytes = budget_of(budget), margin_of(number_of(margin))
        trained = release_gradients, optimizer_store, parameter_store, accumulates
        options = options_of(device, None, store, progress, *trained, cost=cost, operators=operators, certify=certify)
        subject, planner = _planner(target, options, size, margin_bytes)
        fitted = fit_with(planner, subject.model, budget=size, margin=margin_bytes).plan
        text = str(fitted)  # works the certificate out
    with _working("verifying"):
        report = verify(subject.model, subject.step, optimizer=subject.optimizer, device=place_of(device))
    _show(f"{text}\n\n{report}")
    _write("writing", (out, fitted.save), (plot, fitted.plot), (html, fitted.html), (trace, fitted.trace))
    _judge(fitted, report)


def _planner(
    target: str, options: PlanOptions, budget: int | str | None = None, margin_bytes: int = 0
) -> tuple[TargetStep, Planner]:
    """Return the factory's target and its planner; warnings are printed at the end, also on failure."""
    subject = load(target)
    options = replace(options, optimizer=subject.optimizer)
    if budget is not None:
        check_request(subject.model, subject.step, options, budget, margin=margin_bytes)
    with _saying_warnings():
        return subject, Planner(subject.model, subject.step, **options.keywords)


def _check_files(*paths: Path | None, plot: Path | None = None, html: Path | None = None) -> None:
    """Raise before any work is done if a file, a picture or a page could not be written after it."""
    for path in (*paths, plot, html):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            raise TargetError(f"{path} cannot be written: {path.parent} is not a folder, or {path} is one.")
    if plot is not None:
        check_picture(plot)
    if html is not None:
        check_pages()


def _write(doing: str, *files: tuple[Path | None, Callable[[Path], None]]) -> None:
    """Write those of some files that were asked for, and say so."""
    with _working(doing):
        for path, write in files:
            if path is None:
                continue
            try:
                write(path)
            except OSError as error:
                raise TargetError(f"{path} cannot be written: {error}.") from error
            _say(f"wrote {path}")


def _judge(plan: Plan, report: Report) -> None:
    """Exit with 1 if a step under the plan failed its checks, with 3 if nothing could be compared."""
    peak_bytes = max(report.peak_bytes, plan.optimizer_peak_bytes or 0)
    if peak_bytes > plan.budget_bytes:
        _say(f"The peak of {format_bytes(peak_bytes)} is above the budget of {format_bytes(plan.budget_bytes)}.")
    if report.is_exact is False or peak_bytes > plan.budget_bytes:
        raise typer.Exit(1)
    if report.is_exact is None and not (report.noise and report.is_repeatable):
        what = "differs from the next one" if report.noise else "does not fit into memory"
        do = "Seed what it draws" if report.noise else "Verify a smaller batch, or use a larger device"
        _say(f"The plain step {what}, so its gradients cannot be compared. {do}.")
        raise typer.Exit(3)


_MIB = 2**20
_FRONTIER = ("budget\nMiB", "peak\nMiB", "against\nplain", "recomputed\nGFLOP", "time\nagainst plain")


def frontier_table(frontier: Frontier) -> Table:
    """Return the points of a frontier as a table; each row has the budget to pass."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1))
    stored = any(point.stored_bytes for point in frontier.points)
    for heading in (*_FRONTIER, *(["stored\nMiB"] if stored else [])):
        table.add_column(heading, justify="right")
    steps = any(point.stepping != frontier.points[0].stepping for point in frontier.points)
    if steps:
        table.add_column("optimizer")
    for point in frontier.points:
        table.add_row(
            # Rounded up: a budget read off the table must suffice.
            f"{-(-10 * point.budget_bytes // _MIB) / 10:.1f}",
            _mib(point.peak_bytes),
            f"{100 * point.peak_bytes / max(1, frontier.points[0].peak_bytes):.0f}%",
            f"{point.recomputed_flops / 1e9:.2f}",
            f"{point.slowdown:.2f}",
            *([_mib(point.stored_bytes)] if stored else []),
            *([str(point.stepping)] if steps else []),
        )
    return table


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f}"


def main() -> None:
    """Run the command line."""
    app()
