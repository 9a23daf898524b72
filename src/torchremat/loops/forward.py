"""The first run of a loop, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from torchremat._compat.fakes import is_fake
from torchremat._compat.transforms import hooks_under_transforms, is_transformed
from torchremat.loops.carries import Carry, HeldInput, InputSource, LoopStep
from torchremat.loops.slices import HeldSlices, SlicedInput, Slices
from torchremat.loops.stretches import CarriedInput, Stretches
from torchremat.regions.inputs import Inputs
from torchremat.regions.region import Region
from torchremat.regions.runs import continued
from torchremat.regions.settings import Settings
from torchremat.regions.transforms import new_region
from torchremat.stores.offloading import Offload
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.structure import tensors_in

# From a carry and a slice of what is scanned to the next carry and an output.
Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


class Forward:
    """Runs the steps of a loop as regions.

    Args:
        body: The code of a step.
        slices: What is scanned.
        stretches: The carries.
        settings: How the regions behave.
    """

    def __init__(self, body: Body, slices: Slices, stretches: Stretches, settings: Settings) -> None:
        self.body = body
        self.slices = slices
        self.stretches = stretches
        self.settings = settings
        self.is_transformed = is_transformed()
        self.previous: LoopStep | None = None
        self.held = HeldSlices(slices.tensors, new_region(settings).held_tensor)

    def run_plainly(self, index: int, carry: object) -> object:
        """Run a step as it is and return its output; autograd keeps its saved tensors."""
        return self.body(carry, self.slices.at(index))

    def run(
        self,
        index: int,
        carry: object,
        tensors: list[Tensor],
        *,
        in_slot: bool,
        store: Offload | None = None,
        settings: Settings | None = None,
    ) -> object:
        """Run a step as a region and return its output.

        Args:
            index: The number of the step.
            carry: Its carry.
            tensors: The tensors in it.
            in_slot: Whether the carry is held.
            store: Where it waits, if not in memory.
            settings: How this region behaves, if not as the others.
        """
        x = self.slices.at(index)
        here = Carry(index, self.previous)
        settings = settings or self.settings
        region = new_region(settings if index else self._checked(settings, tensors))
        if store is not None:
            with store:
                here.held = [region.held_tensor(one) for one in tensors]
            here.is_stored = True
        elif in_slot or self.previous is None:
            here.held = [region.held_tensor(one) for one in tensors]
            self.stretches.add(here)
        inputs: dict[int, InputSource] = {}
        for place, tensor in enumerate(tensors):
            if not isinstance(tensor, nn.Parameter) and id(tensor) not in inputs:  # a region holds these by itself
                inputs[id(tensor)] = CarriedInput(self.stretches, here, place)
                here.places.append(place)
        if x is not None:
            for place, tensor in enumerate(tensors_in(x)):
                inputs[id(tensor)] = SlicedInput(self.held, place, index)
        here.kept = tensors  # a backward inside the step may ask for it
        try:
            if not self.is_transformed and all(map(_is_simple, tensors)):
                region.recording.inputs = Inputs(partial(_held, inputs))
                return self._call(region, carry, x)
            with hooks_under_transforms():
                push_saved_tensor_hooks(partial(_next, iter(inputs.values())), _unpack)
                try:
                    return self._call(region, carry, x)
                finally:
                    pop_saved_tensor_hooks()
        finally:
            here.kept = None
            # A module may have made its parameters in the step, which then cannot run again.
            self.previous = LoopStep(region, here) if region.recording.calls else None

    def _checked(self, settings: Settings, tensors: list[Tensor]) -> Settings:
        """Return the settings for the first step: its values are compared, at the cost of one step.

        This finds a body that draws from a generator which is not registered. Kernels of other devices than the CPU may
        add in another order each time, and fake tensors have no values.
        """
        if settings.check != "metadata" or self.is_transformed:
            return settings
        if any(one.device.type != "cpu" or is_fake(one) for one in tensors):
            return settings
        return replace(settings, check="values")

    def _call(self, region: Region, carry: object, x: object) -> object:
        return region.call(continued(self.body), (carry, x), {}, (self.body,))


def _is_simple(tensor: Tensor) -> bool:
    return (type(tensor) is Tensor and not tensor.__dict__) or isinstance(tensor, nn.Parameter)


def _held(inputs: Mapping[int, InputSource], tensor: Tensor) -> HeldTensor:
    source = inputs.get(id(tensor))
    return HeldTensor(tensor) if source is None else HeldInput(tensor, source)


def _next(inputs: Iterator[InputSource], _: Tensor) -> InputSource:
    return next(inputs)


def _unpack(packed: InputSource) -> Tensor:
    return packed.unpack()
