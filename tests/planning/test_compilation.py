"""What dynamo does not compile, breaks, or compiles again: it has a budget, or a warning says so."""

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.fx.experimental.proxy_tensor import make_fx

import torchremat
from compiled import MARKS, NEEDS_COMPILER, fresh, net, step
from probes.planning import measured_workspaces
from torchremat.errors import BudgetError, CompileWarning, UnsupportedError

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


def test_the_smallest_budget():
    model, x = net(blocks=3)
    plain = [one.clone() for one in step(torch.compile(model, backend="aot_eager"), model, x)[1]]
    function = torchremat.compiled(model, budget="min", backend="aot_eager")
    function(x)  # kernels are measured where no profiler is on
    peak, gradients = step(function, model, x)
    (made,) = function.partitions

    assert made.peak_bytes == made.budget_bytes == peak < made.plain_peak_bytes
    assert all(map(torch.equal, gradients, plain))
    fresh()
    with pytest.raises(BudgetError, match=f"Smallest budget that works: {made.peak_bytes} bytes"):
        torchremat.compiled(model, budget=made.peak_bytes - 1, backend="aot_eager")(x)
    fresh()
    with_margin = torchremat.compiled(model, budget="min", margin="1KiB", backend="aot_eager")
    with_margin(x)
    assert with_margin.partitions[0].budget_bytes == made.budget_bytes + 1024


def test_a_compiled_module_is_a_module():
    # It was an object that only could be called: no optimizer, no checkpoint and no trainer took it.
    model, x = net(blocks=2)
    model.purpose = "a test"
    compiled = torchremat.compiled(model, budget="80%", backend="aot_eager")
    torchs = torch.compile(model, backend="aot_eager")

    assert isinstance(compiled, nn.Module)
    assert list(compiled.state_dict()) == list(torchs.state_dict())
    assert list(map(id, compiled.parameters())) == list(map(id, model.parameters()))
    assert compiled.original is model
    assert compiled.purpose == "a test"
    assert not compiled.eval().training
    assert not model.training
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        compiled.nothing_of_the_kind  # noqa: B018

    seen = []
    compiled.train().register_forward_hook(lambda *_: seen.append(1))
    before = [one.clone() for one in model.parameters()]
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    compiled(x).backward()
    optimizer.step()

    assert seen == [1]
    assert len(compiled.partitions) == 1
    assert compiled.partitions[0].peak_bytes <= compiled.partitions[0].budget_bytes
    assert not any(map(torch.equal, before, model.parameters()))


def test_a_compiled_module_in_a_plan_is_one_unit():
    model, x = net(blocks=2)
    compiled = torchremat.compiled(model.blocks[0], budget="min", backend="aot_eager")
    whole = nn.Sequential(compiled, nn.Linear(32, 1))

    # What the rehearsals of a plan change on modules is put back: it was told again that nothing had been compiled.
    units = torchremat.Planner(whole, lambda model: model(x).mean(), cost="flops").profile.units.units

    assert [unit.name for unit in units] == ["0", "1"]
    assert len(compiled.partitions) == 1


@NEEDS_COMPILER
def test_modes_and_options_of_inductor():
    model, x = net(blocks=2)
    seen = []

    def note(_):
        seen.append((config.triton.cudagraphs, config.epilogue_fusion, config.allow_buffer_reuse))

    options = {"epilogue_fusion": False, "post_grad_custom_pre_pass": note}
    function = torchremat.compiled(model, budget="min", mode="reduce-overhead", options=options)
    function(x).backward()

    assert set(seen) == {(True, False, False)}
    assert function.partitions[0].peak_bytes <= function.partitions[0].budget_bytes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"backend": "aot_eager", "mode": "max-autotune"}, "are Inductor's, and the backend is 'aot_eager'"),
        ({"backend": "aot_eager", "options": {}}, "are Inductor's, and the backend is 'aot_eager'"),
        ({"mode": "fastest"}, "mode='fastest': Inductor has 'default'"),
    ],
)
def test_modes_and_options_that_cannot_be(given, said):
    with pytest.raises(UnsupportedError, match=said):
        torchremat.compiled(nn.Linear(2, 2), budget="1GB", **given)


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
