"""What a recompute must see again, beside its arguments: generators, autocast, default device.

Everything here is captured around the forward of a region and restored around its recompute, and put back afterwards, so
that a recompute leaves no trace in the thread that runs it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _device

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _Autocast:
    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


@dataclass(frozen=True, slots=True)
class Ambient:
    """The surroundings of one forward; `around()` restores them."""

    autocast: tuple[_Autocast, ...]
    device: torch.device | None
    generators: tuple[tuple[torch.device, Tensor], ...]

    @contextmanager
    def around(self) -> Generator[None]:
        """Restore the surroundings for a block, and put back afterwards those that were there."""
        with ExitStack() as stack:
            for one in self.autocast:
                if autocast_state(one.device_type) != one:
                    stack.enter_context(
                        torch.autocast(one.device_type, enabled=one.enabled, dtype=one.dtype, cache_enabled=one.cache)
                    )
            if self.device != _device.CURRENT_DEVICE:
                stack.enter_context(torch.device(self.device if self.device is not None else _CPU))
            for device, state in self.generators:
                stack.callback(set_generator, device, get_generator(device))
                set_generator(device, state)
            yield


def get_generator(device: torch.device) -> Tensor:
    """Return the state of the default generator of `device`, a byte tensor on the CPU."""
    if device.type == "cpu":
        return torch.default_generator.get_state()
    return torch.get_device_module(device).get_rng_state(device)


def set_generator(device: torch.device, state: Tensor) -> None:
    """Set the state of the default generator of `device`."""
    if device.type == "cpu":
        torch.default_generator.set_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def generator_states(devices: Iterable[torch.device]) -> tuple[tuple[torch.device, Tensor], ...]:
    """Return the generator states of the CPU and of `devices`, before a forward."""
    states = [(_CPU, torch.default_generator.get_state())]
    states += [(device, get_generator(device)) for device in devices if device.type not in ("cpu", "meta")]
    return tuple(states)


def drawn(before: tuple[tuple[torch.device, Tensor], ...]) -> tuple[tuple[torch.device, Tensor], ...]:
    """Return those of the states `before` whose generators have drawn since: 5 KB each on the CPU, so only these are kept."""
    return tuple((device, state) for device, state in before if not torch.equal(get_generator(device), state))


def autocast_state(kind: str) -> _Autocast:
    """Return the autocast state of one device type."""
    return _Autocast(
        kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    )


def autocast_states(device_types: Iterable[str]) -> tuple[_Autocast, ...]:
    """Return the autocast state of the CPU and of `device_types`."""
    return tuple(autocast_state(kind) for kind in ("cpu", *device_types) if kind != "meta")


def default_device() -> torch.device | None:
    """Return the default device that a `with torch.device(...)` or `torch.set_default_device` set, or None."""
    return _device.CURRENT_DEVICE
