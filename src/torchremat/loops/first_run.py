"""The first run of a loop, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from torchremat._compat.fakes import is_fake
from torchremat._compat.transforms import hooks_under_transforms, is_transformed
from torchremat.loops.step_inputs import Carry, HeldInput, HeldSlices, SlicedInput, Slices, bring
from torchremat.loops.stretches import CarriedInput, Stretches
from torchremat.regions.calls import CallArguments, Source
from torchremat.regions.region import Region
from torchremat.regions.runs import continued
from torchremat.regions.settings import Settings
from torchremat.regions.transforms import new_region
from torchremat.state.roots import Root
from torchremat.tensors.held import HeldTensor
from torchremat.tensors.structure import split

# From a carry and a slice of what is scanned to the next carry and an output.
Body: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]


class Forward:
    """Runs the steps of a loop as regions."""

    def __init__(self, body: Body, slices: Slices, stretches: Stretches, settings: Settings) -> None:
        self.body = body
        self.slices = slices
        self.stretches = stretches
        self.settings = settings
        self.is_transformed = is_transformed()
        self.held = HeldSlices(slices.tensors, stretches.held_tensor)
        self._before: Carry | None = None  # of the step that ran last
        self._region: Region | None = None
        self._root = Root(body, is_called_often=True)
        self._template: object = None  # of the arguments of every step
        self._sources: list[Source] = []

    def run_plainly(self, index: int, carry: object) -> object:
        """Run a step as it is and return its output; autograd keeps its saved tensors."""
        self._before = self._region = None  # nothing recomputes it
        return self.body(carry, self.slices.at(index))

    def run(
        self,
        index: int,
        carry: object,
        tensors: list[Tensor],
        *,
        place: int | None,
        settings: Settings | None = None,
    ) -> object:
        """Run a step as a region and return its output.

        Args:
            index: The number of the step.
            carry: Its carry.
            tensors: The tensors in it.
            place: Where the carry is held, 0 for a slot, n for the n-th store; None if it is dropped.
            settings: How this region behaves, if not as the others.
        """
        slices = self.slices.tensors_at(index)
        args = carry, self.slices.joined(slices)
        here = Carry(index, self._before, self._region)
        settings = settings or self.settings
        region = new_region(settings if index else self._check_first(settings, tensors))
        if place is not None or self._before is None:
            self.stretches.hold(here, tensors, place or 0)
        here.kept = tensors  # a backward inside the step may ask for it
        held = self._hold(here, tensors, slices)
        try:
            if not self.is_transformed and all(
                (type(tensor) is Tensor and not tensor.__dict__) or isinstance(tensor, nn.Parameter)
                for tensor in tensors
            ):
                return self._call(region, args, self._take_apart(args, [*tensors, *slices], held))
            inputs = [one for one in held.values() if isinstance(one, HeldInput)]
            with hooks_under_transforms():
                push_saved_tensor_hooks(partial(_next, iter(inputs)), bring)
                try:
                    return self._call(region, args, None)
                finally:
                    pop_saved_tensor_hooks()
        finally:
            here.kept = None
            # A module may have made its parameters in the step, which then cannot run again.
            self._before, self._region = (here, region) if region.calls else (None, None)

    def move(self, tensors: list[Tensor], place: int) -> None:
        """Move the carry of the last step to a store."""
        if self._before is not None:
            self.stretches.hold(self._before, tensors, place)

    def _hold(self, here: Carry, tensors: list[Tensor], slices: list[Tensor]) -> dict[int, HeldTensor]:
        """Return, by id, how the region of a step holds its tensors: by the loop, except for parameters."""
        held: dict[int, HeldTensor] = {}
        places: list[int] = []
        for place, tensor in enumerate(tensors):
            if id(tensor) in held:
                continue
            if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
                held[id(tensor)] = HeldTensor(tensor)
            else:
                held[id(tensor)] = CarriedInput(tensor, self.stretches, here, place)
                places.append(place)
        here.places = places
        for place, tensor in enumerate(slices):
            held[id(tensor)] = SlicedInput(tensor, self.held, place, here.index)
        return held

    def _take_apart(
        self, args: tuple[object, object], tensors: list[Tensor], held: dict[int, HeldTensor]
    ) -> CallArguments:
        """Return the arguments of a step, taken apart."""
        if self._template is None:
            self._template = split((args, {}), [], [])
        sources: list[Source] = self._sources
        if len(sources) != len(held) or len(held) != len(tensors):
            numbers = {key: number for number, key in enumerate(held)}
            sources = [numbers[id(tensor)] for tensor in tensors]
            if len(held) == len(tensors):
                self._sources = sources  # the same for every step, but for one that is given a tensor twice
        return CallArguments(self._template, tensors, list(held.values()), sources)

    def _check_first(self, settings: Settings, tensors: list[Tensor]) -> Settings:
        """Return the settings for the first step: its values are compared, at the cost of one step.

        This finds a body that draws from a generator which is not registered. Kernels of other devices than the CPU may
        add in another order each time, and fake tensors have no values.
        """
        if settings.check != "metadata" or self.is_transformed:
            return settings
        if any(tensor.device.type != "cpu" or is_fake(tensor) for tensor in tensors):
            return settings
        return replace(settings, check="values")

    def _call(self, region: Region, args: tuple[object, object], given: CallArguments | None) -> object:
        return region.call(continued(self.body), args, {}, (self._root,), given=given)


def _next(inputs: Iterator[HeldInput], _: Tensor) -> HeldInput:
    return next(inputs)
