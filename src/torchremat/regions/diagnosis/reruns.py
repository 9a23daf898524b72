"""A rerun of a region, only to observe it, without a lasting side effect.

Restored afterwards: the states of all generators of torch, of Python's `random` and of NumPy, written tensors with
their versions, gradients, module attributes, training flags, and the objects, closures and global names that `reach`
sees. Missing on purpose: effects on the outside world, such as printing, and iterators.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from torchremat._compat.accelerators import devices_in_use
from torchremat.ambient.generators import get_generator, set_generator
from torchremat.errors import UnsupportedError
from torchremat.regions.calls import Body
from torchremat.regions.diagnosis.captures import Reach, StateChange
from torchremat.regions.diagnosis.operators import OperatorLog
from torchremat.regions.recompute import RegionRecompute
from torchremat.regions.recording import Recording
from torchremat.regions.settings import Settings
from torchremat.regions.slots import Recomputable


@dataclass(slots=True, eq=False)
class Rerun:
    """The findings of a region's rerun.

    Attributes:
        log: Its operators, up to an error if there was one.
        reach: The objects that its calls visibly reach.
        changes: State that differed afterwards.
        draws: Sources of random numbers that the rerun drew from and that a recompute does not restore.
        unseen: The outermost modules that ran and that the region does not see.
        error: The words for an error of user code, or None.
    """

    log: OperatorLog
    reach: Reach
    changes: list[StateChange] = field(default_factory=list[StateChange])
    draws: list[str] = field(default_factory=list[str])
    unseen: list[nn.Module] = field(default_factory=list[nn.Module])
    error: str | None = None


class _RerunThread(threading.local):
    is_running = False


# A difference that is found during a rerun is not investigated: with a backward inside a region inside a region this
# would never end.
_here = _RerunThread()


class _RandomSource(NamedTuple):
    """A source of random numbers."""

    name: str
    read: Callable[[], object]
    write: Callable[[Any], object]


PYTHON = "Python's `random`"
NUMPY = "`numpy.random`"
DEFAULT = "torch's default generator of "

_UNCHECKED = Settings(check="none")
_NOTHING = -1  # the number of a saved tensor, which none has


def rerun(recording: Recording, *, flipped: Iterable[nn.Module] = ()) -> Rerun:
    """Run a region once more and return the findings.

    Args:
        recording: What the region noted of its forward; none of its checks runs.
        flipped: Modules to run with the other training flag, their submodules included.

    Raises:
        UnsupportedError: A rerun of another region is in progress in this thread.
    """
    if _here.is_running:
        raise UnsupportedError("it was found while another region ran again for its message")
    reach = Reach(recording.calls, recording.label)
    reach.look()
    found = Rerun(_RerunLog(reach.names), reach)
    cast("_RerunLog", found.log).found = found
    with ExitStack() as stack:
        stack.enter_context(_put_back(found))
        for module in {inner for outer in flipped for inner in outer.modules()}:
            stack.callback(setattr, module, "training", module.training)
            module.training = not module.training
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they were shown before
        _here.is_running = True
        stack.callback(setattr, _here, "is_running", False)
        recompute = RegionRecompute(cast("Recomputable", recording), _UNCHECKED, None, _NOTHING)
        stack.callback(recompute.end)
        try:
            recompute.run(found.log, checks=False)
        except Exception as error:  # noqa: BLE001 user code may raise anything; the error is part of the findings
            found.error = f"{type(error).__name__}: {error}".partition("\n")[0][:160]
    return found


class _RerunLog(OperatorLog):
    """The operators of a rerun; also records the modules that run, with its own hook."""

    found: Rerun

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__(names, digests=True, restores=True)

    def run(self, run: Body, body: Body, /, *args: object, **kwargs: object) -> object:
        """Return the result of `run`. See `OperatorLog.run`."""

        def noted(*args: object, **kwargs: object) -> object:
            # Global module hooks are restored with the rest, so this one is added after that.
            with _called(self.found):
                return run(*args, **kwargs)

        return super().run(noted, body, *args, **kwargs)


@contextmanager
def _put_back(found: Rerun) -> Generator[None]:
    reach = found.reach
    sources = [(one, one.read()) for one in _sources(reach)]
    grads = [(tensor, tensor.grad) for _, tensor in reach.parameters() if tensor.is_leaf]
    try:
        yield
    finally:
        found.changes = reach.changes()
        found.log.undo()
        for source, before in sources:
            if not _equal(source.read(), before):
                found.draws.append(source.name)
                source.write(before)
        for tensor, grad in grads:
            if tensor.grad is not grad:
                tensor.grad = grad


@contextmanager
def _called(found: Rerun) -> Generator[None]:
    """Record the outermost modules that run in this thread and that the region does not see."""
    here = threading.get_ident()
    seen = set(found.reach.names)

    def note(module: nn.Module, _: object) -> None:
        if threading.get_ident() == here and id(module) not in seen:
            seen.update(id(inner) for inner in module.modules())
            found.unseen.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _sources(reach: Reach) -> list[_RandomSource]:
    sources = [_RandomSource(PYTHON, random.getstate, random.setstate)]
    numpy_random = cast("Any", sys.modules.get("numpy.random"))
    if numpy_random is not None:
        sources.append(_RandomSource(NUMPY, numpy_random.get_state, numpy_random.set_state))
    named = [(f"the generator `{name}`", one) for name, one in reach.generators().items()]
    devices = [torch.device("cpu"), *devices_in_use()]
    for name, one in [*named, *((f"{DEFAULT}{device}", device) for device in devices)]:
        own = torch.default_generator if one == torch.device("cpu") else one
        sources.append(_RandomSource(name, partial(get_generator, own), partial(set_generator, own)))
    return sources


def _equal(now: object, before: object) -> bool:
    if isinstance(now, Tensor) and isinstance(before, Tensor):
        return torch.equal(now, before)
    return pickle.dumps(now) == pickle.dumps(before)
