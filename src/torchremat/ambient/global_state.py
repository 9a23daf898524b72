"""Autocast, numeric flags, function and dispatch modes: state that surrounds a call without being passed to it.

Context variables are not here: a call runs in a copy of its forward's context, which never needs putting back.

Missing on purpose: the number of threads. All threads of a process share it, and swapping it during a recompute would
change the results of the others.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from operator import call
from typing import NamedTuple, TypeVar, cast

import torch

from torchremat._compat.flags import GlobalState, Precisions, known_flags, other_flags, precision_reads
from torchremat._compat.modes import (
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    function_modes,
    has_modes,
    infrastructure_modes,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_infrastructure_mode,
    unset_infrastructure_mode,
)

M = TypeVar("M")

# The lock around state that all threads share and that a recompute swaps: two recomputes in two threads must not draw
# from each other's generator, nor put back each other's flags, buffers and caches. State of one thread needs no lock.
EXCHANGING = threading.RLock()

# NOTE [ Modes that only watch ]
# A mode that changes operators must be active in a recompute as it was in the forward. A mode that counts or logs them
# must not be restored: entered only for the forward it would count the recompute as well, entered only for the backward
# it would miss it. So a recompute leaves observing modes as they are, and takes all others from the forward. Torch's
# observing modes are recognised by their origin, those of users by `only_watches`.
_WATCHERS = (
    "torch.cuda._sanitizer",
    "torch.distributed._tools",
    "torch.distributed.tensor.debug",
    "torch.testing._internal",
    "torch.utils._debug_mode",
    "torch.utils.flop_counter",
    "torchremat.",
)
WATCHES = "_torchremat_only_watches"
_ACTS = "_torchremat_acts"

# All device types of autocast. Asking for one that this build of torch lacks is fine.
_DEVICE_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu")


# The types for which a dtype is likely to be set without switching autocast on; asking for all is not worth it.
_LIKELY_TYPES = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)

# State that `GlobalState` does not cover. All of it is read before each forward and each recompute.
_READS = (
    *(flag.read for flag in other_flags),
    *precision_reads,
    *(partial(torch.get_autocast_dtype, kind) for kind in _LIKELY_TYPES),
)


class Autocast(NamedTuple):
    """The autocast state of one device type."""

    device_type: str
    enabled: bool
    dtype: torch.dtype


class AmbientState:
    """The state that surrounds a call.

    Attributes:
        casts: Whether autocast is on for any device type.
        has_modes: Whether function or dispatch modes that act are active.
    """

    __slots__ = (
        "_autocast", "_caches", "_function_modes", "_known", "_modes", "_others", "_precisions", "_reads", "_state",
        "casts", "has_modes",
    )  # fmt: skip

    def __init__(self) -> None:
        self._state = GlobalState()
        self._known = [flag.read() for flag in known_flags]
        self._others = [flag.read() for flag in other_flags]
        self._precisions = Precisions()
        self._reads = list(map(call, _READS))
        self._autocast = [_autocast(kind) for kind in _DEVICE_TYPES]
        self._caches = torch.is_autocast_cache_enabled()
        self.casts = any(one.enabled for one in self._autocast)
        self._function_modes = _acting(function_modes())
        self._modes = (infrastructure_modes(), _acting(dispatch_modes())) if has_modes() else ({}, [])
        self.has_modes = bool(self._function_modes or any(self._modes))

    @property
    def modes(self) -> list[object]:
        """The user's function and dispatch modes that act."""
        return [*self._function_modes, *self._modes[1]]

    def are_here(self) -> bool:
        """Return whether this is the caller's current state, so that nothing needs to be restored."""
        # Under autocast work always remains: see `restore_autocast`.
        return not self.casts and self.are_the_same()

    def are_the_same(self, *, in_forward: bool = False) -> bool:
        """Return whether no part of it has changed.

        Infrastructure modes that were entered since may stay around a recompute, but a forward under them differs.
        """
        if not self._state.check() or list(map(call, _READS)) != self._reads:
            return False
        if not count_dispatch_modes() and not count_function_modes():
            return not self.has_modes
        if in_forward and infrastructure_modes():
            return False
        return (
            _same(_acting(function_modes()), self._function_modes)
            and infrastructure_modes().keys() >= self._modes[0].keys()
            and _same(_acting(dispatch_modes()), self._modes[1])
        )

    def put_back(self) -> None:
        """Restore the state for good."""
        for then in self._autocast:
            if _autocast(then.device_type) != then:
                _set_autocast(then)
        torch.set_autocast_cache_enabled(self._caches)
        with EXCHANGING:
            self._restore_others(ExitStack(), AmbientState(), locks=False)  # a stack that is never closed

    def restore(self, stack: ExitStack, now: AmbientState | None = None) -> None:
        """Restore the state until `stack` is closed.

        Args:
            stack: Puts back what is changed.
            now: The caller's current state; read if not given.
        """
        now = now or ambient_state()
        self.restore_autocast(stack, now)
        self._restore_others(stack, now)

    def _restore_others(self, stack: ExitStack, now: AmbientState, *, locks: bool = True) -> None:
        flags, here = (self._known, self._others), (now._known, now._others)
        if flags != here or not self._precisions.are_those_of(now._precisions):
            if locks:
                stack.enter_context(EXCHANGING)
            for flag, then in zip((*known_flags, *other_flags), (*self._known, *self._others), strict=True):
                found = flag.read()
                if found != then:
                    stack.callback(flag.write, found)
                    flag.write(then)
            if not self._precisions.are_here():
                stack.callback(Precisions().write)
                self._precisions.write()
        if not self.has_modes and not has_modes():
            return
        for key, mode in self._modes[0].items():
            if key not in infrastructure_modes():
                # Modes that trace or fake a backward stay: the recompute is part of the trace.
                stack.callback(unset_infrastructure_mode, key)
                set_infrastructure_mode(mode)
        _exchange(stack, dispatch_modes, self._modes[1], push_dispatch_mode, pop_dispatch_mode)
        _exchange(stack, function_modes, self._function_modes, push_function_mode, pop_function_mode)

    def restore_autocast(self, stack: ExitStack, now: AmbientState) -> None:
        """Restore autocast alone; arguments as for `restore`."""
        for here, then in zip(now._autocast, self._autocast, strict=True):
            if here != then:
                stack.callback(_set_autocast, here)
                _set_autocast(then)
        caches = self._caches
        if caches and (self.casts or now.casts):
            # The cache of casted weights would keep the recompute's casts, and with them its graph, for the next user
            # of autocast. The end of the outermost autocast empties the cache; if that is not ours, the recompute does
            # without the cache.
            depth = torch.autocast_increment_nesting()
            stack.callback(_leave_autocast)
            caches = depth == 1
        if caches != now._caches:
            stack.callback(torch.set_autocast_cache_enabled, now._caches)
            torch.set_autocast_cache_enabled(caches)


def ambient_state() -> AmbientState:
    """Return the state that surrounds the caller."""
    # The state hardly ever changes, and comparing is cheaper than reading everything.
    last = _here.last
    if last is not None and last.are_the_same(in_forward=True):
        return last
    found = AmbientState()
    _here.last = None if found.has_modes else found  # do not keep a mode alive here after it was left
    return found


def only_watches(one: M) -> M:
    """Mark an object as an observer, which from now on no recompute takes for a part of the forward, and return it.

    Args:
        one: A `TorchDispatchMode` or `TorchFunctionMode`, or a class of them: a recompute then neither enters it again
            nor leaves it. Or a hook, or an object that counts or logs, or a class of these: a recompute then does not
            look for state in it, and what it records during a recompute stays recorded.
    """
    setattr(one, WATCHES, True)  # See NOTE [ Modes that only watch ]
    return one


def only_looks_on(item: object) -> bool:
    """Return whether an object was marked by `only_watches`, or is a function of this package: a hook that measures."""
    if type(item) is torch.Tensor:
        return False  # by far the most that are exchanged
    while isinstance(item, partial):
        item = cast("partial[object]", item).func
    if isinstance(item, types.MethodType):
        item = item.__func__
    if isinstance(item, types.FunctionType):
        return WATCHES in item.__dict__ or (item.__module__ or "").startswith("torchremat.")
    # Read from the classes: asking the object might run user code.
    return hasattr(cast("type", type(item)), WATCHES) or WATCHES in _attributes_of(item)


def _attributes_of(item: object) -> Container[object]:
    try:
        found = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return ()
    return found if isinstance(found, dict) else ()  # pyright: ignore[reportUnknownVariableType]


def acts(kind: M) -> M:
    """Return a class of this package's modes, which from now on a recompute takes for one that changes operators."""
    setattr(kind, _ACTS, True)
    return kind


class _ThreadState(threading.local):
    last: AmbientState | None = None


_here = _ThreadState()


def _acting(modes: list[object]) -> list[object]:
    return [mode for mode in modes if not _only_watches(mode)] if modes else modes


def _only_watches(mode: object) -> bool:
    # See NOTE [ Modes that only watch ]
    if hasattr(mode, _ACTS):
        return False
    return type(mode).__module__.startswith(_WATCHERS) or hasattr(mode, WATCHES)


def _same(now: list[object], then: list[object]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _exchange(
    stack: ExitStack,
    read: Callable[[], list[object]],
    then: list[object],
    push: Callable[[object], None],
    pop: Callable[[], object],
) -> None:
    now = read()
    if _same(_acting(now), then):
        return
    stack.callback(_rebuild, read, now, push, pop)
    _rebuild(read, [*then, *(mode for mode in now if _only_watches(mode))], push, pop)


def _rebuild(
    read: Callable[[], list[object]], modes: list[object], push: Callable[[object], None], pop: Callable[[], object]
) -> None:
    for _ in read():
        pop()
    for mode in modes:
        push(mode)


def _autocast(kind: str) -> Autocast:
    return Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


def _set_autocast(state: Autocast) -> None:
    # Not `torch.autocast`, which warns of incompatible dtypes and then falls back to something else.
    cast("Callable[[str, bool], None]", torch.set_autocast_enabled)(state.device_type, state.enabled)
    torch.set_autocast_dtype(state.device_type, state.dtype)


def _leave_autocast() -> None:
    if torch.autocast_decrement_nesting() == 0:
        torch.clear_autocast_cache()
