"""`GPipe`: a `Pipe` that accepts and refuses the same arguments as torchgpipe's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, SupportsInt, cast

import torch
from torch import Tensor, nn

from torchremat.pipeline.dependency import Passing, pass_all
from torchremat.pipeline.microbatch import Microbatch
from torchremat.pipeline.pipe import Pipe, find_devices
from torchremat.regions.runtime import is_checkpointing, is_recomputing

Device = torch.device | str | int


class GPipe(Pipe):
    """`torchgpipe.GPipe`: layers cut into partitions, which work on the microbatches of a batch at the same time.

    Args:
        module: The layers.
        balance: How many layers each partition has.
        devices: Of each partition; more are ignored. All CUDA devices by default, or the CPU for every partition.
        chunks: The microbatches of a batch.
        checkpoint: `"always"`, `"except_last"` or `"never"`.
        deferred_batch_norm: Whether batch normalisation tracks the statistics of the batch, not of its microbatches.

    Raises:
        TypeError: `module` is not an `nn.Sequential`, or its stashes and pops do not match.
        ValueError: A layer or parameter occurs twice, or the balance or an option is invalid.
        IndexError: Fewer devices than partitions are given.
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[Device] | None = None,
        chunks: SupportsInt = 1,
        checkpoint: object = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        count, mode = int(chunks), str(checkpoint)
        if balance is None:
            raise ValueError(_with_advice("balance is required"))
        if count <= 0:
            raise ValueError("number of chunks must be positive integer")
        if mode not in ("always", "except_last", "never"):
            raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
        verify_module(module)
        counts = list(balance)
        found = find_devices(devices, len(counts))
        _verify_balance(module, counts, found)
        super().__init__(
            module,
            counts,
            devices=found,
            chunks=count,
            checkpoint=mode,
            deferred_batch_norm=deferred_batch_norm,
        )
        for partition in self.partitions:
            partition.register_forward_hook(_check_output)

    def forward(self, input: object) -> object:
        """Run a batch through the partitions.

        Args:
            input: A tensor or a tuple of tensors on the first device, with the same size in their first dimension.

        Raises:
            TypeError: The input, or the output of a partition, has another type.
            PipelineError: The input cannot be cut, or the outputs of the microbatches cannot be joined.
        """
        check(input)
        return super().forward(input) if len(self.partitions) else input

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refuse to move."""
        raise _refuse_to_move()

    def cpu(self) -> NoReturn:
        """Refuse to move."""
        raise _refuse_to_move()

    def to(self, *args: Any, **kwargs: Any) -> GPipe:
        """Change the dtype; refuse to move.

        Raises:
            TypeError: A device is given, or a tensor, which has one.
        """
        places = (torch.device, int, str, Tensor)
        if "device" in kwargs or "tensor" in kwargs or (args and isinstance(args[0], places)):
            raise _refuse_to_move()
        super().to(*args, **kwargs)
        return self


class Checkpoint(Passing):
    """Marks recomputed outputs with the name of torchgpipe's nodes, which programs look for in a graph."""


def verify_module(module: nn.Sequential) -> None:
    """Check that every layer and every parameter has one partition.

    Raises:
        TypeError: `module` is not an `nn.Sequential`.
        ValueError: A layer occurs twice, or layers share a parameter.
    """
    if not isinstance(module, nn.Sequential):  # pyright: ignore[reportUnnecessaryIsInstance]: users are not type-checked
        raise TypeError(f"module must be nn.Sequential to be partitioned, got {type(module).__name__}")
    layers = list(module.children())
    if len(layers) < len(module):
        raise ValueError(
            f"module with duplicate children is not supported: {len(module)} layers are {len(layers)} modules"
        )
    owners: dict[Tensor, str] = {}
    for name, layer in module.named_children():
        for path, parameter in layer.named_parameters(prefix=name):
            owner = owners.setdefault(parameter, path)
            if owner.partition(".")[0] != name:
                raise ValueError(
                    "module with duplicate parameters in distinct children is not supported: "
                    f"{path!r} is {owner!r}; torchremat.Pipe allows it where both have the same device"
                )


def check(value: object) -> None:
    """Check that a value is a tensor, or a tuple of such values.

    Raises:
        TypeError: It has another type.
    """
    if isinstance(value, tuple):
        for one in cast("tuple[object, ...]", value):
            check(one)
    elif not isinstance(value, Tensor):
        raise TypeError(f"expected Tensor, but got {type(value).__name__}")


def _check_output(_partition: nn.Module, _given: tuple[object, ...], output: object) -> object:
    """Check the output of a partition, and mark it where it is recomputed."""
    check(output)
    if not (is_checkpointing() or is_recomputing()):
        return None
    found = Microbatch.of(output)
    return Microbatch(found.template, pass_all(Checkpoint, lambda: None, found.tensors)).value


def _verify_balance(module: nn.Sequential, balance: Sequence[int], devices: Sequence[torch.device]) -> None:
    if sum(balance) != len(module):
        raise ValueError(
            _with_advice(
                "module and sum of balance have different length "
                f"(module: {len(module)}, sum of balance: {sum(balance)})"
            )
        )
    if any(count <= 0 for count in balance):
        raise ValueError(_with_advice(f"all balance numbers must be positive integer (balance: {list(balance)})"))
    if len(balance) > len(devices):
        raise IndexError(
            f"too few devices to hold given partitions (devices: {len(devices)}, partitions: {len(balance)})"
        )


def _with_advice(fact: str) -> str:
    return (
        f"{fact}\n\n'torchremat.interop.torchgpipe.balance' finds a balance from the layers and a sample input:\n\n"
        "  balance = balance_by_time(partitions, module, sample)\n"
        "  module = GPipe(module, balance, ...)\n"
    )


def _refuse_to_move() -> TypeError:
    return TypeError(
        "denied to move parameters and buffers, because GPipe should manage device placement; give it `devices`"
    )
