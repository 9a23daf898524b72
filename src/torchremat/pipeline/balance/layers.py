"""The layers of a model, run one by one on copies: one layer's parameters and graph are in memory at a time.

A layer gets the output of the layer before it, and the skips that it pops, all detached from their graphs. So a model
can be profiled on a device that it does not fit on. For skips each layer is a stage of its own:

    before ──► entered ──► ran ──► after        before, after: without a graph; skips that wait are passed on
                                                entered: non-leaf tensors, for one run
                                                ran: output and stashed skips, with the layer's graph
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from torchremat.pipeline.skip.inspection import inspect_skip_layout
from torchremat.pipeline.skip.layouts import Key, SkipLayout
from torchremat.pipeline.skip.trackers import CellTracker, use_skip_tracker
from torchremat.tensors.structure import join, split

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
        layer: The copy.
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
        return cast("Boundary", mapped(enter, Boundary(value=self.before.value, skips=skips)))

    def run(self, entered: Boundary) -> Boundary:
        """Run the layer's forward; return its results, with their graph."""
        tracker = CellTracker(self.layout, self.place, entered.skips)
        with use_skip_tracker(tracker):
            output = self.layer(entered.value)
        return Boundary(value=output, skips=tracker.outgoing)

    def after(self, ran: Boundary) -> Boundary:
        """Return the values that pass to the layers after this one."""
        waiting = {key: skip for key, skip in self.before.skips.items() if not self._is_popped(key)}
        cut = cast("Boundary", mapped(_cut_off, ran))
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

    boundary = Boundary(value=mapped(move, value), skips={})
    for place, layer in enumerate(layers):
        # Only the cell holds the copy, and nothing holds the cell when the next one is made.
        copied = copy.deepcopy(layer).to(device).train()
        found, boundary = run(LayerCopy(layer=copied, place=place, layout=layout, before=boundary))
        del copied
        yield found


def mapped(function: Callable[[Tensor], Tensor], value: object) -> object:
    """Return a value with other tensors in the places of its own."""
    tensors: list[Tensor] = []
    template = split(value, tensors, [])
    return join(template, [function(tensor) for tensor in tensors])


def _cut_off(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
