"""Policies by the names that `torchremat.name` gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torchremat.errors import PolicyError
from torchremat.policies.policy import Policy, unmet
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext
from torchremat.regions.naming import name
from torchremat.tensors.handles import Store


@dataclass(frozen=True)
class _Names(Policy):
    names: tuple[str, ...]
    keeps: bool
    label: str
    reads_names = True
    # The names seen so far, for the message about a name that was never seen.
    seen: set[str] = field(default_factory=set[str], compare=False, repr=False)

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        if op is not name:
            return RECOMPUTE
        self.seen.add(args[1])
        return SAVE if (args[1] in self.names) is self.keeps else RECOMPUTE

    def unmet(self) -> str | None:
        """Return the words for names that no tensor was given."""
        return unmet(self, "tensor", [one for one in self.names if one not in self.seen], self.seen)

    def __repr__(self) -> str:
        return f"{self.label}({', '.join(map(repr, self.names))})"


def save_only_these_names(*names: str) -> Policy:
    """Return the policy that keeps the tensors with one of `names`.

    Raises:
        PolicyError: No name is given, or one is not a string. In backward, when a name was never seen.
    """
    return _named("save_only_these_names", names, keeps=True)


def save_any_names_but_these(*names: str) -> Policy:
    """Return the policy that keeps the tensors with a name other than `names`.

    Raises:
        PolicyError: A name is not a string. In backward, when a name was never seen.
    """
    return _named("save_any_names_but_these", names, keeps=False)


def offload_these_names(*names: str, store: Store) -> Policy:
    """Return the policy that puts the tensors with one of `names` into a store.

    Raises:
        PolicyError: No name is given, or one is not a string. In backward, when a name was never seen.
    """
    return save_only_these_names(*names).into(store)


def _named(label: str, names: tuple[object, ...], *, keeps: bool) -> Policy:
    if keeps and not names:
        raise PolicyError(f"{label}(): give at least one name.")
    strings = [one for one in names if isinstance(one, str)]
    if len(strings) != len(names):
        raise PolicyError(f"{label}: names are strings, got {names!r}.")
    return _Names(tuple(strings), keeps, label)
