"""The options of the commands, and the parsing of their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Unpack

import torch
import typer

from torchremat.cli.targets import SHAPE, TargetError
from torchremat.planning.budgets import checked_bytes, relative_of
from torchremat.planning.devices.device import Device as DeviceDescription
from torchremat.planning.devices.device import device_of, is_described
from torchremat.planning.plan_options import PlanOptions, SearchKeywords
from torchremat.planning.searches.chains import Cost
from torchremat.planning.searches.search_budget import Observer
from torchremat.stores.disk import Disk
from torchremat.stores.host import Host
from torchremat.tensors.handles import Store

Target = Annotated[str, typer.Argument(metavar="MODULE:FACTORY", help=f"A function that returns {SHAPE}.")]
Budget = Annotated[
    str, typer.Option(help="Peak of a step: bytes, 6GiB, 60% (of the plain peak), 40% of activations, or min.")
]
Margin = Annotated[str, typer.Option(help="Part of the budget to leave free, like 1GiB.")]
Costs = Annotated[Cost, typer.Option(help="What to minimise.")]
Operators = Annotated[bool, typer.Option(help="Whether parts of a module may be kept.")]
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
OptimizerStore = Annotated[
    str | None,
    typer.Option(help="Where the optimizer's state may wait: disk or host. Give verify the same as plan."),
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


def described_of(text: str | None, on: On) -> torch.device | DeviceDescription | None:
    """Return the device to plan for: one of this machine, or a described one that nothing runs on.

    Raises:
        DeviceError: The description does not exist.
        TargetError: The device does not exist.
    """
    return place_of(text) if on is None else device_of(text)


def options_of(
    device: str | None,
    on: On,
    store: list[str] | None,
    progress: Observer,
    release_gradients: Literal["no", "yes", "auto"],
    optimizer_store: str | None,
    **search: Unpack[SearchKeywords],
) -> PlanOptions:
    """Return the options of a plan; their errors are reported before a model is made.

    Raises:
        DeviceError: The description of the device does not exist.
        TargetError: The device, or a kind of store, does not exist.
    """
    place, stores = described_of(device, on), stores_of(store)
    return PlanOptions(
        device=place,
        on=on,
        stores=stores,
        release_gradients="auto" if release_gradients == "auto" else release_gradients == "yes",
        optimizer_store=optimizer_store_of(optimizer_store),
        progress=progress,
        **search,
    )


def optimizer_store_of(name: str | None) -> Store | None:
    """Return a new store of the named kind.

    Raises:
        TargetError: The kind does not exist.
    """
    return None if name is None else _store_of(name, "--optimizer-store")


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
