"""The random generators of torch: the default generators of a region's devices, and those among its arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

# Generator states; a device stands for its default generator.
States = dict[torch.Generator | torch.device, Tensor]


def get_generator(generator: torch.Generator | torch.device) -> Tensor:
    """Return the state of a generator, or of the default generator of a device, a byte tensor on the CPU."""
    if isinstance(generator, torch.Generator):
        state = generator.get_state()
        for watcher in _watchers:
            watcher(state)
        return state
    return torch.get_device_module(generator).get_rng_state(generator)


def set_generator(generator: torch.Generator | torch.device, state: Tensor) -> None:
    """Set the state of a generator, or of the default generator of a device."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        torch.get_device_module(generator).set_rng_state(state, generator)


def generator_states(devices: Iterable[torch.device] = (), generators: Iterable[torch.Generator] = ()) -> States:
    """Return the states of `generators` and of the default ones of the CPU and `devices`, before a forward."""
    states: States = {_DEFAULT: get_generator(_DEFAULT)}
    for one in (*devices, *generators):
        states[one] = get_generator(one)
    return states


def drawn(before: States) -> States:
    """Return the states in `before` whose generators have drawn since; the others, of 5 KB each, can go."""
    return {one: state for one, state in before.items() if not _equal(get_generator(one), state)}


def restore(states: States, stack: ExitStack) -> None:
    """Restore the states until `stack` is closed."""
    for generator, state in states.items():
        stack.callback(set_generator, generator, get_generator(generator))
        set_generator(generator, state)


_DEFAULT = torch.default_generator
_watchers: list[Callable[[Tensor], None]] = []


@contextmanager
def states_watched(watcher: Callable[[Tensor], None]) -> Generator[None]:
    """Call `watcher` with each generator state made in the block: no operator makes it, so no mode sees it."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def _equal(a: Tensor, b: Tensor) -> bool:
    # States are contiguous tensors of bytes on the CPU. `torch.equal` takes 20 times as long as C does; in a forward
    # that is longer than the rest of the region's overhead.
    size = a.nbytes
    if _memcmp is None or size != b.nbytes:
        return torch.equal(a, b)
    return _memcmp(a.data_ptr(), b.data_ptr(), size) == 0


def _find_memcmp() -> Callable[[int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).memcmp
    except (AttributeError, OSError, TypeError):  # not on every system
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    found.restype = ctypes.c_int
    return found


_memcmp = _find_memcmp()
