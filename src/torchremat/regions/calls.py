"""One call in a region: what it takes to make it again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchremat import ambient
from torchremat.regions.guards import Objects
from torchremat.regions.modules import ModuleState

# A call's function with its positional and keyword arguments, called as body(args, kwargs). A body is run in a
# recompute as in the forward, so it must look up nothing that may have changed since.
Body = Callable[[tuple[object, ...], dict[str, object]], object]

# Where an argument of a call comes from: an input that the region holds, by number, or the output of an earlier call.
Source = int | tuple[int, int]


class Call:
    """What one call needs to run again."""

    __slots__ = ("body", "generators", "modules", "objects", "slots", "sources", "surroundings", "template")

    def __init__(self, body: Body, template: object, sources: list[Source]) -> None:
        self.body = body
        self.template = template
        self.sources = sources
        self.slots = -1  # how many slots the region has after the call; negative while it runs for the first time
        self.surroundings: ambient.Surroundings
        self.modules: ModuleState
        self.generators: list[ambient.GeneratorState] = []
        self.objects: Objects | None = None

    @property
    def is_running(self) -> bool:
        """Whether the call runs for the first time."""
        return self.slots < 0

    def look(self, tensors: list[Tensor], modules: list[nn.Module], objects: list[object], preserve_rng: bool) -> None:
        """Capture what the call is about to see and may change; all of it, as rule 6 may ask for it in the middle."""
        devices = _devices(tensors, modules) if torch.cuda.is_initialized() else ()
        self.surroundings = ambient.surroundings({device.type for device in devices} if devices else ())
        self.modules = ModuleState(modules)
        if objects:
            self.objects = Objects(objects)
        if preserve_rng:
            generators = [one for one in objects if isinstance(one, torch.Generator)] if objects else ()
            self.generators = ambient.generator_states(devices, generators)

    def settle(self) -> None:
        """Keep only what the call has changed."""
        if self.generators:
            self.generators = ambient.drawn(self.generators)
        self.modules.settle()
        if self.objects is not None and not self.objects.settle():
            self.objects = None


def _devices(tensors: list[Tensor], modules: list[nn.Module]) -> list[torch.device]:
    """Return the devices, beside the CPU, that a call can draw random numbers on."""
    devices = {tensor.device for tensor in tensors}
    for module in modules:
        devices.update(parameter.device for parameter in module.parameters())
    devices.add(torch.device("cuda", torch.cuda.current_device()))
    return [device for device in devices if device.type not in ("cpu", "meta")]
