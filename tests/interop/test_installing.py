import functools
import sys
import types
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils import checkpoint as torchs

import torchremat
from logs import Log
from regions.comparing import Counted, leaf, same, three
from torchremat import UnsupportedError, install, is_checkpointing, is_recomputing, uninstall
from torchremat.interop import torch_checkpoint as drop_in

NAMES = ("checkpoint", "checkpoint_sequential", "CheckpointFunction", "GraphExecGroup")
TORCHS = {name: getattr(torchs, name) for name in NAMES}


def everything():
    """The globals of every module, by identity."""
    return {
        name: [(key, id(value)) for key, value in vars(module).items()]
        for name, module in list(sys.modules.items())
        # Hypothesis counts there how long collections take.
        if isinstance(module, types.ModuleType) and name != "hypothesis.internal.conjecture.junkdrawer"
    }


class Where:
    """A function that notes where it runs: torch's checkpoint knows nothing of these."""

    def __init__(self, function=three):
        self.function = function
        self.seen = Log()

    def __call__(self, *args):
        self.seen.append("region" if is_checkpointing() else "recompute" if is_recomputing() else "-")
        return self.function(*args)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_torchs_name_runs_our_regions(use_reentrant):
    where = Where()
    x = leaf(3)

    with install():
        assert same(lambda: torchs.checkpoint(where, x, use_reentrant=use_reentrant), lambda: three(x), [x])

    assert where.seen == ["region", "recompute"]


def test_what_was_imported_before_does_so_under_any_name():
    other = types.ModuleType("a_program")
    other.__dict__.update(ckpt=torchs.checkpoint, sequential=torchs.checkpoint_sequential, untouched=three)
    sys.modules["a_program"] = other
    where = Where()

    try:
        with install():
            other.ckpt(where, leaf(3), use_reentrant=False).sum().backward()
            assert other.sequential.__module__ == drop_in.__name__
            assert other.untouched is three
    finally:
        del sys.modules["a_program"]

    assert where.seen == ["region", "recompute"]


def test_off_again_is_exactly_as_before():
    before = everything()

    with install():
        during = everything()

    assert everything() == before
    assert during["torch.utils.checkpoint"] != before["torch.utils.checkpoint"]
    changed = {name for name in before if during[name] != before[name]}
    assert "torch.distributed.algorithms._checkpoint.checkpoint_wrapper" in changed
    assert not any(name.startswith("torchremat") for name in changed)


def test_a_module_that_is_imported_meanwhile_is_put_back_and_ours_are_left_alone():
    other = types.ModuleType("a_program")
    sys.modules["a_program"] = other

    try:
        with install():
            code = (
                "from torch.utils.checkpoint import checkpoint, GraphExecGroup\n"
                "from torchremat.interop.torch_checkpoint import checkpoint as ours"
            )
            exec(code, other.__dict__)
            assert other.checkpoint is not TORCHS["checkpoint"]
    finally:
        del sys.modules["a_program"]
        other_after = dict(vars(other))

    # It had left `sys.modules` before the end in this first part; in the second one it is there.
    assert other_after["ours"] is drop_in.checkpoint
    sys.modules["a_program"] = other
    try:
        with install():
            exec(code, other.__dict__)
        assert other.checkpoint is TORCHS["checkpoint"] and other.GraphExecGroup is TORCHS["GraphExecGroup"]
        assert other.ours is drop_in.checkpoint
    finally:
        del sys.modules["a_program"]


def test_partials_of_torchs_function_call_ours_and_are_put_back():
    bound = functools.partial(torchs.checkpoint, use_reentrant=False)
    bound.note = "kept"
    where = Where()

    with install():
        made_meanwhile = functools.partial(torchs.checkpoint, use_reentrant=True)
        bound(where, leaf(3)).sum().backward()
        assert bound.note == "kept" and bound.keywords == {"use_reentrant": False}

    assert where.seen == ["region", "recompute"]
    assert bound.func is TORCHS["checkpoint"] and bound.note == "kept"
    assert made_meanwhile.func is TORCHS["checkpoint"]


def test_it_takes_effect_without_a_block_until_it_is_undone():
    install()
    try:
        assert torchs.checkpoint is not TORCHS["checkpoint"]
    finally:
        uninstall()

    assert {name: getattr(torchs, name) for name in NAMES} == TORCHS


def test_it_is_counted():
    first = install()
    with install():
        pass
    assert torchs.checkpoint is not TORCHS["checkpoint"]

    with first:
        uninstall()
        assert torchs.checkpoint is TORCHS["checkpoint"]

    assert torchs.checkpoint is TORCHS["checkpoint"]  # the end of a block whose installation is undone undoes nothing


def test_undoing_nothing_is_an_error():
    with pytest.raises(UnsupportedError, match=r"uninstall\(\): the drop-in is not installed"):
        uninstall()


def test_an_exception_in_the_block_undoes_it():
    with pytest.raises(KeyError), install():
        raise KeyError

    assert torchs.checkpoint is TORCHS["checkpoint"]


def test_a_forward_made_while_it_was_on_can_go_backward_later():
    where = Where()
    x = leaf(3)
    with install():
        y = torchs.checkpoint(where, x, use_reentrant=False)

    y.sum().backward()

    assert where.seen == ["region", "recompute"]


def test_groups_are_torchs_for_isinstance():
    with install():
        assert issubclass(torchs.GraphExecGroup, TORCHS["GraphExecGroup"])
        with torchs.GraphExecGroup() as group:
            assert torchs.GraphExecGroup._get_current_group() is group


@pytest.mark.parametrize("implementation", [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
@pytest.mark.parametrize("made", ["before", "meanwhile"])
def test_torchs_checkpoint_wrapper_uses_it(implementation, made):
    block = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.GELU())
    where = Where()
    block.append(_Module(where))
    x = leaf(2, 3)
    wrapped = checkpoint_wrapper(block, implementation) if made == "before" else None

    with install():
        wrapped = wrapped or checkpoint_wrapper(block, implementation)
        where.seen.clear()
        assert same(lambda: wrapped(x), lambda: block(x), [x], [block])

    assert where.seen == ["-", "region", "recompute"]
    assert wrapped.checkpoint_fn.func is TORCHS["checkpoint"]


class _Module(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        return self.where(x)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("enabled", ["before", "meanwhile"])
def test_transformers_gradient_checkpointing_uses_it(use_reentrant, enabled):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
        attention_dropout=0.1,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    where = Where(torch.nn.functional.silu)
    for layer in model.model.layers:
        layer.mlp.act_fn = _Module(where)
    tokens = torch.arange(8).reshape(2, 4)

    def enable():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # that it will have another name
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()

    def gradients():
        model.zero_grad()
        torch.manual_seed(2)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    plain = gradients()
    if enabled == "before":
        enable()
    where.seen.clear()
    with install():
        if enabled == "meanwhile":
            enable()
        ours = gradients()

    assert where.seen == ["region", "region", "recompute", "recompute"]
    assert all(map(torch.equal, ours, plain))
    assert model.model.layers[0]._gradient_checkpointing_func.func is TORCHS["checkpoint"]


@pytest.mark.parametrize(
    "region",
    [
        lambda function, x: torchs.checkpoint(function, x, use_reentrant=False),
        functools.partial(drop_in.checkpoint, use_reentrant=False),
        torchremat.checkpoint,
    ],
    ids=["torch", "drop-in", "torchremat.checkpoint"],
)
def test_in_a_graph_every_name_reaches_torchs_operator(region):
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    x = leaf(3)
    with install():
        compiled = torch.compile(lambda a: region(three, a), backend=backend, fullgraph=True)
        assert same(lambda: compiled(x), lambda: three(x), [x])

    assert len(graphs) == 1 and "tag_activation_checkpoint" in graphs[0]


def test_torchremats_own_checkpoint_is_not_concerned():
    function = Counted(three)
    with install():
        torchremat.checkpoint(function, leaf(3)).sum().backward()

    assert function.calls == 2
