"""`create_selective_checkpoint_contexts`: a policy in the form of two context managers.

`checkpoint` takes the policy out of the pair and gives it to the region. Elsewhere, in `torch.utils.checkpoint` itself
or inside a user's own contexts, the pair does the same with the knowledge of two contexts: it keeps outputs to the end,
and saved tensors are recomputed from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, cast

from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from torchremat._compat.autograd import current_graph_task, retains_graph
from torchremat._compat.modes import is_recording, is_traced_with_fakes
from torchremat._compat.operators import is_operator, is_packet
from torchremat.regions.decisions import Answer, AnyPolicy, AskedPolicy, OperatorContext
from torchremat.regions.selective.cache import Selection
from torchremat.regions.selective.forward import PutBack
from torchremat.regions.selective.mode import SeenBy
from torchremat.regions.selective.watching import Collecting, Replaying

_create_torchs = torch_checkpoint.create_selective_checkpoint_contexts


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Any, allow_cache_entry_mutation: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts for `context_fn` that keep the outputs of some operators.

    `torch.utils.checkpoint.create_selective_checkpoint_contexts`. All six values of `CheckpointPolicy` do what they
    say: `*_CPU_OFFLOAD` puts the output into memory of the host.

    Args:
        policy_fn_or_list: A function of a `SelectiveCheckpointContext`, an operator and its arguments that returns a
            `CheckpointPolicy`; or a list of `OpOverload`s to save; or one of `torchremat.policies`.
        allow_cache_entry_mutation: Allowed anyway: a kept output is copied before it is written in place.

    Raises:
        ValueError: The list contains another object.
        TypeError: `policy_fn_or_list` is neither a function nor a list.
    """
    if is_recording() or is_traced_with_fakes():
        # A compiler's partitioner wants torch's own marks.
        return _create_torchs(policy_fn_or_list, allow_cache_entry_mutation)
    if isinstance(policy_fn_or_list, list):
        operators = cast("list[object]", policy_fn_or_list)
        for one in operators:
            if not is_operator(one):
                raise ValueError(
                    f"Expected op in `op_list` to be an OpOverload but got: {one} of type {type(one)}. "
                    + (
                        "Please update the OpOverloadPacket to a specific OpOverload.For example, if you have "
                        "`torch.ops.aten.mm`, change it to `torch.ops.aten.mm.default`."
                        if is_packet(one)
                        else ""
                    )
                )
        policy: AnyPolicy = _Listed(tuple(operators))
    elif callable(policy_fn_or_list):
        policy = cast("AnyPolicy", policy_fn_or_list)
    else:
        raise TypeError("policy_fn_or_list must be either a function or a list of ops.")
    selection = Selection(AskedPolicy(policy))
    return SelectiveForward(policy, selection), _SelectiveRecompute(selection)


@dataclass(frozen=True, slots=True)
class _Listed:
    """The policy of a list of operators."""

    operators: tuple[object, ...]
    by_operator = True

    def __call__(self, ctx: OperatorContext, op: object, /, *args: Any, **kwargs: Any) -> Answer:
        return CheckpointPolicy.MUST_SAVE if op in self.operators else CheckpointPolicy.PREFER_RECOMPUTE


class _NoModules:
    """The modules of a block of code, which are unknown."""

    def running(self) -> Iterator[str]:
        return iter(())

    def known(self) -> list[str]:
        return []


class SelectiveForward(AbstractContextManager[None]):
    """The context of the forward."""

    def __init__(self, policy: AnyPolicy, selection: Selection) -> None:
        self.policy = policy
        self._selection = selection
        self._seen: SeenBy | None = None

    def __enter__(self) -> None:
        self._seen = SeenBy(Collecting(self._selection, _NoModules(), preserve_rng=True))
        self._seen.__enter__()

    def __exit__(self, *error: object) -> None:
        assert self._seen is not None
        self._seen.__exit__(*error)
        self._seen = None
        self._selection.settle(everything=True)


class _SelectiveRecompute(AbstractContextManager[None]):
    """The context of a recompute."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._running: list[tuple[ExitStack, Replaying]] = []

    def __enter__(self) -> None:
        run = Replaying(self._selection, takes=current_graph_task() != -1 and not retains_graph())
        with ExitStack() as stack:
            stack.enter_context(PutBack())
            stack.enter_context(SeenBy(run))
            self._running.append((stack.pop_all(), run))

    def __exit__(self, *error: object) -> None:
        stack, run = self._running.pop()
        stack.close()
        run.check("selective checkpoint")
