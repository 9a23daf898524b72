"""The settings of a region, and its observer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

from torch import Tensor

from torchremat.errors import PolicyError, UnsupportedError
from torchremat.regions.decisions import AnyPolicy, AskedPolicy, Window, describe
from torchremat.regions.slots import Recomputable
from torchremat.state.guarded import check_named

Check = Literal["metadata", "values", "none"]


class Observer:
    """Observes the events of a region; made for the profiler. Methods that are not overridden are no-ops."""

    def holds(self, region: Recomputable, call: int, places: Sequence[int]) -> None:
        """The region has begun to hold inputs of a call that is about to begin: its tensors at these places."""

    def looks(self, region: Recomputable) -> None:
        """The region is about to capture the state that a call will see: it copies generator states and buffers."""

    def began(self, region: Recomputable, call: int, tensors: list[Tensor]) -> None:
        """The region has captured it, and the call begins its first run in the region, with these inputs."""

    def saved(self, region: Recomputable, call: int, tensor: Tensor) -> None:
        """Autograd saves a tensor in the first run of a call; the region has a slot for it, its last one."""

    def settles(self, region: Recomputable) -> None:
        """A call has run; the region is about to drop the copies of unchanged state."""

    def ended(self, region: Recomputable, call: int, output: object) -> None:
        """The region has dropped these copies, and the call has ended."""

    def recomputing(self, region: Recomputable) -> None:
        """A recompute begins."""

    def given(self, region: Recomputable, call: int, place: int, tensor: Tensor) -> None:
        """A recompute has got a tensor that the region holds, as the input of a call at this place."""

    def reruns(self, region: Recomputable, call: int) -> None:
        """A call is about to run again in a recompute, which has its inputs."""

    def filled(self, region: Recomputable, index: int, tensor: Tensor, *, ends: bool) -> None:
        """A recompute has reached the save of this number; a waiting slot has its tensor now.

        With `ends` all tensors that were asked for are there: with `early_stop` the recompute stops here.
        """

    def returned(self, region: Recomputable, call: int, output: object) -> None:
        """A call has run to its end in a recompute, with this output."""

    def recomputed(self, region: Recomputable) -> None:
        """A recompute has ended."""

    def asked(self, region: Recomputable, index: int, tensor: Tensor) -> None:
        """Autograd has asked for the saved tensor of this number, and is about to get it."""


class Turns:
    """Counts the forwards that share settings, and selects those with a check of values."""

    __slots__ = ("_count", "every")

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self._count = 0

    def is_next(self) -> bool:
        """Return whether the forward that begins now is selected."""
        count, self._count = self._count, self._count + 1
        return count % self.every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a region behaves. The options are those of `checkpointed`.

    Raises:
        UnsupportedError: An option has an invalid value.
    """

    check: Check = "metadata"
    check_every: int = 1
    preserve_rng: bool = True
    early_stop: bool = True
    guard: Sequence[object] = ()
    debug: bool = False
    policy: AnyPolicy | None = None
    observer: Observer | None = None
    cuts: tuple[int, ...] = ()  # of plans alone, see NOTE [ A recompute in parts ]
    turns: Turns = field(init=False, compare=False)
    asked: AskedPolicy | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse options that cannot be honoured: users are not type-checked."""
        if self.check not in get_args(Check):
            raise UnsupportedError(f"check={self.check!r}: allowed are 'metadata', 'values' and 'none'.")
        for name in ("preserve_rng", "early_stop", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"{name}={getattr(self, name)!r}: expected True or False.")
        every = cast("object", self.check_every)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UnsupportedError(f"check_every={every!r}: expected an int of at least 1.")
        if every > 1 and self.check != "values":
            raise UnsupportedError(f"check_every={every}: only check='values' can be left out now and then.")
        guard: object = self.guard
        if not isinstance(guard, list | tuple):
            raise UnsupportedError(f"guard: expected a list of objects, got {type(guard).__name__}.")
        for one in cast("Sequence[object]", guard):
            check_named(one)
        policy: object = self.policy
        if policy is not None and not callable(policy):
            raise PolicyError(
                f"policy={policy!r}: expected a function of a context, an operator and its arguments, as those of "
                "torchremat.policies are."
            )
        windows = getattr(policy, "asks_in", None)
        if not (windows is None or (isinstance(windows, list | tuple) and _are_in_order(windows))):
            raise PolicyError(
                f"policy={describe(policy)}: its asks_in is {windows!r}, and must be a list of extend.Window, in the "
                "order in which the operators run, or None."
            )
        object.__setattr__(self, "guard", tuple(cast("Sequence[object]", guard)))
        object.__setattr__(self, "turns", Turns(self.check_every))
        object.__setattr__(self, "asked", None if self.policy is None else AskedPolicy(self.policy))


def _are_in_order(windows: Sequence[object]) -> bool:
    """Return whether these are windows of operators that run one after the other."""
    numbers: list[int] = []
    for one in windows:
        if not (isinstance(one, Window) and all(type(number) is int for number in one)):
            return False
        if not 0 <= one.first <= one.last or not (one.on < one.sees or one.on == one.sees == 0):
            return False
        numbers += (one.first, one.last)
    return numbers == sorted(numbers)
