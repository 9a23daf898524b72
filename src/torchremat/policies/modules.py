"""Policies by the module that runs an operator."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field
from typing import Any

from torchremat.errors import PolicyError
from torchremat.policies.policy import Policy, unmet
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext


@dataclass(frozen=True)
class _Modules(Policy):
    patterns: tuple[str, ...]
    matched: set[str] = field(default_factory=set[str], compare=False, repr=False)
    paths: set[str] = field(default_factory=set[str], compare=False, repr=False)

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        running = ctx.modules
        if len(self.matched) < len(self.patterns):
            self.paths.update(ctx.known_modules)
            self.matched.update(one for one in self.patterns if any(_matches(path, one) for path in self.paths))
        kept = any(_matches(path, one) for path in running for one in self.patterns)
        return SAVE if kept else RECOMPUTE

    def unmet(self) -> str | None:
        """Return the words for patterns that match no module."""
        return unmet(self, "module", [one for one in self.patterns if one not in self.matched], self.paths)

    def __repr__(self) -> str:
        return f"save_in_modules({', '.join(map(repr, self.patterns))})"


def save_in_modules(*patterns: str) -> Policy:
    """Return the policy that keeps the outputs of operators which run in some modules, or in parts of them.

    Args:
        patterns: Globs over the ends of paths: `"attn"` is every module of that name, `"layers.*.attn"` every such
            module in `layers`; a `*` does not match a dot.

    Raises:
        PolicyError: No pattern is given, or one is not a string. In backward, when a pattern has matched no module.
    """
    if not patterns or not all(isinstance(one, str) and one for one in patterns):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PolicyError(f"save_in_modules: expected globs over module paths, got {patterns!r}.")
    return _Modules(patterns)


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    if len(parts) < len(wanted):
        return False
    return all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))
