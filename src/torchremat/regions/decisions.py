"""The policy protocol, and the answers of a policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from weakref import WeakValueDictionary

from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from torchremat.errors import PolicyError
from torchremat.stores.catalog import Catalog
from torchremat.stores.host import Host
from torchremat.tensors.handles import Store


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Decision:
    """A policy's decision on one operator's output.

    Attributes:
        kind: `"save"`: the output is kept; `"store"`: it waits in a store; `"recompute"`: the operator runs again.
        catalog: Puts the output into the store.
    """

    kind: Literal["save", "recompute", "store"]
    catalog: Catalog | None = None

    def __reduce__(self) -> str | tuple[object, ...]:
        # The same decision again, as decisions are compared by identity.
        return self.kind.upper() if self.catalog is None else (stored_in, (self.catalog.store,))


SAVE = Decision("save")
"""The decision to keep an output."""
RECOMPUTE = Decision("recompute")
"""The decision to let an operator run again."""

Answer = Decision | CheckpointPolicy | bool
"""What a policy may answer; of two booleans, True is `SAVE` and False `RECOMPUTE`."""


class OperatorContext(SelectiveCheckpointContext):
    """What a policy is told in addition to the operator and its arguments. It extends torch's own context.

    Attributes:
        op_output: The operator's output. Do not keep it.
        is_recompute: Always False, as policies are asked only in the forward.
        ordinal: How many operators have run in the call before, without casts and views.
    """

    def __init__(self, names: ModuleNames) -> None:
        super().__init__(is_recompute=False)
        self.ordinal = 0
        self._names = names

    @property
    def module(self) -> str:
        """The path of the innermost module that runs the operator, "" outside of any."""
        return next(self._names.running(), "")

    @property
    def modules(self) -> list[str]:
        """The paths of all modules whose call is running, in the region and around it, innermost first."""
        return list(self._names.running())

    @property
    def known_modules(self) -> list[str]:
        """The paths of all modules that the region sees."""
        return self._names.known()


class ModuleNames(Protocol):
    """Knows the modules of a region by their paths."""

    def running(self) -> Iterator[str]:
        """Yield the paths of the modules that are running, innermost first."""
        ...

    def known(self) -> list[str]:
        """Return the paths of all modules that the region sees."""
        ...


class Window(NamedTuple):
    """Operators of a call that run one after the other, and that a policy must be asked about.

    A dispatch mode shows them, which takes several times as long as an operator on few elements. It can be switched
    only where a tensor is saved, and that is in the middle of an operator: see NOTE [ Selective recompute ], 9.

    Attributes:
        last: The number of the last one, as `OperatorContext.ordinal`.
        first: The number of the first one.
        on: How many tensors the call has saved when the mode is switched on; 0 if it is on when the call begins.
        sees: How many the call has saved when the first one is seen. The last of these must be saved by another
            operator than the one at which the mode was switched on; two operators between them make sure of that.
    """

    last: int
    first: int = 0
    on: int = 0
    sees: int = 0


class AnyPolicy(Protocol):
    """Chooses, for each operator that runs in a region, whether its output is kept, stored or recomputed.

    A policy is asked only in the forward, once for each operator, after the operator has run. Attributes tell the
    region how to ask:

        `by_operator`    the answer depends only on the operator: it is asked once for each
        `asks_in`        the operators of a call that it must be asked about, as `Window`s; all others run again
        `asks_about_writes`    whether these include all operators that write in place, or return memory of an argument
                         without declaring it (`unsafe_split`); else all others are watched for that
        `reads_names`    it is asked for named tensors as well, with `torchremat.name` in place of the operator

    A method `unmet()` is called in the first recompute and returns words for the names in the policy that no forward
    has had.

    Functions need none of these: `def policy(ctx, op, *args, **kwargs)` as for
    `torch.utils.checkpoint.create_selective_checkpoint_contexts` is a policy.
    """

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Answer:
        """Return the decision on the output of `op`."""
        ...


def decision_of(answer: object, policy: object) -> Decision:
    """Return the decision that an answer stands for.

    Raises:
        PolicyError: A policy may not give this answer.
    """
    if type(answer) is Decision:
        return answer
    if type(answer) is bool:
        return SAVE if answer else RECOMPUTE
    if isinstance(answer, CheckpointPolicy):
        return _TORCHS[answer]
    raise PolicyError(
        f"the policy {describe(policy)} answered {answer!r}; allowed are True and False, "
        "torch.utils.checkpoint.CheckpointPolicy, and the decisions of torchremat.extend."
    )


class AskedPolicy:
    """A policy, how it says that it must be asked, and its answers so far.

    Attributes:
        policy: The policy.
        asks_in: See `AnyPolicy`; None if it is asked about all operators.
        reads_names: Whether it is asked for named tensors.
        looks_on: Whether operators that it is not asked about must be watched, as they may write to what it keeps.
        decisions: Its decisions, by the operator's `OpInfo`, if they depend on nothing else.
    """

    __slots__ = ("asks_in", "decisions", "looks_on", "policy", "reads_names")

    def __init__(self, policy: AnyPolicy) -> None:
        self.policy = policy
        self.asks_in: Sequence[Window] | None = getattr(policy, "asks_in", None)
        self.looks_on = not getattr(policy, "asks_about_writes", False)
        self.reads_names = bool(getattr(policy, "reads_names", False))
        self.decisions: dict[object, Decision] | None = {} if getattr(policy, "by_operator", False) else None

    def __reduce__(self) -> tuple[object, ...]:
        return AskedPolicy, (self.policy,)  # operators cannot be pickled


def check_met(policy: object) -> None:
    """Raise if a policy names something that no forward has had, now that a backward begins.

    Raises:
        PolicyError: It does.
    """
    unmet = getattr(policy, "unmet", None)
    words = None if unmet is None else unmet()
    if words is not None:
        raise PolicyError(words)


def stored_in(store: Store) -> Decision:
    """Return the decision to let an output wait in a store; it is always the same for one store."""
    found = _by_store.get(id(store))
    if found is None:
        found = _by_store[id(store)] = Decision("store", Catalog(store, min_bytes=0))
    return found


# The decision keeps its store alive, so no other object has the store's id.
_by_store: WeakValueDictionary[int, Decision] = WeakValueDictionary()


def describe(policy: object) -> str:
    """Return the words for a policy in a message."""
    return getattr(policy, "__qualname__", None) or repr(policy)


# Torch's "offload" names no store.
_IN_HOST = stored_in(Host())
_TORCHS = {
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: _IN_HOST,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: _IN_HOST,
}
