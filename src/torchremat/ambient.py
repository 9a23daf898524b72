"""What a recompute must see again, beside its arguments: generators, autocast, default device.

Everything here is captured around the forward of a region and restored around its recompute, and put back afterwards,
so that a recompute leaves no trace in the thread that runs it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from torchremat._compat import default_device

_CPU = torch.device("cpu")


class Autocast(NamedTuple):
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool


class Surroundings(NamedTuple):
    """What surrounds a forward: autocast of the CPU and other device types, and the default device."""

    autocast: tuple[Autocast, ...]
    device: torch.device | None

    def are_here(self) -> bool:
        """Return whether this is what surrounds the caller now, so that nothing has to be restored."""
        others = [one.device_type for one in self.autocast[1:]] if len(self.autocast) > 1 else ()
        here = surroundings(others)
        return here is self or here == self

    def restore(self, stack: ExitStack) -> None:
        """Restore them until `stack` is closed."""
        for one in self.autocast:
            if autocast_state(one.device_type) != one:
                stack.enter_context(
                    torch.autocast(one.device_type, enabled=one.enabled, dtype=one.dtype, cache_enabled=one.cache)
                )
        if self.device != default_device():
            stack.enter_context(torch.device(self.device if self.device is not None else _CPU))


class GeneratorState(NamedTuple):
    """The state that a generator had."""

    generator: torch.Generator | torch.device  # a device stands for its default generator
    state: Tensor

    def restore(self, stack: ExitStack) -> None:
        """Restore it until `stack` is closed."""
        stack.callback(set_generator, self.generator, get_generator(self.generator))
        set_generator(self.generator, self.state)


def autocast_state(kind: str) -> Autocast:
    """Return the autocast state of one device type."""
    return _autocast(
        kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    )


def surroundings(device_types: Collection[str] = ()) -> Surroundings:
    """Return what surrounds the caller; autocast for the CPU and `device_types`."""
    states = (autocast_state("cpu"), *map(autocast_state, device_types)) if device_types else (autocast_state("cpu"),)
    return _surroundings(states, default_device())


# There are few of them, and a region asks twice.
_autocast = lru_cache(Autocast)
_surroundings = lru_cache(Surroundings)


def get_generator(generator: torch.Generator | torch.device) -> Tensor:
    """Return the state of a generator, or of the default generator of a device, a byte tensor on the CPU."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return torch.get_device_module(generator).get_rng_state(generator)


def set_generator(generator: torch.Generator | torch.device, state: Tensor) -> None:
    """Set the state of a generator, or of the default generator of a device."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        torch.get_device_module(generator).set_rng_state(state, generator)


def generator_states(
    devices: Iterable[torch.device], generators: Iterable[torch.Generator] = ()
) -> list[GeneratorState]:
    """Return the states of `generators` and of the default ones of the CPU and `devices`, before a forward."""
    all_of_them = (torch.default_generator, *devices, *generators)
    return [GeneratorState(one, get_generator(one)) for one in all_of_them]


def drawn(before: list[GeneratorState]) -> list[GeneratorState]:
    """Return those of the states `before` whose generators have drawn since; the others, of 5 KB each, can go."""
    return [one for one in before if not _equal(get_generator(one.generator), one.state)]


def _equal(a: Tensor, b: Tensor) -> bool:
    # States are contiguous tensors of bytes on the CPU. `torch.equal` takes 20 times as long as C does, which in a
    # forward is longer than all else that a region does there.
    if _memcmp is None or a.nbytes != b.nbytes:
        return torch.equal(a, b)
    return _memcmp(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # not on every system
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found.restype = ctypes.c_int
    return found


_memcmp = _find_memcmp()
