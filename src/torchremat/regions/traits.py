"""What matters of an operator to whoever keeps its outputs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

# NOTE [ What is never kept ]
#
# A recompute runs the same operators in the same order as the forward, and for those whose outputs are kept it gets
# these instead. Three kinds of operators run again whatever a policy says, since that is exact and costs nothing:
#
#   views             an alias that came from elsewhere would not see what is written to its base, nor the base what is
#                     written to it
#   in-place          they write to a tensor of the recompute
#   without values    `empty` and the like: what is written into them is what counts
#
# What a policy says of these is still of use: a tensor with that memory which autograd saves stays where it is, and is
# not recomputed for autograd's sake.


class Traits(NamedTuple):
    """What matters of an operator.

    Attributes:
        is_ignored: Whether it is not even counted, as it computes nothing and runs now and then.
        is_cast: Whether it is the one with which autocast casts weights.
        is_kept: Whether its outputs can be. See NOTE [ What is never kept ].
        is_random: Whether it draws random numbers.
        writes: The places and names of the arguments that it writes.
    """

    is_ignored: bool
    is_cast: bool
    is_kept: bool
    is_random: bool
    writes: tuple[tuple[int, str], ...]


@lru_cache(None)
def traits_of(operator: Any) -> Traits:
    """Return the traits of an operator: an `OpOverload`, or a higher-order operator."""
    schema = getattr(operator, "_schema", None)
    name = str(operator)
    ignored = operator in SAC_IGNORED_OPS or name.startswith(("aten.detach", "aten.alias", "prim."))
    if schema is None:
        return Traits(ignored, is_cast=False, is_kept=not ignored, is_random=False, writes=())
    aliases = any(one.alias_info is not None for one in schema.returns) or name.startswith("aten._unsafe_view")
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    empty = name.startswith(("aten.empty", "aten.new_empty", "aten.resize", "aten.set_"))
    return Traits(
        is_ignored=ignored,
        is_cast=name == "aten._to_copy.default",
        is_kept=not (ignored or aliases or writes or empty),
        is_random=torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ()),
        writes=writes,
    )
