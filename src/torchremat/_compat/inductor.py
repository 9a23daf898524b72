"""How torch's compilers split the joint graph of a forward and its backward, and their hooks for replacing that split.

Nothing is bound before it is needed: importing dynamo or Inductor takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from torchremat.errors import BudgetError, TorchrematError, UnsupportedError, VersionError

# (joint graph, its inputs, num_fwd_outputs=..., ...) -> (forward, backward)
PartitionFunction = Callable[..., tuple[GraphModule, GraphModule]]

_PARTITIONERS = "torch._functorch.partitioners"


def bound(module: str, name: str) -> Any:
    """Return the attribute of a torch module with a given name.

    Raises:
        VersionError: The module, or the name in it, does not exist.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise VersionError(
            f"torch {torch.__version__} has no `{module}.{name}`, which bounding the peak of a compiled model needs."
        ) from None


def torch_partition(joint: GraphModule, inputs: Sequence[object], **options: object) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph as torch does without a budget; the joint graph is tidied in place."""
    return bound(_PARTITIONERS, "min_cut_rematerialization_partition")(joint, inputs, **options)


def torch_partition_of_share(
    share: float, joint: GraphModule, inputs: Sequence[object], **options: object
) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph as torch does if it may save a share of its usual saves; it is tidied in place."""
    with bound("torch._functorch", "config").patch(activation_memory_budget=share):
        return torch_partition(joint, inputs, **options)


def copied(joint: GraphModule) -> GraphModule:
    """Return a copy of a joint graph, which partitioners may tidy without changing the original.

    A deep copy would copy the function's calling convention as well, for which torch has a warning.
    """
    graph = Graph()
    returned = graph.graph_copy(joint.graph, val_map={}, return_output_node=True)
    result, before = cast("tuple[Any, Node]", returned)
    graph.output(result).meta = dict(before.meta)
    return GraphModule(joint, graph)


def partition_saving(joint: GraphModule, saved: list[Node], num_fwd_outputs: int) -> tuple[GraphModule, GraphModule]:
    """Split a joint graph so that the given nodes are saved; the backward recomputes everything else it needs, late.

    Args:
        joint: As `torch_partition` has left it.
        saved: Nodes that are tensors. Inputs and sizes are saved where the backward reads them.
        num_fwd_outputs: How many of the outputs are the forward's.
    """
    is_size = bound(_PARTITIONERS, "is_sym_node")
    inputs = [node for node in joint.graph.find_nodes(op="placeholder") if not is_incoming(node)]
    sizes = [node for node in joint.graph.nodes if is_size(node) and not any(map(is_incoming, node.all_input_nodes))]
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    forward, backward = bound(_PARTITIONERS, "_extract_fwd_bwd_modules")(
        joint, [*tensors, *saved], saved_sym_nodes=sizes, num_fwd_outputs=num_fwd_outputs
    )
    backward = bound(_PARTITIONERS, "reordering_to_mimic_autograd_engine")(backward)
    raise_getitems = bound("torch._functorch.compile_utils", "raise_getitems")
    thread = bound(_PARTITIONERS, "thread_graphsafe_rng_from_hops")
    return (thread(raise_getitems(forward), is_backward=False), thread(raise_getitems(backward), is_backward=True))


def is_incoming(node: Node) -> bool:
    """Return whether a node is an incoming gradient of the backward."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def must_be_in_backward(node: Node) -> bool:
    """Return whether a node belongs to the backward though it may read no gradient: it writes to an input there."""
    return bool(bound(_PARTITIONERS, "_must_be_in_backward")(node))


def optimizes_kernels(options: dict[str, object]) -> bool:
    """Return whether Inductor asks for a partition; Inductor fuses recomputed nodes with their readers."""
    return options.get("compiler") == "inductor"


def known(size: object) -> int:
    """Return the value of a number that may be a symbol; for a symbol, its value when the graph was made."""
    hint = getattr(getattr(size, "node", None), "hint", None)
    return int(cast("int", size if hint is None else hint))


def never_larger(joint: GraphModule) -> None:
    """Keep the graphs made from a joint graph from being used for a size larger than it was made for.

    Comparing a symbol creates a guard on the result, and dynamo makes another graph where the guard fails.
    """
    for node in joint.graph.find_nodes(op="placeholder"):
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            bool(size <= known(size))


# NOTE [ Where a partitioner can be put in ]
#
#     backend               by
#     "inductor"            `torch._inductor.config.custom_partitioner_fn`, as an option of torch.compile
#     "aot_eager"           `aot_autograd(partition_fn=...)`, with the same compilers that torch gives this backend
#     an `AotAutograd`      the same, with its own compilers
#     others                nowhere: they take a name or a callable that makes both graphs itself


def compile_arguments(
    backend: object,
    partition: PartitionFunction,
    key: Callable[[], object],
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the arguments for `torch.compile` with which a partition function splits the joint graphs.

    Args:
        backend: The requested backend.
        partition: The partition function.
        key: Distinguishes this partition function from others, for caches.
        mode: The mode of Inductor, which stands for some options.
        options: Further options of Inductor.

    Raises:
        UnsupportedError: Inductor has no such mode.
        VersionError: This torch has no hook for a partitioner in that backend, or the backend has none.
    """
    # See NOTE [ Where a partitioner can be put in ]
    for name in ("_extract_fwd_bwd_modules", "reordering_to_mimic_autograd_engine", "thread_graphsafe_rng_from_hops"):
        bound(_PARTITIONERS, name)
    bound("torch._functorch.compile_utils", "raise_getitems")
    if backend == "inductor":
        bound("torch._inductor.config", "custom_partitioner_fn")
        modes: dict[str, dict[str, object]] = bound("torch._inductor", "list_mode_options")()
        if mode is not None and mode not in modes:
            raise UnsupportedError(f"mode={mode!r}: Inductor has {', '.join(map(repr, modes))}.")
        return {
            "backend": "inductor",
            "options": {
                # Else unneeded memory is kept until a buffer of its size is allocated, however much later.
                "allow_buffer_reuse": False,
                **({} if mode is None else modes[mode]),
                **(options or {}),
                "custom_partitioner_fn": partitioner_for_inductor(partition, key),
            },
        }
    made = bound("torch._dynamo.backends.common", "AotAutograd")
    if isinstance(backend, made):
        return {"backend": made(**{**cast("Any", backend).kwargs, "partition_fn": partition})}
    if backend == "aot_eager":
        compiler = bound("torch._dynamo.backends.debugging", "boxed_nop")
        return {
            "backend": made(
                fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, keep_inference_input_mutations=True
            )
        }
    raise VersionError(
        f"the backend {backend!r} has no hook for a partitioner; `inductor`, `aot_eager` and backends that "
        "`torch._dynamo.backends.common.aot_autograd` makes have one."
    )


def partitioner_for_inductor(partition: PartitionFunction, key: Callable[[], object]) -> object:
    """Return a partition function in the form that Inductor takes. Its caches pickle it with all other options."""
    base = bound("torch._inductor.custom_graph_pass", "CustomPartitionerFn")
    methods = {
        "__call__": lambda _, *args, **options: partition(*args, **options),
        "uuid": lambda _: key(),
        "__reduce__": lambda _: (partitioner_for_inductor, (partition, key)),
        # A copy of the options is for the same function, which remembers its earlier splits.
        "__deepcopy__": lambda self, _: self,
    }
    return type("PeakPartition", (base,), methods)()


def graphs_compiled() -> int:
    """Return how many graphs dynamo has given to backends, or taken from caches, in this process."""
    return bound("torch._dynamo.utils", "counters")["stats"]["unique_graphs"]


@contextmanager
def never_uncompiled() -> Generator[None]:
    """Raise an error in the block where dynamo would give up and run a function uncompiled: after too many versions.

    Raises:
        BudgetError: Dynamo would have given up.
    """
    limit = bound("torch._dynamo.exc", "FailOnRecompileLimitHit")
    config = bound("torch._dynamo", "config")
    try:
        with config.patch(fail_on_recompile_limit_hit=True):
            yield
    except limit:
        raise BudgetError(
            f"dynamo has compiled {config.recompile_limit} versions of one function, and would run the next one "
            "uncompiled, without a budget. Give it its largest inputs first, compile with dynamic=True, or raise "
            "`torch._dynamo.config.recompile_limit`. TORCH_LOGS=recompiles logs the reason for each."
        ) from None


def own_error(error: BaseException) -> TorchrematError | None:
    """Return our own error that a compiler wrapped, if it is one."""
    seen: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in seen:
        if isinstance(current, TorchrematError):
            return current
        seen.append(current)
        inner = getattr(current, "inner_exception", None)
        current = inner if isinstance(inner, BaseException) else current.__cause__
    return None
