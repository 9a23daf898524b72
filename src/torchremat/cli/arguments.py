"""The target and the options of the commands.

A target is what a factory named `module:function` returns. The folder that the command runs in is searched first. The
factory takes no arguments and returns a model and a step, and optionally an optimizer.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
import typer
from torch import nn

from torchremat.errors import first_of
from torchremat.measuring.step import loss_of, run_backward
from torchremat.planning.budgets import checked_bytes, relative_of
from torchremat.planning.devices.device import device_of, is_described
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles.optimizers import step_alone
from torchremat.planning.profiles.tracing import Step
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.search_budget import Observer
from torchremat.stores.disk import Disk
from torchremat.stores.host import Host
from torchremat.tensors.handles import Store

SHAPE = "(model, step) or (model, step, optimizer)"


class TargetError(Exception):
    """A command names something that does not exist or does not fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TargetStep:
    """The result of a factory."""

    model: nn.Module
    step: Step
    optimizer: torch.optim.Optimizer | None

    def train_once(self) -> None:
        """Run one training step if there is an optimizer, so that its state exists, and is counted, from now on."""
        if self.optimizer is not None:
            run_backward(loss_of(self.step(self.model)))
            step_alone(self.optimizer, self.optimizer.step)
            self.optimizer.zero_grad()


def load(target: str) -> TargetStep:
    """Return the target that the factory `module:function` makes.

    Raises:
        TargetError: The module or function does not exist, or it returns something else.
    """
    module_name, colon, path = target.partition(":")
    if not colon or not module_name or not path:
        raise TargetError(f"{target!r}: expected `module:factory`, like `train:build`.")
    if module_name.endswith(".py") or "/" in module_name or module_name.startswith("."):
        raise TargetError(f"{module_name!r}: expected the name of a module, like `train`, not of a file.")
    found: object = _import(module_name)
    for name in path.split("."):
        if not hasattr(found, name):
            raise TargetError(f"module {module_name!r} has no {path!r}.{_name_functions(module_name)}")
        found = getattr(found, name)
    if not callable(found):
        raise TargetError(f"{target} is a {type(found).__name__}, not a function that returns {SHAPE}.")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise TargetError(f"{target} has to take no arguments: {error}.") from error
    except ValueError:  # some callables of C have no signature
        pass
    return _subject(target, cast("Callable[[], object]", found)())


def _import(name: str) -> object:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that this module imports may be missing too; that is the user's own traceback.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise TargetError(
            f"there is no module {error.name!r} in this folder or among the installed packages."
        ) from error


def _name_functions(module_name: str) -> str:
    """Return a sentence with the functions that a module defines."""
    names = [
        name
        for name, value in vars(sys.modules[module_name]).items()
        if callable(value) and getattr(value, "__module__", None) == module_name and not name.startswith("_")
    ]
    return f" It defines {first_of(names, 8)}." if names else ""


def _subject(target: str, made: object) -> TargetStep:
    parts = cast("tuple[object, ...]", made) if isinstance(made, tuple) else ()
    if len(parts) not in (2, 3):
        raise TargetError(f"{target} returned {_describe(made)}; expected {SHAPE}.")
    model, step, optimizer = (*parts, None)[:3]
    if not isinstance(model, nn.Module):
        raise TargetError(f"{target} returned {_describe(made)}; the first must be a torch.nn.Module.")
    if not callable(step):
        raise TargetError(f"{target} returned {_describe(made)}; the second must be a function, step(model).")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TargetError(f"{target} returned {_describe(made)}; the third must be a torch.optim.Optimizer.")
    return TargetStep(model=model, step=cast("Step", step), optimizer=optimizer)


def _describe(made: object) -> str:
    if isinstance(made, tuple):
        kinds = ", ".join(type(part).__name__ for part in cast("tuple[object, ...]", made))
        return f"a tuple ({kinds})"
    return "None (is a `return` missing?)" if made is None else f"a {type(made).__name__}"


Target = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=f"A function that returns {SHAPE}.")]
Budget = Annotated[
    str, typer.Option(help="Peak of a step: bytes, 6GiB, 60% (of the plain peak), 40% of activations, or min.")
]
Margin = Annotated[str, typer.Option(help="Part of the budget to leave free, like 1GiB.")]
Costs = Annotated[Cost, typer.Option(help="What to minimise.")]
Operators = Annotated[bool, typer.Option(help="Whether parts of a module may be kept.")]
Certify = Annotated[
    bool, typer.Option("--certify", help="Print how far the plan can be from the best: one more run of the step.")
]
On = Annotated[Literal["meta"] | None, typer.Option(help=("meta: plan for another device, without running anything."))]
Described = Annotated[
    str | None,
    typer.Option(
        help=(
            "Device whose bytes count; by default that of the first parameter. With --on meta: a name like h100, or "
            "a file."
        )
    ),
]
SaveDevice = Annotated[
    Path | None, typer.Option(help=("File for a description of this device, for plans with --on meta."))
]
Device = Annotated[str | None, typer.Option(help=("Device whose bytes count; by default that of the first parameter."))]
Stores = Annotated[
    list[str] | None,
    typer.Option(
        help=("Where saved tensors may wait: disk or host. Repeat it for both, and give verify the same as plan.")
    ),
]
Release = Annotated[
    Literal["no", "yes", "auto"],
    typer.Option(help="Whether each parameter steps in the backward and frees its gradient; auto: if that helps."),
]
Accumulates = Annotated[
    bool, typer.Option("--accumulates", help="Steps begin with gradients, as where several backwards add them up.")
]
OptimizerStore = Annotated[
    str | None, typer.Option(help="Where the optimizer's state may wait: disk or host. Give verify the same as plan.")
]
ParameterStore = Annotated[
    str | None, typer.Option(help="Where parameters may wait: disk or host. Give verify the same as plan.")
]
Out = Annotated[Path | None, typer.Option(help="File to write the plan to, as JSON.")]
Plot = Annotated[
    Path | None, typer.Option(help=("Image to draw: live bytes over the step. The file ending sets the format."))
]

Html = Annotated[Path | None, typer.Option(help="Page to write, for a browser; it needs no network.")]
Trace = Annotated[Path | None, typer.Option(help="Trace to write, for ui.perfetto.dev: .json or .json.gz.")]


def budget_of(text: str) -> int | str:
    """Return a budget, which is checked before any work is done."""
    budget = number_of(text)
    if relative_of(budget) is None:
        checked_bytes(budget)
    return budget


def number_of(text: str) -> int | str:
    """Return digits as a number; the library parses all other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 40 else text


def place_of(text: str | None) -> torch.device | None:
    """Return the device of a name.

    Raises:
        TargetError: The device does not exist.
    """
    try:
        return None if text is None else torch.device(text)
    except RuntimeError as error:
        if is_described(text):
            raise TargetError(
                f"--device {text!r} is the description of a device; only `plan` and `frontier` take one, with "
                "--on meta."
            ) from error
        raise TargetError(f"--device {text!r} is not a device such as cpu or cuda:0.") from error


def options_of(
    device: str | None,
    on: On,
    store: list[str] | None,
    progress: Observer,
    release_gradients: Literal["no", "yes", "auto"],
    optimizer_store: str | None,
    parameter_store: str | None,
    accumulates: bool,
    *,
    cost: Cost,
    operators: bool,
    certify: bool = False,
) -> PlanOptions:
    """Return the options of a plan; their errors are reported before a model is made.

    Raises:
        DeviceError: The description of the device does not exist.
        TargetError: The device, or a kind of store, does not exist.
    """
    return PlanOptions(
        device=place_of(device) if on is None else device_of(device),
        on=on,
        stores=stores_of(store),
        release_gradients="auto" if release_gradients == "auto" else release_gradients == "yes",
        optimizer_store=step_store_of(optimizer_store, "--optimizer-store"),
        parameter_store=step_store_of(parameter_store, "--parameter-store"),
        accumulates=accumulates,
        progress=progress,
        cost=cost,
        operators=operators,
        certify=certify,
    )


def step_store_of(name: str | None, option: str) -> Store | None:
    """Return a new store of the kind that an option names.

    Raises:
        TargetError: The kind does not exist.
    """
    return None if name is None else _store_of(name, option)


def stores_of(names: list[str] | None) -> list[Store]:
    """Return new stores of the named kinds.

    Raises:
        TargetError: A kind does not exist.
    """
    return [_store_of(name, "--store") for name in names or ()]


def _store_of(name: str, option: str) -> Store:
    kinds: dict[str, Callable[[], Store]] = {"disk": Disk, "host": Host}
    if name not in kinds:
        raise TargetError(f"{option} {name!r}: allowed are {' and '.join(kinds)}.")
    return kinds[name]()
