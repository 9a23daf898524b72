"""The built-in policies: by operator, by name, by module and by size."""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from torchremat._compat.operators import name_of, overloads_of, packets_of, pattern_of
from torchremat.errors import PolicyError
from torchremat.policies.policy import Policy, unmet
from torchremat.regions.decisions import RECOMPUTE, SAVE, Decision, OperatorContext
from torchremat.regions.runtime import name
from torchremat.tensors.handles import Store
from torchremat.tensors.sizes import parse_bytes


@dataclass(frozen=True)
class _Constant(Policy):
    label: str
    decision: Decision
    by_operator = True

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        return self.decision

    def __repr__(self) -> str:
        return self.label


nothing_saved: Policy = _Constant("nothing_saved", RECOMPUTE)
"""The policy that keeps nothing: the region is a plain checkpoint."""
everything_saved: Policy = _Constant("everything_saved", SAVE)
"""The policy that keeps every output, as far as autograd or a recompute asks for it."""


@dataclass(frozen=True)
class _Operators(Policy):
    names: frozenset[str]
    label: str
    by_operator = True

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        if op is name:
            return RECOMPUTE
        namespace, packet, overload = name_of(op)
        kept = not self.names.isdisjoint(
            (f"{namespace}.*", f"{namespace}.{packet}", f"{namespace}.{packet}.{overload}")
        )
        return SAVE if kept else RECOMPUTE

    def __repr__(self) -> str:
        return self.label


def save_operators(*operators: object) -> Policy:
    """Return the policy that keeps the outputs of some operators.

    Args:
        operators: Each an overload (`torch.ops.aten.mm.default`), a packet (`torch.ops.aten.mm`, all of its overloads),
            a namespace (`torch.ops.mylib`, all of its operators), a higher-order operator, or the name of one of
            these: `"aten.mm.default"`, `"aten.mm"`, `"mylib.*"`.

    Raises:
        PolicyError: An operator does not exist, or none is given.
    """
    if not operators:
        raise PolicyError("save_operators(): name at least one operator.")
    names = frozenset(_pattern_of(one) for one in operators)
    return _Operators(names, f"save_operators({', '.join(map(repr, sorted(names)))})")


def _pattern_of(operator: object) -> str:
    if isinstance(operator, str):
        return _check_name(operator)
    found = pattern_of(operator)
    if found is None:
        raise PolicyError(
            f"save_operators: expected an operator such as torch.ops.aten.mm or its name, got {operator!r}. Functions "
            "of torch and methods of tensors are not operators: one may run several."
        )
    return found


def _check_name(wanted: str) -> str:
    namespace, _, rest = wanted.partition(".")
    if not rest:
        raise PolicyError(
            f"save_operators({wanted!r}): expected a name such as 'aten.mm', 'aten.mm.default' or 'mylib.*'."
        )
    if namespace == "higher_order":
        return wanted
    known = packets_of(namespace)
    packet, _, overload = rest.partition(".")
    if not known or (packet != "*" and packet not in known):
        close = difflib.get_close_matches(packet, known, n=5, cutoff=0.4)
        there = f"Closest: {', '.join(f'{namespace}.{one}' for one in close)}." if close else "It has none like it."
        missing = f"has no operator `{packet}`. {there}" if known else "is not a namespace of operators."
        raise PolicyError(f"save_operators({wanted!r}): `{namespace}` {missing}")
    overloads = overloads_of(namespace, packet) if overload else []
    if overload and overload not in overloads:
        raise PolicyError(
            f"save_operators({wanted!r}): {namespace}.{packet} has no overload `{overload}`. It has: "
            f"{', '.join(overloads)}."
        )
    return wanted


_UNBATCHED = ("aten.mm", "aten.addmm", "aten._scaled_mm", "aten._int_mm", "aten.mv", "aten.addmv")
_BATCHED = ("aten.bmm", "aten.baddbmm", "aten.dot", "aten.vdot")
_CONVOLUTIONS = ("aten.convolution", "aten._convolution", "aten.mkldnn_convolution", "aten.cudnn_convolution")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "higher_order.flex_attention.default",
)

save_matmuls: Policy = _Operators(frozenset((*_UNBATCHED, *_BATCHED)), "save_matmuls")
"""The policy that keeps the outputs of matrix products, those of linear layers and of attention that is written out."""
save_unbatched_matmuls: Policy = _Operators(frozenset(_UNBATCHED), "save_unbatched_matmuls")
"""The policy that keeps the outputs of products without batch dimensions: those of linear layers."""
save_attention: Policy = _Operators(frozenset(_ATTENTION), "save_attention")
"""The policy that keeps the outputs of attention kernels: `scaled_dot_product_attention`, and flex attention."""
save_convolutions: Policy = _Operators(frozenset(_CONVOLUTIONS), "save_convolutions")
"""The policy that keeps the outputs of convolutions."""


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
    return _make_names("save_only_these_names", names, keeps=True)


def save_any_names_but_these(*names: str) -> Policy:
    """Return the policy that keeps the tensors with a name other than `names`.

    Raises:
        PolicyError: A name is not a string. In backward, when a name was never seen.
    """
    return _make_names("save_any_names_but_these", names, keeps=False)


def offload_these_names(*names: str, store: Store) -> Policy:
    """Return the policy that puts the tensors with one of `names` into a store.

    Raises:
        PolicyError: No name is given, or one is not a string. In backward, when a name was never seen.
    """
    return save_only_these_names(*names).into(store)


def _make_names(label: str, names: tuple[object, ...], *, keeps: bool) -> Policy:
    if keeps and not names:
        raise PolicyError(f"{label}(): give at least one name.")
    strings = [one for one in names if isinstance(one, str)]
    if len(strings) != len(names):
        raise PolicyError(f"{label}: names are strings, got {names!r}.")
    return _Names(tuple(strings), keeps, label)


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


@dataclass(frozen=True)
class _Sizes(Policy):
    size_bytes: int
    larger: bool

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Decision:
        found = _bytes(ctx.op_output)
        return SAVE if (found > self.size_bytes if self.larger else found < self.size_bytes) else RECOMPUTE

    def __repr__(self) -> str:
        return f"save_{'larger' if self.larger else 'smaller'}_than({self.size_bytes})"


def save_smaller_than(size: int | str) -> Policy:
    """Return the policy that keeps operator outputs smaller than `size`, in bytes or `"64KiB"`."""
    return _Sizes(parse_bytes(size), larger=False)


def save_larger_than(size: int | str) -> Policy:
    """Return the policy that keeps operator outputs larger than `size`, in bytes or `"1MiB"`.

    Together with others: `save_matmuls & ~save_larger_than("64MiB")`.
    """
    return _Sizes(parse_bytes(size), larger=True)


def _bytes(output: object) -> int:
    if isinstance(output, Tensor):
        return output.numel() * output.element_size()
    if isinstance(output, tuple | list):
        return sum(map(_bytes, cast("list[object]", output)))
    return 0
