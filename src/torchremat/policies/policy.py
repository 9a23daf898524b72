"""The base class of policies, and how policies combine."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from torchremat.errors import PolicyError
from torchremat.regions.decisions import (
    RECOMPUTE,
    SAVE,
    AnyPolicy,
    Decision,
    OperatorContext,
    Window,
    decision_of,
    describe,
    stored_in,
)
from torchremat.tensors.handles import Store


class Policy(ABC):
    """A policy that combines with others. Functions combine with it as well: `save_matmuls | function`.

    Attributes:
        by_operator: Whether the decision depends only on the operator, so that each operator is asked about once.
        asks_in: The operators of a call that it must be asked about, in their order; all of them if None.
        asks_about_writes: Whether these include all operators that write in place, or return memory of an argument
            without declaring it; else the others are watched for that.
        reads_names: Whether it must be asked about named tensors.
    """

    by_operator: bool = False
    asks_in: Sequence[Window] | None = None
    asks_about_writes: bool = False
    reads_names: bool = False

    @abstractmethod
    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        """Return the decision on the output of an operator.

        Args:
            ctx: The operator's output, and the module that runs it.
            op: The operator, or `torchremat.name`.
            args: Its arguments; for `torchremat.name` the tensor and the name.
            kwargs: Its keyword arguments.
        """

    def into(self, store: Store) -> Policy:
        """Return the policy that puts the outputs that this one keeps into `store`."""
        return _Into(self, store)

    def unmet(self) -> str | None:
        """Return the words for names in the policy that no forward has had so far, None if all names were met."""
        return None

    def __or__(self, other: AnyPolicy) -> Policy:
        return _Either(self, _check_policy(other))

    def __ror__(self, other: AnyPolicy) -> Policy:
        return _Either(_check_policy(other), self)

    def __and__(self, other: AnyPolicy) -> Policy:
        return _both(self, _check_policy(other))

    def __rand__(self, other: AnyPolicy) -> Policy:
        return _both(_check_policy(other), self)

    def __invert__(self) -> Policy:
        return _Not(self)


class _Combined(Policy):
    """A policy made of others."""

    def _inner(self) -> tuple[AnyPolicy, ...]:
        return cast("tuple[AnyPolicy, ...]", tuple(one for one in vars(self).values() if callable(one)))

    @property
    def by_operator(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]: it is read alone
        return all(getattr(one, "by_operator", False) for one in self._inner())

    @property
    def reads_names(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(getattr(one, "reads_names", False) for one in self._inner())

    def unmet(self) -> str | None:
        """Return the words of the first part that has any."""
        found = (one.unmet() for one in self._inner() if isinstance(one, Policy))
        return next((words for words in found if words is not None), None)


@dataclass(frozen=True)
class _Into(_Combined):
    policy: Policy
    store: Store

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        return RECOMPUTE if self.policy(ctx, op, *args, **kwargs) is RECOMPUTE else stored_in(self.store)

    def _inner(self) -> tuple[AnyPolicy, ...]:
        return (self.policy,)

    def __repr__(self) -> str:
        return f"{self.policy!r}.into({self.store!r})"


@dataclass(frozen=True)
class _Either(_Combined):
    first: AnyPolicy
    second: AnyPolicy

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        decision = decision_of(self.first(ctx, op, *args, **kwargs), self.first)
        if decision is not RECOMPUTE:
            return decision
        return decision_of(self.second(ctx, op, *args, **kwargs), self.second)

    def __repr__(self) -> str:
        return f"({describe(self.first)} | {describe(self.second)})"


@dataclass(frozen=True)
class _Both(_Combined):
    first: AnyPolicy
    second: AnyPolicy

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        decision = decision_of(self.first(ctx, op, *args, **kwargs), self.first)
        if decision is RECOMPUTE:
            return RECOMPUTE
        other = decision_of(self.second(ctx, op, *args, **kwargs), self.second)
        return RECOMPUTE if other is RECOMPUTE else decision

    def __repr__(self) -> str:
        return f"({describe(self.first)} & {describe(self.second)})"


@dataclass(frozen=True)
class _Not(_Combined):
    policy: Policy

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        return SAVE if self.policy(ctx, op, *args, **kwargs) is RECOMPUTE else RECOMPUTE

    def __repr__(self) -> str:
        return f"~{self.policy!r}"


def _both(first: AnyPolicy, second: AnyPolicy) -> Policy:
    reads = [bool(getattr(one, "reads_names", False)) for one in (first, second)]
    goes_by_operator = [bool(getattr(one, "by_operator", False)) for one in (first, second)]
    if (reads[0] and goes_by_operator[1]) or (reads[1] and goes_by_operator[0]):
        raise PolicyError(
            f"{describe(first)} & {describe(second)}: one goes by names and the other by operators, so there is "
            "nothing that both keep. Give names to fewer tensors, or use |."
        )
    return _Both(first, second)


def _check_policy(policy: object) -> AnyPolicy:
    if not callable(policy):
        raise PolicyError(f"{policy!r} is not a policy: it cannot be called.")
    return cast("AnyPolicy", policy)


def unmet(policy: Policy, kind: str, missing: list[str], seen: set[str]) -> str | None:
    """Return the words for the names in `missing`, of things of a `kind`, that a policy has never seen."""
    if not missing:
        return None
    close = [one for name in missing for one in difflib.get_close_matches(name, seen, n=3, cutoff=0.3)]
    rest = sorted(seen.difference(close))
    listed = ", ".join(map(repr, [*dict.fromkeys(close), *rest][:20])) or "none"
    names = ", ".join(map(repr, missing))
    return f"{policy!r}: no {kind} of a region with this policy is called {names}. Existing names: {listed}."
