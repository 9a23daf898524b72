"""What dynamo does not compile, breaks, or compiles again: it has a budget, or a warning says so."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import torchremat
from compiled import MARKS, fresh, net, step
from probes.planning import measured_workspaces
from torchremat.errors import BudgetError, CompileWarning

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _fresh():
    fresh()


def test_each_graph_is_held_to_the_budget():
    model, x = net(blocks=2)

    def broken(x):
        x = model.blocks[0](x)
        torch._dynamo.graph_break()
        return model.head(model.blocks[1](x)).mean()

    function = torchremat.compiled(broken, budget="2.1MiB", backend="aot_eager")
    with pytest.warns(CompileWarning, match="broke into 2 graphs with a backward"):
        function(x).backward()
    function(x)  # warns once

    assert len(function.partitions) == 2
    assert all(one.peak_bytes <= one.budget_bytes for one in function.partitions)
    assert str(function).startswith("graph 0\npeak ")


def test_a_function_that_is_not_compiled():
    # After a break inside of a loop dynamo runs the whole function as it is, and says nothing.
    model, x = net(blocks=2)

    def broken(x):
        for block in model.blocks:
            x = block.down(block.up(x))
            torch._dynamo.graph_break()
        return x.mean()

    function = torchremat.compiled(broken, budget="50%", backend="aot_eager")

    with pytest.warns(CompileWarning, match=r"no part of .*broken was compiled"):
        function(x).backward()
    function(x)  # warns once
    assert function.partitions == ()


def test_a_larger_input_is_split_anew_and_a_smaller_one_is_not():
    # A graph for any size was split for the size with which it was made, so that larger inputs went above the budget.
    model, x = net(blocks=2)
    function = torchremat.compiled(model, budget="80%", backend="aot_eager", dynamic=True)
    peaks, splits = [], []

    for length in (8, 16, 12):
        function(x[:length].clone()).backward()
        peak, _ = step(function, model, x[:length].clone())
        peaks.append(peak)
        splits.append(len(function.partitions))

    assert splits == [1, 2, 2]
    assert peaks[:2] == [one.peak_bytes for one in function.partitions]
    assert all(one.peak_bytes <= one.budget_bytes for one in function.partitions)
    assert peaks[1] > peaks[2] > peaks[0]


def test_too_many_versions_are_an_error():
    # Dynamo would run what comes after them as it is.
    model, x = net(blocks=1)
    function = torchremat.compiled(model, budget="100%", backend="aot_eager", dynamic=False)

    with torch._dynamo.config.patch(recompile_limit=1):
        function(x)
        with pytest.raises(BudgetError, match=r"dynamo has compiled 1 versions .* `torch\._dynamo\.config"):
            function(x[:8])


def test_an_operator_that_is_not_torchs():
    @torch.library.custom_op("torchremat_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    doubled.register_fake(torch.empty_like)
    doubled.register_autograd(lambda _, gradient: 2 * gradient)
    layer = nn.Linear(8, 8)
    function = torchremat.compiled(lambda x: doubled(layer(x)).sum(), budget="100%", backend="aot_eager")

    with pytest.warns(CompileWarning, match=r"not counted \(torchremat_tests.doubled.default: it is not torch's own"):
        function(torch.ones(2, 8)).backward()


def test_kernels_are_measured_by_made_up_calls():
    x = torch.randn(8, 64)
    graph = make_fx(lambda x: torch.native_dropout(x, 0.5, True)[0].relu().t(), tracing_mode="fake")(x)
    before = torch.get_rng_state()

    found = measured_workspaces(graph.graph, torch.device("cpu"))

    # Neither the view nor what takes a result apart is run.
    assert sorted(call.partition("(")[0] for call in found.high_bytes) == [
        "aten.native_dropout.default",
        "aten.relu.default",
    ]
    assert not found.unknown
    assert torch.equal(torch.get_rng_state(), before)
    (relu,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert found.of(relu, 0) == x.nbytes
    assert found.of(relu, x.nbytes) == 0


def test_kernels_are_not_measured_under_a_profiler():
    graph = make_fx(torch.relu, tracing_mode="fake")(torch.randn(8))

    with torch.profiler.profile():
        found = measured_workspaces(graph.graph, torch.device("cpu"))

    assert found.unknown.keys() == {"all operators"}
    assert "a profiler is active" in found.unknown["all operators"]
