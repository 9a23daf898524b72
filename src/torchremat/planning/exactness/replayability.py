"""Tries which units do not repeat their forward in a recompute, where a watched step cannot tell.

A module may read state that is not passed to it: an attribute that the code around it sets, a count of its calls, a
draw of `random` or NumPy. A recompute finds this state as it is then, and the gradients are wrong, or user code raises.
So a forward runs in which every unit is a region, and after it each unit runs again, the last one first as in backward.
Saved and returned tensors must have the same bits. If memory is short, a few units are tried at a time.

A unit that fails is no unit: the calls inside it may be units, and the rest stays kept. See `grain`.

Missing on purpose: units of modules that FSDP2 has sharded, whose parameters are gathered only in backward; and units
in which nothing runs (`on="meta"`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from torchremat._compat.flags import deterministic_kernels
from torchremat.errors import CheckpointError, MutationError, RepeatWarning, UnsupportedError, warn
from torchremat.measuring.exhaustion import is_out_of_memory, let_go
from torchremat.measuring.heap import free_unused
from torchremat.measuring.modules import has_compiled
from torchremat.measuring.runs import Subject
from torchremat.planning.exactness.not_replayable import GIVEN, told
from torchremat.planning.layout import calls_of, installed
from torchremat.planning.profiles.units import Grain, Units, not_called
from torchremat.planning.profiles.watching import UnitObserver, every_unit
from torchremat.regions.diagnosis.causes import seen_cause
from torchremat.regions.diagnosis.differences import DivergedError
from torchremat.regions.settings import Check, Settings
from torchremat.regions.slots import Recomputable
from torchremat.tensors.fingerprints import fingerprint
from torchremat.tensors.structure import tensors_in

_UNKNOWN = (
    "it gives other values then, since something that it reads besides its arguments has changed: an attribute that is "
    "set around it, a global, a count"
)
_NOISE = (
    "it gives other values each time, since torch has no deterministic kernel for {kernels} on this device, or since "
    "something that it reads besides its arguments has changed"
)
# The words of autograd, for the gradient of a tensor that is in no graph.
_UNUSED = "appears to not have been used in the graph"
_KERNEL = re.compile(r"^(.+?) does not have a deterministic implementation")
_NO_ROOM = (
    "there was not enough memory to try whether the modules of the model do in a recompute what they do in their "
    "forward. `torchremat.verify` under the plan tells whether its gradients are exact."
)


class UnlikeError(Exception):
    """Units of a watched step do not all repeat their forward, or that is unknown: they have to be tried first."""


class RetainedError(Exception):
    """Units of a watched step were recomputed for several backwards: they have been refused."""


@dataclass(eq=False)
class Repeats:
    """The results for the modules that have been tried.

    Attributes:
        like: The names of the modules that passed.
        unlike: The names of the modules that failed, with the reasons.
        grains: How far calls are split, by the calls that a step makes: equal for batches of every shape, since
            otherwise their profiles would differ in form.
    """

    like: set[str] = field(default_factory=set[str])
    unlike: dict[str, str] = field(default_factory=dict[str, str])
    grains: dict[tuple[str, ...], Grain] = field(default_factory=dict[tuple[str, ...], Grain])

    def know(self, units: Units) -> bool:
        """Return whether each of some units has been tried."""
        return all(name in self.like for unit in units.units for name, _ in unit.keys)

    def add(self, units: Units, found: Sequence[Mapping[str, str]]) -> bool:
        """Add the results of trying some units in each process, and return whether one of them failed."""
        new = {name: why for one in found for name, why in one.items()}
        self.unlike.update(new)
        if new:
            self.grains.clear()
        self.like.update(name for unit in units.units for name, _ in unit.keys if name not in self.unlike)
        return bool(new)

    def merge(self, others: Sequence[Repeats]) -> None:
        """Take over the results of some processes: what failed in one has failed, what passed in all has passed."""
        self.like = set.intersection(*(one.like for one in others))
        for one in others:
            for name, why in one.unlike.items():
                self.refuse([name], why)
        self.grains.clear()

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Add modules that must be no units."""
        self.unlike.update(dict.fromkeys(names, why))
        self.like -= self.unlike.keys()
        self.grains.clear()

    def tell(self) -> None:
        """Warn about the modules that failed, except for what is no fault of them."""
        found = {name: why for name, why in self.unlike.items() if why != GIVEN}
        if found:
            warn(told(found), RepeatWarning)


Tried: TypeAlias = "dict[str, str] | Literal['no memory', 'not comparable']"
"""The modules whose recompute does not repeat their forward, with reasons; or why there is no result."""


def tried(model: nn.Module, subject: Subject, units: Units, part: Sequence[int], check: Check) -> Tried:
    """Return the modules whose recompute does not repeat their forward, with reasons.

    Only the units in `part` are tried now, and nothing is held of the others. With `check="metadata"` only errors and
    different shapes are found: for units whose saved tensors cannot be compared.
    """
    try:
        with subject.untouched(), _deterministic(model) as warned:
            return _Trial(units, part, check, warned).failures(model, subject)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            if check == "metadata":
                raise
            return "not comparable"
        let_go(error)
    free_unused()
    return "no memory"


def leave_out() -> None:
    """Warn that memory does not suffice to try a unit."""
    warn(_NO_ROOM, RepeatWarning)


class _Trial(UnitObserver):
    """A forward in which every unit is a region, and one recompute of some."""

    def __init__(
        self, units: Units, part: Sequence[int], check: Check, warned: Sequence[warnings.WarningMessage]
    ) -> None:
        super().__init__(units)
        self.part = part
        self.check: Check = check
        self.warned = warned
        self.regions: dict[int, Recomputable] = {}
        self.returns: dict[tuple[int, int], list[Tensor]] = {}  # by unit and call, fingerprints
        self.differs = False  # whether a call has returned different values in the running recompute

    def began(self, region: Recomputable, call: int, tensors: list[Tensor]) -> None:
        """See `Observer`. A region without saved tensors would be freed with its call."""
        unit = self.unit_of(region)
        if unit is not None and unit in self.part:
            self.regions[unit] = region

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit in self.regions:
            self.returns[unit, call] = self.fingerprints(output)
        elif unit is not None and call + 1 == len(self.units.units[unit].calls):
            region.abandon()

    def returned(self, region: Recomputable, call: int, output: object) -> None:
        """See `Observer`."""
        unit = self.unit_of(region)
        if unit in self.regions:
            then, now = self.returns[unit, call], self.fingerprints(output)
            self.differs |= len(then) != len(now) or not all(map(torch.equal, then, now))

    def fingerprints(self, output: object) -> list[Tensor]:
        """Return the fingerprints of the tensors that a call returns, if values are compared."""
        return list(map(fingerprint, tensors_in(output))) if self.check == "values" else []

    def failures(self, model: nn.Module, subject: Subject) -> dict[str, str]:
        """Run the forward, and the units again, the last one first; return the modules of failing units."""
        found: dict[str, str] = {}
        settings = Settings(check=self.check, early_stop=False, observer=self)
        try:
            with installed(model, calls_of(self.units), every_unit(self.units), settings):
                try:
                    subject.forward()
                except (CheckpointError, MutationError) as error:
                    # A gradient that the forward takes itself has recomputed a region.
                    failed = (one for one in self.regions.items() if str(error).startswith(f"{one[1].name(0)}: "))
                    unit, region = next(failed, (-1, None))
                    if region is None:
                        raise
                    return dict.fromkeys([name for name, _ in self.units.units[unit].keys], self.words(region, 0))
            for unit in reversed(self.part):
                if unit not in self.regions:
                    raise not_called(self.units, unit)
                why = self.failure(self.regions[unit])
                if why is not None:
                    found.update((name, why) for name, _ in self.units.units[unit].keys)
        finally:
            for region in self.regions.values():
                region.abandon()
        return dict(reversed(found.items()))

    def failure(self, region: Recomputable) -> str | None:
        """Recompute a region, and return why it did not repeat its forward; None if it did, or if unknown."""
        self.differs, before = False, len(self.warned)
        try:
            region.repeat()
        except DivergedError:
            return self.words(region, before)
        except UnsupportedError:
            return None
        except (CheckpointError, MutationError) as error:
            return str(error).partition("\n")[0].rstrip(".")
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if _UNUSED in str(error):
                return GIVEN
            return f"its recompute raised {type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        return self.words(region, before) if self.differs else None

    def words(self, region: Recomputable, before: int) -> str:
        """Return why a region's recompute differed; `before`: the number of torch's warnings before it."""
        kernels = _kernels(self.warned[before:])
        # A process that runs a region once more than the others may wait for them.
        is_alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
        try:
            cause = seen_cause(region) if is_alone else None
        except Exception:  # noqa: BLE001  as in `explain`
            cause = None
        if cause is not None:
            return cause.fact
        return _NOISE.format(kernels=" and ".join(kernels)) if kernels else _UNKNOWN


def _kernels(warned: Sequence[warnings.WarningMessage]) -> list[str]:
    """Return the names of the kernels that torch has called nondeterministic."""
    found = (_KERNEL.search(str(one.message)) for one in warned)
    return sorted({f"`{match[1]}`" for match in found if match})


@contextmanager
def _deterministic(model: nn.Module) -> Generator[Sequence[warnings.WarningMessage]]:
    """Let kernels add in the same order each time, where they can: a different order is no different state.

    Yields the warnings of the block, including those about kernels that cannot. Compiled code is unchanged, since it
    would be recompiled.
    """
    if has_compiled(model):
        yield ()
        return
    with warnings.catch_warnings(record=True) as warned, deterministic_kernels(warn_only=True):
        warnings.simplefilter("always")
        yield warned
