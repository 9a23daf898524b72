"""The facts about an operator that the cache of outputs needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from torchremat._compat.collectives import entry_of_collective, gives_work
from torchremat._compat.operators import entry_of

# NOTE [ What is never kept ]
#
# A recompute runs the same operators in the same order as the forward, and gets kept outputs instead of running their
# operators. Some operators always run again, whatever a policy says, since that is exact and costs little:
#
#   views             an alias from elsewhere would not see writes to its base, and the base would not see writes to the
#                     alias
#   in-place          they write to a tensor of the recompute; batch normalisation does so without declaring it
#   without values    `empty`, `zeros` and the like: only later writes into them matter, and a kernel that torch does
#                     not see would write once more into the kept output
#   casts             autocast keeps casts of leaves, and an input is a leaf only in a recompute
#   into a store      collectives that give a `Work`: what they receive is complete only when the caller has waited
#
# A policy's answer for these still has an effect: a tensor with that memory that autograd saves stays where it is, and
# is not recomputed for autograd.

# NOTE [ What other processes have sent ]
#
# A collective that runs again in a recompute runs on all processes, in one order, or not at all. To keep what it has
# received, so that it does not run again:
#
#   fresh outputs     functional collectives: kept like any other output
#   into arguments    those of c10d, and the functional ones that write: what they received is kept, and a recompute
#                     copies it into the arguments, and gives a finished `Work`
#   nothing           a barrier, a send: only the finished `Work`
#   two processes     the sends and receives of a call are kept all or none, since a send that is kept on one process
#                     leaves the other waiting if its receive runs again. A receive from any source has no sender when
#                     it does not run, so it cannot be kept
#
# Several may receive into parts of one tensor before any is waited for, and c10d moves no version. So in the forward
# only a write to the very memory that was received is one, and the version counts from the end of the forward. What
# was written since then is lost, and the operator may not run on this process alone: that is an error. So is memory
# that the recompute gets again, older than the region: a later collective into it would not show.

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
        communicates: Whether other processes take part in it. See NOTE [ What other processes have sent ].
        is_paired: Whether it is half of an exchange between two processes: a send, a receive.
        receives: Whether it has received into its arguments, or nothing, rather than returned it.
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
    communicates: bool = False
    is_paired: bool = False
    receives: bool = False
    name: str = field(init=False)  # torch builds it anew each time
    is_plain: bool = field(init=False)
    run: Callable[..., object] = field(init=False)

    def __post_init__(self) -> None:
        plain = not (self.is_ignored or self.is_cast or self.accumulates or self.writes or self.communicates)
        object.__setattr__(self, "name", str(self.operator))
        object.__setattr__(self, "is_plain", plain)
        run = entry_of_collective(self.operator) if self.communicates else entry_of(self.operator)
        object.__setattr__(self, "run", run)

    def __reduce__(self) -> tuple[Callable[[str], OpInfo], tuple[str]]:
        return _op_info_named, (self.name,)  # processes that train together send each other what a step has run


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


def _op_info_named(name: str) -> OpInfo:
    path = name if "." in name else f"higher_order.{name}"
    return op_info_of(attrgetter(path)(torch.ops))


def _traits_of(operator: Any) -> OpInfo:
    schema = getattr(operator, "_schema", None)
    name = str(operator)
    ignored = operator in SAC_IGNORED_OPS or name.startswith(("aten.detach", "aten.alias", "prim."))
    if schema is None:
        return OpInfo(operator, ignored, is_kept=not ignored)
    ignored = ignored or not _has_tensors(schema)
    communicates = any(_is_group(one) for one in schema.arguments)
    is_late = gives_work(schema)
    says_fresh = not is_late and all(one.alias_info is None for one in schema.returns)
    aliases = not (says_fresh or is_late) or name.startswith(_VIEWS)
    writes = tuple(
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or argument.name in STATISTICS
        or (communicates and _is_received(name, argument))
    )
    cast = name == "aten._to_copy.default"
    empty = name.startswith(_WITHOUT_VALUES)
    tags = getattr(operator, "tags", ())
    return OpInfo(
        operator,
        ignored,
        is_cast=cast,
        is_counted=not (ignored or cast or (aliases and not writes)),
        is_kept=(communicates or not (ignored or aliases or writes or empty or cast)) and name not in _UNKEPT,
        accumulates=name.startswith(_ACCUMULATING),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_sized_by_values=torch.Tag.dynamic_output_shape in tags,
        writes=writes,
        says_fresh=says_fresh,
        communicates=communicates,
        is_paired=name.startswith(_PAIRED),
        receives=communicates and bool(writes or is_late or not schema.returns),
    )


def _is_group(argument: Any) -> bool:
    return argument.name == "group_name" or "c10d.ProcessGroup" in str(argument.type)


def _is_received(name: str, argument: Any) -> bool:
    # Collectives write what they receive into arguments without declaring it; these may have held what is sent.
    return (
        name.startswith("c10d.")
        and name != "c10d.send.default"
        and "Tensor" in str(argument.type)
        and argument.name.startswith(("output", "tensors"))
    )


def _has_tensors(schema: Any) -> bool:
    # Marks for a profiler have none, and run only under a profiler.
    return any("Tensor" in str(one.type) for one in (*schema.arguments, *schema.returns))


_PAIRED = ("c10d.send", "c10d.recv", *(f"_c10d_functional.{one}" for one in ("isend", "irecv", "batch_p2p_ops")))
# Receives from any source, and those whose outputs are undeclared aliases; eager code calls only the first.
_UNKEPT = ("c10d.recv_any_source_.default", *(f"{one}.default" for one in _PAIRED[2:]))
# They return the memory of their argument without declaring it, and no operator writes to it meanwhile.
_VIEWS = ("aten._unsafe_view", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd")
# Arguments that operators of batch normalisation write in training without declaring it.
STATISTICS = ("running_mean", "running_var")
_WITHOUT_VALUES = (
    *(f"aten.{kind}{name}" for name in ("empty", "zeros", "ones", "full") for kind in ("", "new_")),
    "aten.scalar_tensor",
    "aten.resize",
    "aten.set_",
)
