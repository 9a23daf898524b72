"""A sequence of layers cut into stages, and the checks for that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from torchremat._compat.accelerators import accelerator_of, counting_devices
from torchremat.errors import PipelineError

_ADVICE = "`torchremat.pipeline.balance` has functions that find one by time, by size, or for given costs."


def partitioned(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> list[nn.Sequential]:
    """Return the layers as one `nn.Sequential` for each stage, on its device; they keep their names.

    Args:
        module: The layers.
        balance: How many of them each stage has.
        devices: The device of each stage; surplus devices are ignored.

    Raises:
        PipelineError: The balance, the devices or the layers are invalid; all problems are listed.
    """
    problems = _balance_problems(len(module), balance)
    if len(devices) < len(balance):
        problems.append(
            f"{len(balance)} stages need as many devices, and there are {len(devices)}: {list(map(str, devices))}"
        )
    layers = list(module.named_children())
    if len(layers) < len(module):
        problems.append("a layer occurs more than once, but it can be in one stage only")
    _raise(problems)
    stages: list[nn.Sequential] = []
    place = 0
    for count in balance:
        stage = nn.Sequential()
        for name, layer in layers[place : place + count]:
            stage.add_module(name, layer)
        stages.append(stage)
        place += count
    _raise(_sharing_problems(stages, devices))
    return [stage.to(device) for stage, device in zip(stages, devices, strict=False)]


def listed_devices(devices: Iterable[torch.device | str | int] | None, stages: int | None) -> list[torch.device]:
    """Return the devices to use: the given ones; else all CUDA devices, or the CPU once per stage."""
    if devices is not None:
        found = [torch.device(device) for device in devices]
    elif accelerators := counting_devices():
        found = accelerators
    else:
        found = [torch.device("cpu")] * (stages or 1)
    problems = [problem for device in dict.fromkeys(found) for problem in _existence_problems(device)]
    _raise(problems)
    return [accelerator_of(device).normalised(device) for device in found]


def _existence_problems(device: torch.device) -> list[str]:
    accelerator = accelerator_of(device)
    if not (accelerator.is_host or accelerator.counts):
        return [f"devices of type {device.type} are not supported, only cuda and cpu"]
    count = len(accelerator.devices())
    if not accelerator.is_host and (device.index or 0) >= count:
        return [f"there is no device {device}: torch finds {count} {device.type.upper()} devices here"]
    return []


def _balance_problems(layers: int, balance: Sequence[int]) -> list[str]:
    problems: list[str] = []
    if any(type(cast("object", count)) is not int or count < 1 for count in balance):
        problems.append(f"balance: expected ints of at least 1, got {list(balance)}")
    elif sum(balance) != layers:
        problems.append(f"the module has {layers} layers, and the balance {list(balance)} is for {sum(balance)}")
    return [f"{problem}. {_ADVICE}" for problem in problems]


def _sharing_problems(stages: Sequence[nn.Module], devices: Sequence[torch.device]) -> list[str]:
    known: dict[nn.Parameter, tuple[str, int]] = {}
    problems: list[str] = []
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            first, owner = known.setdefault(parameter, (name, number))
            if devices[owner] != devices[number]:
                problems.append(
                    f"parameter `{name}` of stage {number} on {devices[number]} is also `{first}` of stage {owner} on "
                    f"{devices[owner]}: a parameter has one device. Put both stages on it, or use two parameters"
                )
    return problems


def _raise(problems: Sequence[str]) -> None:
    if problems:
        raise PipelineError("this pipe cannot be made:\n" + "\n".join(f"  {problem}" for problem in problems))
