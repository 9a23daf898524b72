"""Compiled steps within a budget: predicted peaks are the measured ones, gradients are equal, less costs more."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

import torchremat
from compiled import MARKS, net, step
from probes.planning import partitioner_for_inductor, partitioning
from torchremat.errors import BudgetError, CompileWarning

pytestmark = MARKS


def run(model, x, budget, **options):
    """Compile, warm up, and run one measured step: what was split, the peak, the gradients."""
    torch.compiler.reset()
    function = torchremat.compiled(model, budget=budget, backend="aot_eager", **options)
    model.zero_grad()
    function(x).backward()
    peak, gradients = step(function, model, x)
    (partition,) = function.partitions
    return partition, peak, gradients


@pytest.fixture(scope="module")
def runs():
    """The same step under falling budgets, with dropout in it."""
    model, x = net(blocks=3, dropout=0.1)
    return [run(model, x, budget) for budget in ("100%", "75%", "55%")]


def test_the_predicted_peak_is_the_measured_one(runs):
    assert [peak - partition.peak_bytes for partition, peak, _ in runs] == [0, 0, 0]


def test_the_peak_is_within_the_budget(runs):
    assert all(peak <= partition.budget_bytes for partition, peak, _ in runs)
    assert runs[0][1] == runs[0][0].plain_peak_bytes


def test_gradients_do_not_depend_on_the_budget(runs):
    for _, _, gradients in runs[1:]:
        assert all(map(torch.equal, gradients, runs[0][2]))


def test_a_lower_budget_means_a_lower_peak_and_more_recompute(runs):
    partitions = [partition for partition, _, _ in runs]

    assert [one.peak_bytes for one in partitions] == sorted((one.peak_bytes for one in partitions), reverse=True)
    assert [one.recomputed_operators for one in partitions] == sorted(one.recomputed_operators for one in partitions)
    assert partitions[0].recomputed_operators == 0
    assert partitions[-1].recomputed_flops > 0
    assert len({one.peak_bytes for one in partitions}) == 3


def test_an_impossible_budget_says_which_is_possible():
    model, x = net(blocks=2)
    function = torchremat.compiled(model, budget=300_000, backend="aot_eager")

    with pytest.raises(BudgetError, match=r"Smallest budget that works: \d+ bytes") as caught:
        function(x)

    least = int(str(caught.value).split("works: ")[1].split(" ")[0])
    partition, peak, _ = run(model, x, least)
    assert partition.peak_bytes == peak <= least
    with pytest.raises(BudgetError):
        run(model, x, least - 1)


def test_a_margin_is_left_free():
    model, x = net(blocks=2)

    partition, peak, _ = run(model, x, "100%", margin=100_000)

    assert peak <= partition.budget_bytes - 100_000
    assert partition.recomputed_operators > 0


@pytest.mark.parametrize("budget", [0, "a lot", 1.5])
def test_a_budget_that_is_none(budget):
    with pytest.raises(BudgetError):
        torchremat.compiled(nn.Linear(2, 2), budget=budget)


def test_a_cost_that_is_none():
    with pytest.raises(torchremat.UnsupportedError, match="'seconds' and 'flops'"):
        torchremat.compiled(nn.Linear(2, 2), budget="50%", cost="hours")


def test_flops_as_the_cost():
    model, x = net(blocks=2)
    seconds, _, _ = run(model, x, "85%")
    flops, peak, _ = run(model, x, "85%", cost="flops")

    # An activation costs no flops, so it is made again rather than a product of matrices.
    assert flops.recomputed_flops == 0 < seconds.recomputed_flops
    assert flops.recomputed_operators > 0
    assert peak == flops.peak_bytes


def test_a_backend_without_a_hook_compiles_without_a_budget():
    model, x = net(blocks=2)
    with pytest.warns(CompileWarning, match="backend 'eager' has no hook for a partitioner"):
        function = torchremat.compiled(model, budget="50%", backend="eager")

    function(x).backward()

    assert function.partitions == ()
    assert "no hook" in function.reason
    assert str(function).startswith("no budget")


def test_a_torch_without_the_hook(monkeypatch):
    monkeypatch.delattr("torch._functorch.compile_utils.raise_getitems")

    with pytest.warns(CompileWarning, match=r"no `torch\._functorch\.compile_utils\.raise_getitems`"):
        function = torchremat.compiled(nn.Linear(2, 2), budget="50%", backend="aot_eager")

    assert function(torch.ones(1, 2)).shape == (1, 2)


def test_a_backend_of_ones_own():
    model, x = net(blocks=2)
    partitioner = torchremat.PeakPartitioner("75%")
    backend = aot_autograd(fw_compiler=boxed_nop, partition_fn=partitioner)
    function = torch.compile(model, backend=backend)
    function(x).backward()

    peak, _ = step(function, model, x)

    assert peak == partitioner.partitions[0].peak_bytes <= partitioner.partitions[0].budget_bytes


def test_the_partitioner_goes_into_a_backend_that_has_one():
    model, x = net(blocks=2)
    function = torchremat.compiled(model, budget="75%", backend=aot_autograd(fw_compiler=boxed_nop))

    function(x)

    assert len(function.partitions) == 1


def test_buffers_that_the_forward_writes_are_written_once():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Tanh()) for _ in range(4)))
    x = torch.randn(64, 32)
    torch.compiler.reset()
    function = torchremat.compiled(lambda x: model(x).mean(), budget="80%", backend="aot_eager")

    function(x).backward()

    assert function.partitions[0].recomputed_operators > 0
    assert [int(layer[1].num_batches_tracked) for layer in model] == [1, 1, 1, 1]


@pytest.mark.parametrize("autocast", [False, True])
def test_what_kernels_allocate_by_themselves_is_counted(autocast):
    # A convolution brings its weight into another order, and a product in bfloat16 packs its operands: not counted, the
    # peak was 24% above the budget.
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16 * 16, 8))

    def forward(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().mean()

    for budget in ("100%", "85%"):
        torch.compiler.reset()
        function = torchremat.compiled(forward, budget=budget, backend="aot_eager")
        x = torch.randn(8, 8, 16, 16)
        function(x).backward()
        peak, _ = step(function, model, x)

        (partition,) = function.partitions
        assert peak == partition.peak_bytes <= partition.budget_bytes
    assert partition.recomputed_operators > 0


def test_caches_tell_budgets_apart():
    # Inductor's caches pickle the options. What they could not pickle was told on stderr, and nothing was cached.
    def pickled(**options):
        partitioner = torchremat.PeakPartitioner(**options)
        partitioner.partitions.append("what it has split is no part of it")
        return pickle.dumps(partitioner_for_inductor(partitioner, partitioner.uuid))

    assert pickled(budget="50%") == pickled(budget="50%")
    assert len({pickled(budget="50%"), pickled(budget="60%"), pickled(budget="50%", margin=1)}) == 3
    assert pickle.loads(pickled(budget="50%")).uuid() == torchremat.PeakPartitioner("50%").uuid()


def test_caches_tell_versions_of_the_code_apart(monkeypatch):
    # The folder of the schedules was looked for where it is not, so that what they chose came from a cache for ever.
    before = torchremat.PeakPartitioner("50%").uuid()
    read = Path.read_bytes

    def uuid_if_changed(name):
        monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.name == name))
        return torchremat.PeakPartitioner("50%").uuid()

    assert uuid_if_changed("no such file") == before
    # A change in how flops, workspaces or a percentage are counted left the splits that were cached before it.
    names = ("halves.py", "saving.py", "wrappers.py", "flops.py", "allocator.py", "structure.py", "budgets.py")
    assert len({before, *map(uuid_if_changed, names)}) == 1 + len(names)


def test_torchs_splits_under_its_budgets_are_candidates(monkeypatch):
    model, x = net(blocks=3)
    chosen = []
    saver = partitioning.Saver

    def noted(joint, more, **options):
        chosen.extend(more)
        return saver(joint, more, **options)

    monkeypatch.setattr(partitioning, "Saver", noted)
    run(model, x, "70%")

    # Its own without a budget saves most, the others less and less, and none of them changed the graph that was split.
    sizes = [len(saved) for saved in chosen]
    assert len(chosen) == 4
    assert sizes[0] > sizes[-1]


def test_the_report():
    model, x = net(blocks=2)
    function = torchremat.compiled(model, budget="75%", backend="aot_eager")
    assert str(function) == "not compiled yet"

    function(x)

    peak, saved, recomputed, excess = str(function).splitlines()
    assert peak.startswith("peak ") and "(plain: " in peak
    assert saved.startswith("saved ")
    assert recomputed.startswith("recomputed ")
    assert excess.startswith("excess      at most ")
    assert 0 < function.partitions[0].excess < 0.5
