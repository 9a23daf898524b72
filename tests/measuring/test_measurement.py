"""A measured step: bytes and flops counted by hand, and nothing left behind."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.data import TensorDataset

from logs import Log
from probes.memory import profiler_is_active
from torchremat import measure, wrap
from torchremat.errors import StepError, UnsupportedError

MIB = 2**20


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool):
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Product(torch.autograd.Function):
    """x @ w. Its forward runs with grad mode off, as every custom Function's does."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return Product.apply(x, self.w)


def test_six_linears_with_gelu_by_hand():
    # B = 1024, width 512, float32. A Linear has 512*512 + 512 numbers: 1,050,624 B.
    # Kept: each GELU saves its input (6), each Linear but the first saves the GELU's output before it (5); 2 MiB each,
    # and the loss, 4 B. The last output is not saved by `sum`.
    #
    # By storages the peak is in the first Linear that backward reaches. Live: the loss and its gradient (8 B), 10
    # activations, for the GELU has freed its own, the GELU's gradient, and the Linear's three results: 2 MiB, 1 MiB and
    # 2 KiB. By the allocator it is one step before: all 11 activations, the GELU's gradient, and a copy of the gradient
    # that arrives: `sum` hands on an expanded scalar, and the GELU's kernel makes it 2 MiB of memory.
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())))
    x = torch.randn(1024, 512)

    measured = measure(model, lambda model: model(x).sum())

    assert measured.source == "allocator"
    assert measured.parameter_bytes == 6 * 1_050_624
    assert measured.gradient_bytes == 0
    assert measured.input_bytes == 2 * MIB
    assert measured.buffer_bytes == measured.optimizer_bytes == 0
    assert measured.before_bytes == 6 * 1_050_624 + 2 * MIB
    assert measured.kept_bytes == measured.tracker_kept_bytes == 11 * 2 * MIB + 4
    assert measured.tracker_peak_bytes - measured.before_bytes == 8 + 10 * 2 * MIB + 2 * MIB + 2 * MIB + MIB + 2048
    assert measured.peak_bytes - measured.before_bytes == 8 + 11 * 2 * MIB + 2 * MIB + 2 * MIB
    # Forward 6 products of 2*1024*512*512; backward one for each weight, and one for each input but the first.
    assert measured.flops == (6 + 6 + 5) * 2 * 1024 * 512 * 512
    assert measured.recomputed_flops == 0
    assert measured.seconds > 0
    assert measured.device == torch.device("cpu")
    assert measured.reserved_bytes is None
    assert measured.context_bytes is None


@dataclass
class Graph:
    """A batch in an object."""

    x: torch.Tensor
    more: dict[str, torch.Tensor]


class Slotted:
    """The same without a dict."""

    __slots__ = ("of",)

    def __init__(self, of):
        self.of = of


class Loading:
    """Gives batches, and holds all of them."""

    def __init__(self, x):
        self.x = x

    def __call__(self):
        return self.x[:1]


@pytest.mark.parametrize(
    ("hold", "rows"),
    [
        (lambda x: Graph(x, {}), 8),
        (lambda x: Graph(x[:4].clone(), {"second": x}), 12),
        (lambda x: SimpleNamespace(x=x), 8),
        (lambda x: [Slotted(Slotted(x))], 8),
        (lambda x: SimpleNamespace(x=x, model=nn.Linear(2, 2)), 0),
        (lambda x: SimpleNamespace(x=x, optimizer=torch.optim.SGD([nn.Parameter(x)])), 0),
        (Loading, 0),
        (lambda x: SimpleNamespace(rows=TensorDataset(x)), 0),
    ],
    ids=["dataclass", "nested", "namespace", "slots", "with a model", "with an optimizer", "loader", "dataset"],
)
def test_an_object_of_data_is_an_input_and_one_of_code_is_none(hold, rows):
    x = torch.randn(8, 16)
    held = hold(x)
    model = nn.Linear(16, 16)

    def step(model, held=held):
        return model(torch.ones(1, 16)).sum()

    assert measure(model, step).input_bytes == rows * 16 * 4


def test_the_timeline_of_a_small_step():
    # An activation of (4, 8) is 128 B, the weight and its gradient 256 B. The tanh saves its output.
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
    x = torch.randn(4, 8)

    measured = measure(model, lambda model: model(x).sum())

    line = measured.timeline
    step = (line.live_bytes - measured.before_bytes).tolist()
    moments = [f"{line.phase_at(i)[0]}:{line.module_at(i) or '-'}:{step[i]}" for i in range(len(line))]
    assert " ".join(moments) == (
        # The Linear's output; the tanh's; the first is dropped by Sequential's loop; the loss.
        "f:0:128 f:1:256 f:Sequential:128 f:-:132 "
        # Gradient of the loss; the tanh's, and its output goes; the weight's, which stays; the tanh's goes, and that of
        # the loss. The loss itself belongs to the caller.
        "b:-:136 b:1:264 b:1:136 b:0:392 b:0:264 b:0:260"
    )
    assert line.live_bytes.max() == measured.peak_bytes
    assert line.phase_at(line.peak_at) == "backward"
    assert line.names[0] == ""
    assert (np.diff(line.seconds) >= 0).all()


@pytest.mark.parametrize("x_requires_grad", [False, True])
def test_bytes_before_the_step_by_storage(x_requires_grad: bool):
    # BatchNorm2d(4): weight and bias of 16 B; mean and variance 16 B each, and a counter of 8 B.
    # `tied` is the same storage as the convolution's weight, 4*3*1*1*4 = 48 B. Adam: two tensors for each parameter,
    # and a step of 4 B each.
    conv, norm = nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4)
    model = nn.Sequential(conv, norm)
    model.tied = nn.Parameter(conv.weight.detach().view(-1))
    model.tied.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    x = torch.ones(2, 3, 5, 5, requires_grad=x_requires_grad)
    views = [x[0], x.view(-1)]

    def step(model):
        return (model(x) * len(views)).sum()

    step(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    measured = measure(model, step, optimizer=optimizer, accumulates=True)

    assert measured.parameter_bytes == 48 + 16 + 16
    assert measured.gradient_bytes == 48 + 16 + 16 + (600 if x_requires_grad else 0)
    assert measured.buffer_bytes == 16 + 16 + 8
    assert measured.optimizer_bytes == 2 * (48 + 16 + 16) + 3 * 4
    assert measured.input_bytes == 2 * 3 * 5 * 5 * 4


@pytest.mark.parametrize(
    ("use_reentrant", "early_stop", "recomputed"),
    [(False, True, 1), (False, False, 2), (True, True, 2)],
)
def test_recomputed_flops_of_torchs_checkpoint_by_hand(use_reentrant: bool, early_stop: bool, recomputed: int):
    # Two products of (4, 8) and (8, 8): 2*4*8*8 = 512 flops each. The recompute runs both, except that an early stop
    # leaves before the second: its input is the last tensor that is needed. Backward: two for weights, two for inputs.
    inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)

    with set_checkpoint_early_stop(early_stop):
        measured = measure(Checkpointed(inner, use_reentrant=use_reentrant), lambda model: model(x).sum())

    assert measured.recomputed_flops == recomputed * 512
    assert measured.flops == (2 + 4 + recomputed) * 512


def test_recomputed_flops_of_nested_checkpoints_by_hand():
    # Each inner checkpoint is one product. Backward enters the outer: it runs again, up to the second product's input;
    # then the second inner runs again, and the first. Early stop leaves each inner before its only product.
    first, second = (
        Checkpointed(nn.Sequential(nn.Tanh(), nn.Linear(8, 8, bias=False)), use_reentrant=False) for _ in range(2)
    )
    model = Checkpointed(nn.Sequential(first, second), use_reentrant=False)
    x = torch.randn(4, 8, requires_grad=True)

    measured = measure(model, lambda model: model(x).sum())

    assert measured.recomputed_flops == 512
    assert measured.flops == (2 + 4 + 1) * 512


def test_recomputed_flops_of_a_wrapped_module_by_hand():
    # Its recompute stops before the second product, as above.
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
    x = torch.randn(4, 8, requires_grad=True)

    measured = measure(wrap(nn.Sequential(model), "0"), lambda model: model(x).sum())

    assert measured.recomputed_flops == 512
    assert measured.flops == (2 + 4 + 1) * 512


def test_a_custom_function_in_a_recompute_counts_as_recomputed():
    # Grad mode is off in its forward, in a recompute too; and in every backward.
    model = Checkpointed(nn.Sequential(Custom(), nn.Tanh(), Custom(), nn.Tanh()), use_reentrant=False)
    x = torch.randn(4, 8, requires_grad=True)

    measured = measure(model, lambda model: model(x).sum())

    assert measured.recomputed_flops == 2 * 512
    assert measured.flops == (2 + 4 + 2) * 512


def test_a_plain_step_recomputes_nothing():
    model = nn.Sequential(Custom(), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 8, requires_grad=True)

    with torch.autograd.graph.save_on_cpu():
        measured = measure(model, lambda model: model(x).sum())

    assert measured.recomputed_flops == 0


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def state_of(model: nn.Module) -> list[object]:
    """All that a measurement must leave alone, by identity, value and version."""
    tensors = [*model.parameters(), *model.buffers()]
    hooks = [
        {key: dict(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}
        for module in model.modules()
    ]
    return [
        [(id(t), t._version, t.tolist()) for t in tensors],
        [None if t.grad is None else (id(t.grad), t.grad.tolist()) for t in tensors],
        [module.training for module in model.modules()],
        hooks,
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
    ]


@pytest.mark.parametrize("accumulated", [False, True])
def test_nothing_is_left_behind(accumulated: bool):
    model, losses = network(), Log()
    model[2].eval()
    if accumulated:
        model(torch.randn(8, 4)).sum().backward()
    before = state_of(model)

    def step(model):
        model.train()
        loss = model(torch.randn(8, 4)).sum() + random.random() + np.random.rand()
        losses.append(loss.item())
        return loss

    measure(model, step)

    assert state_of(model) == before
    assert len(losses) == 4
    assert len(set(losses)) == 1


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("where", "call"), [("forward", 1), *((where, call) for where in ("forward", "backward") for call in (2, 3, 4))]
)
def test_nothing_is_left_behind_when_the_step_raises(error: type[BaseException], where: str, call: int):
    model, calls = network(), Log()
    model(torch.randn(8, 4)).sum().backward()
    before = state_of(model)

    def fail(gradient=None):
        if len(calls) == call:
            raise error

    def step(model):
        calls.append(1)
        loss = model(torch.randn(8, 4)).sum()
        if where == "forward":
            fail()
        loss.register_hook(fail)
        return loss

    with pytest.raises(error):
        measure(model, step)

    assert state_of(model) == before
    assert not profiler_is_active()
    assert len(calls) == call


def test_a_step_without_arguments_is_measured_with_the_model_it_holds():
    model, x = nn.Linear(8, 1), torch.randn(4, 8)

    measured = measure(lambda: {"loss": model(x).sum()})

    assert measured.parameter_bytes == 36
    assert measured.input_bytes == 128
    assert "Linear" in measured.timeline.names
    assert model.weight.grad is None


def test_a_step_without_any_module():
    w = torch.randn(8, requires_grad=True)

    measured = measure(lambda: (w * w).sum())

    assert measured.parameter_bytes == measured.gradient_bytes == 0
    assert measured.input_bytes == 32
    assert w.grad is None


@pytest.mark.parametrize(
    ("made", "accumulates", "before_bytes"), [(0, False, 0), (1, False, 36), (0, True, 36), (2, True, 36)]
)
def test_gradients_count_from_where_the_loop_has_them(made, accumulates, before_bytes):
    # A weight of 8 numbers and a bias. All of them were counted before each step.
    model, x = nn.Linear(8, 1), torch.randn(4, 8)

    def step(model):
        return model(x).sum()

    for _ in range(made):
        step(model).backward()
    had = [one.grad for one in model.parameters()]

    measured = measure(model, step, accumulates=accumulates)

    assert measured.gradient_bytes == before_bytes
    assert all(one.grad is grad for one, grad in zip(model.parameters(), had, strict=True))
    # At the end: the gradients, and the loss.
    assert measured.timeline.live_bytes[-1] == 36 + 36 + x.nbytes + 4


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda model: None, "returned None"),
        (lambda model: model(torch.ones(2, 4)).expand(2, 3), r"a loss of shape \(2, 3\)"),
        (lambda model: model(torch.ones(2, 4)).sum().detach(), "does not require grad"),
    ],
)
def test_bad_steps_are_named_and_leave_nothing(step, said: str):
    model = network()
    before = state_of(model)

    with pytest.raises(StepError, match=said):
        measure(model, step)

    assert state_of(model) == before


def test_a_step_that_runs_backward_itself_is_named():
    model = network()

    def step(model):
        loss = model(torch.randn(8, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(StepError, match="the step has run backward itself"):
        measure(model, step)


def test_models_without_values_and_other_devices_are_refused():
    with pytest.raises(StepError, match="on the meta device"):
        measure(nn.Linear(4, 1, device="meta"), lambda model: model(torch.ones(2, 4)).sum())
    with pytest.raises(UnsupportedError, match="not on meta"):
        measure(nn.Linear(4, 1), lambda model: model(torch.ones(2, 4)).sum(), device="meta")


def test_under_a_profiler_the_tracker_measures_alone_and_the_profiler_keeps_its_events():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)

    def step(model):
        return model(x).sum()

    free = measure(model, step)
    with profile(activities=[ProfilerActivity.CPU]) as users:
        torch.ones(3)
        measured = measure(model, step)

    assert measured.source == "tracker"
    assert measured.peak_bytes == measured.tracker_peak_bytes == free.tracker_peak_bytes
    assert measured.kept_bytes == measured.tracker_kept_bytes
    assert measured.timeline.live_bytes.max() == measured.peak_bytes
    assert measured.timeline.module_at(measured.timeline.peak_at) == free.timeline.module_at(free.timeline.peak_at)
    assert any(event.name == "aten::ones" for event in users.events())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_compiled_code_stays_compiled(compiled_before: bool, in_place: bool):
    # dynamo never compiles code again that it has once met under a dispatch mode, and breaks graphs at hooks.
    compiled, ran = Log(), []  # where Lightning has been imported, the model holds its backend, and so this

    def backend(graph, inputs):
        compiled.append(len(graph.graph.nodes))
        return lambda *args: ran.append(1) or graph.forward(*args)

    class Net(nn.Module):  # dynamo does not compile a Sequential in place
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            return self.body(x)

    model = Net()
    torch._dynamo.reset()
    x = torch.randn(4, 8)
    if in_place:
        fast = copy.deepcopy(model)
        fast.compile(backend=backend)
    else:
        fast = torch.compile(model, backend=backend)

    def step(model):
        return model(x).sum()

    if compiled_before:
        step(fast)
    measured = measure(fast, step)
    ran.clear()
    step(fast)

    assert len(compiled) == 1
    assert len(ran) == 1
    assert measured.flops == measure(model, step).flops


def test_a_measurement_reads_as_a_table():
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU())
    x = torch.randn(1024, 512)

    # 3 MiB before the step; in the GELU's backward its input, its gradient, and a copy of the gradient that arrives.
    lines = str(measure(model, lambda model: model(x).sum())).splitlines()

    assert lines[0].split()[:3] == ["peak", "9.00", "MiB"]
    assert lines[0].endswith("(allocator, cpu)")
    assert lines[1] == "  before the step     3.00 MiB  parameters 1.00 MiB, inputs 2.00 MiB"
    assert [line.split("  ")[0].strip() or line.split()[0] for line in lines[3:]] == [
        "kept by forward",
        "time",
        "flops",
    ]


@pytest.mark.gpu
def test_cuda_peaks_are_those_of_torchs_counters():
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU()))).cuda()
    x = torch.randn(1024, 512, device="cuda")

    measured = measure(model, lambda model: model(x).sum())

    # As on the CPU, by storages. Blocks are multiples of 512 B, so the loss and its gradient take 512 B each. Kernels
    # may take workspace of their own on top.
    step = 2 * 512 + 10 * 2 * MIB + 2 * MIB + 2 * MIB + MIB + 2048
    assert measured.source == "cuda"
    assert measured.device.index is not None
    assert measured.kept_bytes == 11 * 2 * MIB + 512
    assert 0 <= measured.peak_bytes - measured.before_bytes - step <= 8 * MIB
    assert measured.timeline.live_bytes.max() == measured.peak_bytes
    assert measured.reserved_bytes is not None
    assert measured.reserved_bytes >= measured.peak_bytes
    assert measured.context_bytes is not None
    assert measured.context_bytes > 0


@pytest.mark.gpu
def test_cuda_leaves_gradients_and_generators():
    model = network().cuda()
    model(torch.randn(8, 4, device="cuda")).sum().backward()
    before, state = state_of(model), torch.cuda.get_rng_state().tolist()

    measure(model, lambda model: model(torch.randn(8, 4, device="cuda")).sum())

    assert state_of(model) == before
    assert torch.cuda.get_rng_state().tolist() == state


def test_following_the_modules_changes_nothing_that_regions_copy():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.register_buffer("table", torch.zeros(1 << 20))

        def forward(self, x):
            return self.body(x) + self.table[0]

    model, x = nn.Sequential(Net(), Net()), torch.randn(4, 8)
    wrap(model, "*")

    def step(model):
        return model(x).sum()

    step(model)  # the first forward of a module is watched, all of its buffers copied
    measured = measure(model, step)

    assert measured.peak_bytes - measured.before_bytes < (1 << 20)
