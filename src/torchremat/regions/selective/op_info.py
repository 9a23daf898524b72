"""The facts about an operator that the cache of outputs needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchremat._compat.operators import entry_of

# NOTE [ What is never kept ]
#
# A recompute runs the same operators in the same order as the forward, and gets kept outputs instead of running their
# operators. Four kinds of operators always run again, whatever a policy says, since that is exact and costs little:
#
#   views             an alias from elsewhere would not see writes to its base, and the base would not see writes to the
#                     alias
#   in-place          they write to a tensor of the recompute; batch normalisation does so without declaring it
#   without values    `empty`, `zeros` and the like: only later writes into them matter, and a kernel that torch does
#                     not see would write once more into the kept output
#   casts             autocast keeps casts of leaves, and an input is a leaf only in a recompute
#
# A policy's answer for these still has an effect: a tensor with that memory that autograd saves stays where it is, and
# is not recomputed for autograd.

# NOTE [ What is not counted ]
#
# In a recompute the inputs of the region are leaves, and gradients are separate. So some operators run only in the
# forward or only in the recompute, although the function does the same twice:
#
#   casts             a forward may find one that autocast kept where its recompute has to cast, and the other way round
#   views             code that asks a leaf for its node, to hook its gradient, gets the node through a view. The hooks
#                     of `FlopCounterMode` do so for the inputs of every module, wherever the counter is on
#   additions         a backward inside the region adds to gradients of leaves
#
# None of them is ever kept, so they have no number and no place in the order that is checked in a recompute. A
# different view is still detected where autograd saves a result of it: by its shape and strides.


@dataclass(frozen=True, slots=True, eq=False)
class OpInfo:
    """The facts about one operator.

    Attributes:
        operator: An `OpOverload`, or a higher-order operator.
        name: Its name, as torch has it.
        is_ignored: Whether it computes nothing and runs only sometimes, so that no policy is asked about it.
        is_cast: Whether it is a cast.
        is_counted: Whether it has a number, and a place in the order. See NOTE [ What is not counted ].
        is_kept: Whether its outputs can be kept. See NOTE [ What is never kept ].
        is_random: Whether it draws random numbers.
        accumulates: Whether it may be an operator that accumulates a gradient.
        is_sized_by_values: Whether its output sizes may depend on input values.
        writes: The places and names of the arguments that it writes.
        says_fresh: Whether it declares that its outputs do not alias its arguments, which may be false
            (`unsafe_split`).
        is_plain: Whether asking the policy is enough, as none of the facts above needs special handling.
        run: Runs it.
    """

    operator: Callable[..., object]
    is_ignored: bool
    is_cast: bool = False
    is_counted: bool = True
    is_kept: bool = False
    is_random: bool = False
    accumulates: bool = False
    is_sized_by_values: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    says_fresh: bool = False
    name: str = field(init=False)  # torch builds it anew each time
    is_plain: bool = field(init=False)
    run: Callable[..., object] = field(init=False)

    def __post_init__(self) -> None:
        plain = not (self.is_ignored or self.is_cast or self.accumulates or self.writes)
        object.__setattr__(self, "name", str(self.operator))
        object.__setattr__(self, "is_plain", plain)
        object.__setattr__(self, "run", entry_of(self.operator))


# Without an earlier gradient, as in a recompute, the first one is not added but taken, or copied.
_ACCUMULATING = ("aten.add.", "aten.add_.", "aten.clone.", "aten.new_empty_strided.", "aten.copy_.")

# By identity, as hashing an operator is slow.
known_op_info: dict[int, OpInfo] = {}


def op_info_of(operator: Any) -> OpInfo:
    """Return the op info of an operator, always the same object."""
    found = known_op_info.get(id(operator))
    if found is None:
        found = known_op_info[id(operator)] = _traits_of(operator)
    return found


def _traits_of(operator: Any) -> OpInfo:
    schema = getattr(operator, "_schema", None)
    name = str(operator)
    ignored = operator in SAC_IGNORED_OPS or name.startswith(("aten.detach", "aten.alias", "prim."))
    if schema is None:
        return OpInfo(operator, ignored, is_kept=not ignored)
    ignored = ignored or not _has_tensors(schema)
    says_fresh = all(one.alias_info is None for one in schema.returns)
    aliases = not says_fresh or name.startswith("aten._unsafe_view")
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in STATISTICS
    )
    cast = name == "aten._to_copy.default"
    empty = name.startswith(_WITHOUT_VALUES)
    tags = getattr(operator, "tags", ())
    return OpInfo(
        operator,
        ignored,
        is_cast=cast,
        is_counted=not (ignored or cast or (aliases and not writes)),
        is_kept=not (ignored or aliases or writes or empty or cast),
        accumulates=name.startswith(_ACCUMULATING),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_sized_by_values=torch.Tag.dynamic_output_shape in tags,
        writes=writes,
        says_fresh=says_fresh,
    )


def _has_tensors(schema: Any) -> bool:
    # Marks for a profiler have none, and run only under a profiler.
    return any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))


# Arguments that operators of batch normalisation write in training without declaring it.
STATISTICS = ("running_mean", "running_var")
_WITHOUT_VALUES = (
    *(f"aten.{kind}{name}" for name in ("empty", "zeros", "ones", "full") for kind in ("", "new_")),
    "aten.scalar_tensor",
    "aten.resize",
    "aten.set_",
)
