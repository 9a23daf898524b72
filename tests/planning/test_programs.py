"""What Inductor makes of a split is known before a kernel is compiled: peaks are the measured ones, to the byte."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

import torchremat
from compiled import MARKS, NEEDS_COMPILER, fresh, net, step
from torchremat._compat.wrappers import Wrapper
from torchremat.errors import BudgetError, CompileWarning, UnsupportedError
from torchremat.planning.compiling import halves
from torchremat.planning.compiling.programs import Memory, Program
from torchremat.planning.compiling.trials import Trials

pytestmark = MARKS

CPU = torch.device("cpu")
GRAPH = "torch._inductor.graph.GraphLowering"


class Convolutions(nn.Module):
    """What Inductor gives another layout, and copies for it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c_in, 8, 3, padding=1) for c_in in (3, 8))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in self.layers)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.silu(norm(layer(x)))
        return x.mean()


class Attention(nn.Module):
    """An operator of several results, and one whose backward needs workspace; the end reads the beginning."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, 96) for _ in range(2))

    def forward(self, x):
        first = x
        for projection in self.projections:
            q, k, v = projection(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = F.layer_norm(x, (32,))
        return (x * first.sin()).mean()


def convolutions():
    torch.manual_seed(0)
    return Convolutions(), torch.randn(4, 3, 16, 16)


def attention():
    torch.manual_seed(0)
    return Attention(), torch.randn(4, 32, 32)


@pytest.fixture(autouse=True)
def without_caches():
    """What is in a compiler's cache is not split again."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        torch.compiler.reset()
        yield


def least_budget(function, x):
    with pytest.raises(BudgetError) as caught:
        function(x)
    torch.compiler.reset()
    return int(str(caught.value).split("works: ")[1].split(" ")[0])


@NEEDS_COMPILER
@pytest.mark.parametrize("make", [convolutions, attention], ids=["layouts", "attention"])
def test_the_peak_of_what_inductor_runs_is_the_predicted_one_and_its_least_budget_works(make):
    model, x = make()
    least = least_budget(torchremat.compiled(model, budget=1000), x)

    function = torchremat.compiled(model, budget=least)
    function(x).backward()
    peak, gradients = step(function, model, x)

    (partition,) = function.partitions
    assert peak == partition.peak_bytes <= least < partition.plain_peak_bytes
    assert partition.recomputed_operators > 0
    _, plain = step(model, model, x)
    # Kernels that are fused otherwise round otherwise.
    assert all(
        torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6) for ours, theirs in zip(gradients, plain, strict=True)
    )


def split(model, x, budget):
    """Split a step for Inductor, and run the graphs as they are."""
    partitioner = torchremat.PeakPartitioner(budget)
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=partial(partitioner, compiler="inductor"),
        decompositions=select_decomp_table,
    )
    torch.compile(model, backend=backend)(x).backward()
    return partitioner.partitions


@NEEDS_COMPILER
def test_splits_use_the_budget_up():
    # Kernels need less than operators do: by operators alone, the best split for this budget uses 87% of it.
    (partition,) = split(*net(blocks=3), "60%")

    room = partition.budget_bytes - partition.fixed_bytes
    assert 0.92 * room < partition.peak_bytes - partition.fixed_bytes <= room


def unreadable(*_):
    raise UnsupportedError("the program calls another one, inner.")


def test_what_cannot_be_read_is_told_and_operators_count(monkeypatch):
    model, x = net(blocks=2)
    monkeypatch.setattr(halves, "needs_of_programs", unreadable)
    with pytest.warns(CompileWarning, match="calls another one, inner.*leave a margin") as told:
        (partition,) = split(model, x, "70%")

    assert len(told) == 1
    assert partition.peak_bytes <= partition.budget_bytes


@NEEDS_COMPILER
def test_sizes_that_are_symbols_count_as_in_the_first_call(monkeypatch):
    model, x = net(blocks=1)
    torch._dynamo.mark_dynamic(x, 0)

    (dynamic,) = split(model, x, "100%")
    torch.compiler.reset()
    (static,) = split(model, x.clone(), "100%")

    # By operators alone both would be equal as well, and higher: what fuses is never in memory.
    monkeypatch.setattr(halves, "needs_of_programs", unreadable)
    torch.compiler.reset()
    with pytest.warns(CompileWarning):
        (by_operators,) = split(model, x.clone(), "100%")
    assert dynamic.peak_bytes == static.peak_bytes < by_operators.peak_bytes


@NEEDS_COMPILER
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
def test_programs_that_are_only_read_leave_no_trace(monkeypatch, tmp_path):
    # Each left a folder with caches switched off, and kernels that never ran were counted.
    seen = []
    monkeypatch.setattr(f"{GRAPH}.save_output_code", seen.append)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fresh()
    metrics.reset()

    with (
        torch._inductor.config.patch({"trace.enabled": True}),
        torch._dynamo.config.patch(debug_dir_root=str(tmp_path)),
        torch.compiler.config.patch(force_disable_caches=True),
    ):
        split(*net(blocks=1), "100%")

    assert (seen, metrics.generated_kernel_count, counters["inductor"]["extern_calls"]) == ([], 0, 0)
    assert not [*tmp_path.glob("tmp*"), *tmp_path.glob("run_*")]


def test_what_has_taken_the_compilation_over_is_told(monkeypatch):
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", lambda *_, **__: None)

    with pytest.warns(CompileWarning, match="has not offered its program to torchremat.*leave a margin"):
        split(*net(blocks=1), "100%")


# ======================================================================================================================
# Reading a program
# ======================================================================================================================

TENSOR = ([4, 4], [4, 1], torch.float32, CPU)


def program(body, **tensors):
    code = "def call(args):\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return Program(Wrapper(code=code, tensors={"a": TENSOR, **tensors}, hints={"s0": 8}, strides=[None], origins={}))


def test_a_program_that_calls_another_is_refused():
    code = "def inner(args):\n    return args\ndef call(args):\n    b, = inner(args)\n    return (b, )\n"

    with pytest.raises(UnsupportedError, match="calls another one, inner"):
        Program(Wrapper(code=code, tensors={}, hints={}, strides=[None], origins={}))


def test_operators_run_by_themselves_on_zeros_once_each():
    made = program(
        "a, = args\n"
        "b = torch.ops.aten.var_mean.correction(reinterpret_tensor(a, (16, ), (1, ), 0), [0], correction=1.0)\n"
        "c = torch.ops.aten.var_mean.correction(reinterpret_tensor(a, (16, ), (1, ), 0), [0], correction=1.0)\n"
        "extern_kernels.mm(a, a, out=d)\n"
        "cpp_fused_add_0(a, d)\n"
        "return (b[0], d, )",
        d=TENSOR,
    )
    trials = Trials(CPU)

    with trials.recorded():
        made.try_operators(trials)

    assert trials.unknown == {}
    assert sorted(trials.storage_bytes.values()) == [[4, 4], [64]]
    assert sorted(trials.high_bytes.values()) == [0, 8]  # arguments are not counted, nor are results that were given


def test_an_operator_that_fails_on_zeros_is_named():
    made = program("a, = args\nb = torch.ops.aten.reshape.default(a, [3])\nreturn (b, )")
    trials = Trials(CPU)

    with trials.recorded():
        made.try_operators(trials)

    (reason,) = trials.unknown.values()
    assert "shape '[3]' is invalid" in reason


def test_operators_of_others_are_not_run():
    made = program("a, = args\nb = torch.ops.theirs.launch_missiles.default(a)\nreturn (b, )")
    trials = Trials(CPU)

    with trials.recorded():
        made.try_operators(trials)

    assert trials.storage_bytes == trials.unknown == {}


def peak(body, device, block=1, fixed=0, **tensors):
    """The peak of a program whose inputs are its caller's; allocations are multiples of `block`."""
    reading = SimpleNamespace(
        joint=SimpleNamespace(fixed_bytes=fixed),
        device=torch.device(device),
        block=lambda size: -(-size // block) * block,
    )
    memory = Memory(reading, Trials(CPU))
    memory.run(program(body, **tensors), [frozenset()])
    return memory.peak_bytes


def test_a_program_for_cuda_counts_blocks_of_its_allocator_and_nothing_on_the_host():
    body = """\
a, = args
args.clear()
with torch.cuda._DeviceGuard(0):
    torch.cuda.set_device(0)
    b = empty_strided_cuda((4, 4), (4, 1), torch.float32)
    c = empty_strided_cpu((400, ), (1, ), torch.float32)
    stream0 = get_raw_stream(0)
    triton_poi_fused_add_0.run(a, b, 16, stream=stream0)
    d = empty_strided_cuda((s0, 100), (100, 1), torch.bfloat16)
    del b
    e = empty_strided_cuda((1, ), (1, ), torch.float32)
return (d, e, )"""

    assert peak(body, "cuda", block=512, fixed=64) == 64 + 512 + 2048
    assert peak(body, "cpu") == 1600


def test_a_storage_is_there_as_long_as_one_of_its_names():
    body = """\
a, = args
b = empty_strided_cpu((4, 4), (4, 1), torch.float32)
c = reinterpret_tensor(b, (16, ), (1, ), 0); del b
d = empty_strided_cpu((4, 4), (4, 1), torch.float32)
{}
e = empty_strided_cpu((4, 4), (4, 1), torch.float32)
return (e, )"""

    assert peak(body.format("del d"), "cpu") == 128
    assert peak(body.format("c = d; del d"), "cpu") == 128
    assert peak(body.format("cpp_fused_0(c, d)"), "cpu") == 192


@pytest.mark.parametrize(
    "line", ["b = somebodys_allocator(a)", "for i in range(3):\n    b = a", "b, c = self.parts[0](a)"]
)
def test_lines_that_are_not_understood_are_refused(line):
    with pytest.raises(UnsupportedError):
        peak(f"a, = args\n{line}\nreturn (b, )", "cpu", b=TENSOR)
