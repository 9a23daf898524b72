"""The devices of all kinds that this process uses, or could use."""

from __future__ import annotations

import torch

from torchremat._compat.accelerators import Accelerator, accelerator_of


def accelerators() -> list[Accelerator]:
    """Return the kinds of devices, other than the CPU, that this process has begun to use."""
    # Others, for example MPS, have one device and another generator interface, which only tensors ask for.
    begun = {"cuda": torch.cuda.is_initialized, "xpu": torch.xpu.is_initialized}
    return [accelerator_of(torch.device(kind)) for kind, has_begun in begun.items() if has_begun()]


def devices_in_use() -> list[torch.device]:
    """Return the devices, other than the CPU, that this process has begun to use."""
    return [device for accelerator in accelerators() for device in accelerator.in_use()]


def counting_devices() -> list[torch.device]:
    """Return this machine's accelerators whose allocator counts bytes; none if it has no such accelerator."""
    current = torch.accelerator.current_accelerator(check_available=True)
    accelerator = None if current is None else accelerator_of(current)
    return accelerator.devices() if accelerator is not None and accelerator.counts else []


def current_devices() -> list[torch.device]:
    """Return the current device of each kind, other than the CPU, that this process has begun to use."""
    return [accelerator.normalised(torch.device(accelerator.type)) for accelerator in accelerators()]
