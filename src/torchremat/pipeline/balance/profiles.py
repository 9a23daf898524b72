"""`balance`, `balance_by_time`, `balance_by_size`: given, timed or measured costs, cut into stages."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from torchremat.errors import ScheduleError, StepError, first_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.step import check_materialised
from torchremat.pipeline.balance.costs import first_microbatch, layer_bytes, layer_seconds
from torchremat.pipeline.balance.partition import Balance, Unit, partition
from torchremat.tensors.structure import tensors_in


def balance(costs: Iterable[float], partitions: int) -> Balance:
    """Return how many layers each of the partitions has, so that the most costly one costs as little as it can.

    No other way to cut the row does better. Of several equally good ones, it is the one with the most even counts, with
    more layers in the first partitions.

    Args:
        costs: The cost of each layer, in any unit; finite, none negative.
        partitions: 1 to the number of layers.

    Raises:
        ScheduleError: Fewer layers than partitions are given, or a cost is invalid.

    >>> print(balance([1, 2, 3, 4, 5, 6], 2))
    stage  layers  count  cost  share
        0  0 .. 3      4    10  47.6%
        1  4 .. 5      2    11  52.4%
    stage 1 costs most: 1.05 x an even share of 50.0%
    """
    found = list(costs)
    problems = _problems_of_partitions(partitions, len(found))
    wrong = [f"{cost!r} at {place}" for place, cost in enumerate(found) if not _is_cost(cost)]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        problems.append(f"costs: {', '.join(wrong[:3])}{more}; a cost is a finite number, at least 0")
    if problems:
        raise ScheduleError(f"balance: {_list(problems)}")
    # Scalars of NumPy and torch are costs as well.
    exact = [cost if isinstance(cost, int) else float(cost) for cost in found]
    return _balance(exact, partitions, "", map(str, range(len(found))))


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: object,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> Balance:
    """Return a balance of the seconds that each layer's forward and backward take.

    The layers run one after the other on copies in training mode; module, sample and generators stay as they are. On
    the CPU the copies use as many threads as the process does, all for one layer.

    Args:
        partitions: 1 to the number of layers.
        module: The layers, all of them without gradients.
        sample: The input of the first layer: a microbatch, as the pipeline will cut it.
        timeout: Seconds for all runs together. Each layer runs at least twice, however long that takes.
        device: Where the copies run; by default the device of the first parameter.

    Raises:
        StepError: One of the arguments cannot be used, or a parameter has a gradient; all problems are listed.
        UnsupportedError: The device does not exist.
    """
    problems = _problems_of_module(partitions, module)
    if not timeout >= 0:
        problems.append(f"timeout={timeout!r}: expected seconds, at least 0")
    if problems:
        raise StepError(f"balance_by_time: {_list(problems)}")
    check_materialised(module)
    place = _device(module, sample, device)
    return _balance(layer_seconds(module, sample, timeout=timeout, device=place), partitions, "s", module._modules)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: object,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> Balance:
    """Return a balance of the bytes that each layer needs: its saved tensors of a microbatch, and its parameters.

    Bytes are those of storages, each counted once, at the end of each layer's forward; a storage that a layer shares
    with the one before it counts for the earlier layer. The layers run one after the other on copies in training mode;
    module, input and generators stay as they are.

    Args:
        partitions: 1 to the number of layers.
        module: The layers, all of them without gradients.
        input: The input of the pipeline: a batch.
        chunks: How many microbatches it will be cut into; the first one runs.
        param_scale: How often the bytes of parameters count: for themselves, their gradients, and their optimizer
            state. 2 to 3 for SGD, 4 for Adam.
        device: Where the copies run; by default the device of the first parameter.

    Raises:
        StepError: One of the arguments cannot be used, or a parameter has a gradient; all problems are listed.
        UnsupportedError: The device does not exist.
    """
    problems = [*_problems_of_module(partitions, module), *_problems_of_chunks(chunks, input)]
    if not _is_cost(param_scale):
        problems.append(f"param_scale={param_scale!r}: expected a finite number, at least 0")
    if problems:
        raise StepError(f"balance_by_size: {_list(problems)}")
    check_materialised(module)
    place = _device(module, input, device)
    sizes = layer_bytes(module, first_microbatch(input, chunks), param_scale=param_scale, device=place)
    return _balance(sizes, partitions, "B", module._modules)


def _balance(costs: list[float] | list[int], partitions: int, unit: Unit, names: Iterable[str]) -> Balance:
    return Balance(counts=partition(costs, partitions), costs=tuple(costs), unit=unit, names=tuple(names))


def _device(module: nn.Module, value: object, wanted: torch.device | str | None) -> torch.device:
    inputs = tuple(tensors_in(value))
    return Subject(step=module, model=module, models=(module,), inputs=inputs, optimizer=None).device(wanted)


def _is_cost(cost: object) -> bool:
    try:
        return math.isfinite(cast("float", cost)) and cast("float", cost) >= 0
    except (TypeError, ValueError):
        return False


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


def _problems_of_partitions(partitions: int, layers: int) -> list[str]:
    if not _is_count(partitions):
        return [f"partitions={partitions!r}: expected a positive integer"]
    if layers < partitions:
        return [f"partitions={partitions}, but there are {layers} layers, and each needs one; give at most that"]
    return []


def _problems_of_module(partitions: int, module: nn.Module) -> list[str]:
    if not isinstance(module, nn.Sequential):
        return [f"module: expected a torch.nn.Sequential, whose layers run in order, got {type(module).__name__}"]
    problems = _problems_of_partitions(partitions, len(module))
    named = list(module.named_parameters())
    having = [f"`{name}`" for name, parameter in named if parameter.grad is not None]
    if having:
        problems.append(
            f"{len(having)} of {len(named)} parameters have a gradient already ({first_of(having)}), which copies "
            "would have as well; call `module.zero_grad(set_to_none=True)` first"
        )
    return problems


def _problems_of_chunks(chunks: int, batch: object) -> list[str]:
    if not _is_count(chunks):
        return [f"chunks={chunks!r}: expected a positive integer"]
    rows = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
    if chunks > 1 and len(rows) != 1:
        found = f"they have {' and '.join(map(str, sorted(rows)))}" if rows else "but none of them has rows"
        return [f"chunks={chunks}: the tensors of a batch need the same number of rows, {found}"]
    return []


def _list(problems: list[str]) -> str:
    if len(problems) == 1:
        return f"{problems[0]}."
    return f"{len(problems)} problems:" + "".join(f"\n  {problem}." for problem in problems)
