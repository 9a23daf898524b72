"""Calls of operators, each run by itself on zeros while the allocator is recorded.

A call runs twice, since libraries initialize themselves in the first run; the second counts. Only operators of torch
run: custom operators may have unknown side effects.

Missing on purpose: workspace that depends on values.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple, cast

import torch
from torch import Tensor

from torchremat._compat.fakes import without_fakes
from torchremat._compat.inductor import known
from torchremat.errors import UnsupportedError
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.traces import AllocationRecorder
from torchremat.measuring.untouched import RandomNumbers
from torchremat.tensors.structure import tensors_in

OF_TORCH = ("aten", "prims", "inductor_prims", "inductor")


class TensorShape(NamedTuple):
    """A tensor without its data: the data from which `made_up` makes one like it."""

    size: list[int]
    stride: list[int]
    dtype: torch.dtype
    device: torch.device


class Trials:
    """The calls that have run on one device, by the name that the caller gave each.

    Attributes:
        high_bytes: The peak bytes of each call, its results included.
        storage_bytes: Bytes of the tensors that each returns.
        results: These tensors without data.
        unknown: Operators that could not be run, with the reason.
    """

    def __init__(self, device: torch.device) -> None:
        self.high_bytes: dict[str, int] = {}
        self.storage_bytes: dict[str, list[int]] = {}
        self.results: dict[str, object] = {}
        self.unknown: dict[str, str] = {}
        self._device = device
        self._recorder: AllocationRecorder | None = None
        self._marks: dict[str, tuple[int, int]] = {}

    @contextmanager
    def recorded(self) -> Generator[None]:
        """Let calls run in the block. Generators are restored afterwards."""
        before = RandomNumbers()
        with ExitStack() as stack:
            stack.callback(before.put_back)
            stack.enter_context(without_fakes())
            stack.enter_context(torch.no_grad())
            try:
                self._recorder = stack.enter_context(record_allocations(self._device))
            except UnsupportedError as error:
                self.unknown["all operators"] = str(error)
            yield
        if self._recorder is not None:
            trace, self._recorder = self._recorder.trace, None
            for name, (first, last) in self._marks.items():
                self.high_bytes[name] = trace.rise_bytes_between(first, last)
            self._marks = {}

    def run(self, name: str, operator: str, prepare: Callable[[], Callable[[], object]]) -> None:
        """Run a call, unless one of this name has run.

        Args:
            name: A unique name for the call.
            operator: The operator that it calls.
            prepare: Makes its arguments, and returns the call with them.
        """
        if name in self.storage_bytes or self._recorder is None:
            return
        try:
            call = prepare()
            call()
            first = self._recorder.mark("call")
            result = call()
            self._marks[name] = first, self._recorder.mark("done")
        except Exception as error:  # noqa: BLE001  an operator may reject zeros as arguments in any way
            self.unknown[operator] = str(error).partition("\n")[0]
            return
        self.storage_bytes[name] = [one.untyped_storage().nbytes() for one in tensors_in(result)]
        self.results[name] = shapes_of(result)


def shapes_of(value: object) -> object:
    """Return an operator's arguments or results with shapes in place of tensors, and numbers in place of symbols."""
    if isinstance(value, Tensor):
        size, stride = ([known(one) for one in numbers] for numbers in (value.shape, value.stride()))
        return TensorShape(size, stride, value.dtype, value.device)
    if isinstance(value, list | tuple):
        return [shapes_of(one) for one in cast("list[object]", value)]
    return known(value) if isinstance(value, torch.SymInt) else value


def made_up(value: object) -> object:
    """Return zeros of a shape; anything else as it is."""
    if not isinstance(value, TensorShape):
        return value
    steps = zip(value.size, value.stride, strict=True)
    elements = 1 + sum((length - 1) * step for length, step in steps) if all(value.size) else 0
    return torch.zeros(elements, dtype=value.dtype, device=value.device).as_strided(value.size, value.stride)
