"""The costs of each layer: its saved tensors and parameters in bytes, its forward and backward in seconds.

The layers run one by one on copies: one layer's parameters and graph are in memory at a time. A layer gets the output
of the layer before it, and the skips that it pops, all detached from their graphs. So a model can be profiled on a
device that it does not fit on. For skips each layer is a stage of its own:

    before ──► entered ──► ran ──► after        before, after: without a graph; skips that wait are passed on
                                                entered: non-leaf tensors, for one run
                                                ran: output and stashed skips, with the layer's graph
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat._compat.accelerators import accelerator_of
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.keeping import report_of
from torchremat.measuring.runs import Subject
from torchremat.measuring.saving import SaveLog, watched
from torchremat.measuring.storages import StorageNumbers
from torchremat.measuring.untouched import untouched
from torchremat.pipeline.skip.inspection import inspect_skip_layout
from torchremat.pipeline.skip.layouts import Key, SkipLayout
from torchremat.pipeline.skip.trackers import CellTracker, use_skip_tracker
from torchremat.tensors.structure import join, split, tensors_in

T = TypeVar("T")


class Enter(torch.autograd.Function):
    """Gives a layer its input: a non-leaf tensor, since a layer may write to it in place, without a graph."""

    @staticmethod
    def forward(ctx: FunctionCtx, phony: Tensor, holder: list[Tensor]) -> Tensor:
        """Return the tensor in `holder`, which autograd does not see; `phony` makes it require grad."""
        return holder[0].detach()

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[None, None]:
        """Drop the gradient; computing it was the layer's part."""
        return None, None


_enter = cast("Callable[[Tensor, list[Tensor]], Tensor]", Enter.apply)


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """The values that pass from one layer to others: the input of the next one, and skips."""

    value: object
    skips: Mapping[Key, object]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCopy:
    """A copy of a layer, and its inputs.

    Attributes:
        place: The layer's place in the model.
        layout: The routes of the skips.
        before: The values that pass from earlier layers to this one, and to those after it.
    """

    layer: nn.Module
    place: int
    layout: SkipLayout
    before: Boundary

    def entered(self, *, copied: bool) -> Boundary:
        """Return the layer's input for one run; tensors require grad where they do in `before`.

        Args:
            copied: Whether tensors have memory of their own, so that the layer may run again.
        """
        phony = torch.zeros(0, requires_grad=True)

        def enter(tensor: Tensor) -> Tensor:
            data = tensor.detach()
            data = data.clone() if copied else data
            return _enter(phony, [data]) if tensor.requires_grad else data

        skips = {key: skip for key, skip in self.before.skips.items() if self._is_popped(key)}
        return cast("Boundary", map_tensors(enter, Boundary(value=self.before.value, skips=skips)))

    def run(self, entered: Boundary) -> Boundary:
        """Run the layer's forward; return its results, with their graph."""
        tracker = CellTracker(self.layout, self.place, entered.skips)
        with use_skip_tracker(tracker):
            output = self.layer(entered.value)
        return Boundary(value=output, skips=tracker.outgoing)

    def after(self, ran: Boundary) -> Boundary:
        """Return the values that pass to the layers after this one."""
        waiting = {key: skip for key, skip in self.before.skips.items() if not self._is_popped(key)}
        cut = cast("Boundary", map_tensors(lambda one: one.detach().requires_grad_(one.requires_grad), ran))
        return Boundary(value=cut.value, skips={**waiting, **cut.skips})

    def _is_popped(self, key: Key) -> bool:
        return self.layout.routes[key][1] == self.place


def run_each(
    module: nn.Sequential, value: object, device: torch.device, run: Callable[[LayerCopy], tuple[T, Boundary]]
) -> Iterator[T]:
    """Yield a function's result for each layer, in order.

    Args:
        module: The layers; copies of them run, in training mode.
        value: The input of the first layer, which gets a copy of it.
        device: Where they run.
        run: Runs a cell. Returns the value to yield, and the values that pass to the layers after it.

    Raises:
        SkippableError: Stashes and pops do not fit together.
    """
    layers = module._modules.values()
    layout = inspect_skip_layout(cast("list[nn.Module]", layers))

    def move(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    boundary = Boundary(value=map_tensors(move, value), skips={})
    for place, layer in enumerate(layers):
        # Only the cell holds the copy, and nothing holds the cell when the next one is made.
        copied = copy.deepcopy(layer).to(device).train()
        found, boundary = run(LayerCopy(layer=copied, place=place, layout=layout, before=boundary))
        del copied
        yield found


def map_tensors(function: Callable[[Tensor], Tensor], value: object) -> object:
    """Return a value with other tensors in the places of its own."""
    tensors: list[Tensor] = []
    template = split(value, tensors, [])
    return join(template, [function(tensor) for tensor in tensors])


_IDLE_RUNS = 25

# NOTE [ Whose a saved storage is ]
#
# A storage belongs to the first layer that saves it: the output of a ReLU, which the ReLU and the linear layer behind
# it save, counts for the ReLU. An input that only the linear layer saves counts for the linear layer. So the bytes of
# neighbours add up to the bytes of their stage; if a stage begins with a layer whose input counts for the layer before,
# the stage holds that much more.


def layer_bytes(module: nn.Sequential, microbatch: object, *, param_scale: float, device: torch.device) -> list[int]:
    """Return the bytes of each layer: the saved tensors of its forward, and its parameters times a factor.

    See NOTE [ Whose a saved storage is ]. Tensors in stores, and recomputed tensors, take no bytes.
    """
    numbers = StorageNumbers()

    def sized(cell: LayerCopy) -> tuple[int, Boundary]:
        saved_bytes, after = _run_sized(cell, numbers)
        return saved_bytes + round(param_scale * StorageNumbers().new_bytes(list(cell.layer.parameters()))), after

    with untouched(None), torch.inference_mode(False), torch.enable_grad():
        return list(run_each(module, microbatch, device, sized))


def first_microbatch(batch: object, chunks: int) -> object:
    """Return the first of `chunks` microbatches, which is the largest; tensors without dimensions stay whole."""

    def cut(tensor: Tensor) -> Tensor:
        # A copy, since a view would keep the bytes of the batch.
        return tensor.detach()[: -(-len(tensor) // chunks)].clone().requires_grad_(tensor.requires_grad)

    return batch if chunks == 1 else map_tensors(lambda tensor: cut(tensor) if tensor.dim() else tensor, batch)


def _run_sized(cell: LayerCopy, counted: StorageNumbers) -> tuple[int, Boundary]:
    """Run a layer's forward; return the bytes that autograd keeps of it, and the values that pass on."""
    entered = cell.entered(copied=False)
    subject = Subject(
        step=lambda: cell.run(entered),
        model=None,
        models=(cell.layer,),
        inputs=tuple(tensors_in(entered)),
        optimizer=None,
    )
    with watched(subject, operators=False) as log:
        ran = cast("Boundary", log.take_result())
        return _kept_bytes(log, tensors_in(ran), counted), cell.after(ran)


def _kept_bytes(log: SaveLog, outputs: list[Tensor], counted: StorageNumbers) -> int:
    report = report_of(log, {}, [tensor for tensor in outputs if tensor.requires_grad])
    inputs = [log.before[number].tensor for number, one in report.storages.items() if one.kind == "input"]
    saved_bytes = report.saved_bytes + counted.new_bytes(inputs)
    counted.of([tensor for tensor in outputs if not report.storages.keys().isdisjoint(log.numbers.of(tensor))])
    return saved_bytes


def layer_seconds(module: nn.Sequential, sample: object, *, timeout: float, device: torch.device) -> list[float]:
    """Return the seconds of a forward and a backward of each layer: the median of the runs that time allows.

    The first run of a layer is not timed, since it loads and tunes kernels; at least one other is. The overhead of
    starting a backward does not count.

    Args:
        module: The layers; copies of them run.
        sample: The input of the first layer.
        timeout: Seconds for all runs together. Time that fast layers leave goes to the layers after them.
        device: Where the copies run.
    """
    # Only the generators are restored: a copy has its own parameters and buffers.
    with untouched(None), heap_set_aside(), torch.inference_mode(False), torch.enable_grad():
        accelerator_of(device).warm(device)
        idle_s = _idle_seconds(device)
        until = time.perf_counter() + timeout

        def timed(cell: LayerCopy) -> tuple[float, Boundary]:
            share = max(0.0, until - time.perf_counter()) / (len(module) - cell.place)
            return _time(cell, device, share, idle_s)

        return list(run_each(module, sample, device, timed))


def _idle_seconds(device: torch.device) -> float:
    """Return the seconds of an empty backward: here one starts for each layer, and for a model only one."""
    value = torch.ones(1, device=device, requires_grad=True)
    cell = LayerCopy(layer=nn.Identity(), place=0, layout=SkipLayout(1, {}), before=Boundary(value=value, skips={}))
    return median(_time_run(cell, device)[0] for _ in range(_IDLE_RUNS))


def _time(cell: LayerCopy, device: torch.device, timeout: float, idle_s: float) -> tuple[float, Boundary]:
    """Run a layer until the time is up; return the median of its seconds, and the values that pass on."""
    stop = time.perf_counter() + timeout
    _, after = _time_run(cell, device, idle_s)
    runs = [_time_run(cell, device, idle_s)[0]]
    while time.perf_counter() < stop:
        runs.append(_time_run(cell, device, idle_s)[0])
    return median(runs), after


def _time_run(cell: LayerCopy, device: torch.device, idle_s: float = 0.0) -> tuple[float, Boundary]:
    """Run a layer forward and backward; return its seconds, and the values that pass on."""
    entered = cell.entered(copied=True)
    start = _now(device)
    ran = cell.run(entered)
    seconds = _now(device) - start
    # Skips that it stashes have a gradient as well.
    roots = [tensor for tensor in tensors_in(ran) if tensor.requires_grad]
    grads = [torch.ones_like(root) for root in roots]
    start = _now(device)
    if roots:
        torch.autograd.backward(roots, grads)
        seconds += max(0.0, _now(device) - start - idle_s)
    return seconds, cell.after(ran)


def _now(device: torch.device) -> float:
    return accelerator_of(device).seconds(device)
