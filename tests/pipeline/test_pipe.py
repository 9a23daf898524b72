"""A sequence of layers on several devices of one process."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from weakref import WeakSet, ref

import pytest
import torch
from torch import Tensor, nn

import torchremat
from logs import Count, Log
from pipeline.layered import Noted, equal, gradients, layers, nodes, plainly
from probes.pipelines import CpuStream, copying
from probes.regions import current_graph_task
from torchremat import Pipe, PipelineError, PlanError, UnsupportedError
from turns import in_turn

CPUS = ["cpu"] * 8
MODES = ["always", "except_last", "never"]


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("mode", MODES)
@in_turn("chunks", range(1, 9))
def test_gradients_are_those_of_the_plain_model(mode, chunks):
    plain = layers()
    pipe = Pipe(copy.deepcopy(plain), [1, 2, 1], devices=CPUS, chunks=chunks, checkpoint=mode)
    x, y = torch.rand(8, 4).requires_grad_(), torch.rand(8, 4)
    z = x.detach().clone().requires_grad_()

    expected, found = plainly(plain, x, chunks), pipe(z)
    nn.functional.mse_loss(expected, y).backward()
    nn.functional.mse_loss(found, y).backward()

    assert torch.equal(found, expected)
    assert equal(gradients(pipe), gradients(plain))
    assert torch.equal(z.grad, x.grad)


@pytest.mark.parametrize(("mode", "recomputed"), [("always", 3), ("except_last", 2), ("never", 0)])
def test_each_cell_that_is_checkpointed_is_recomputed_once(mode, recomputed):
    log = Log()
    pipe = Pipe(nn.Sequential(Noted("0", log), Noted("1", log)), [1, 1], devices=CPUS, chunks=3, checkpoint=mode)

    pipe(torch.rand(3, 4).requires_grad_()).sum().backward()

    for stage in "01":
        assert log.count("F" + stage) == log.count("B" + stage) == 3
        assert log.count("R" + stage) == recomputed


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_backward_goes_through_the_clocks_the_other_way_around(requires_grad, is_late):
    # Late in a training, when the caller's thread has made more nodes than a worker, all recomputes of a stage whose
    # input requires no grad ran and were held before any of its backwards; and early, the caller's nodes came last, and
    # the clocks were not gone through one by one.
    log = Log()
    module = nn.Sequential(nn.Sequential(nn.Linear(4, 4), Noted("0", log)), Noted("1", log))
    pipe = Pipe(module, [1, 1], devices=CPUS, chunks=3, checkpoint="always")

    def step() -> None:
        if is_late:
            one = torch.ones(1, requires_grad=True)
            for _ in range(1000):
                one * 1
        pipe(torch.rand(3, 4, requires_grad=requires_grad)).sum().backward()

    thread = threading.Thread(target=step)
    thread.start()
    thread.join()

    assert " ".join(log) == "F0 F0 F1 F0 F1 F1 R1 B1 R1 B1 R0 B0 R1 B1 R0 B0 R0 B0"


def test_a_recompute_does_not_wait_for_the_gradient(monkeypatch):
    log = Log()
    module = nn.Sequential(Noted("0", log), Noted("1", log))
    pipe = Pipe(module, [1, 1], devices=CPUS, checkpoint="always")
    loss = pipe(torch.rand(2, 4).requires_grad_()).sum()
    monkeypatch.setattr(copying, "wait_stream", lambda waiting, awaited: log.append("W"))

    loss.backward()

    # The copy of the gradient waits for stage 1, and stage 0 for the copy.
    assert " ".join(log) == "F0 F1 R1 B1 W R0 W B0"


@pytest.mark.parametrize("mode", MODES)
def test_dropout_is_that_of_the_forward(mode):
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)) for _ in range(4)))
    found = []
    for one in ("never", mode):
        pipe = Pipe(copy.deepcopy(module), [2, 2], devices=CPUS, chunks=4, checkpoint=one)
        torch.manual_seed(1)
        pipe(torch.ones(8, 8)).square().sum().backward()
        found.append(gradients(pipe))

    assert equal(*found)


@pytest.mark.parametrize("mode", MODES)
def test_a_second_backward_is_like_the_first(mode):
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2, checkpoint=mode)
    loss = pipe(torch.rand(4, 4)).square().sum()

    loss.backward(retain_graph=True)
    first = [one.clone() for one in gradients(pipe)]
    pipe.zero_grad()
    loss.backward()

    assert equal(gradients(pipe), first)


def test_second_derivatives_are_those_of_the_plain_model():
    plain = layers().double()
    pipe = Pipe(copy.deepcopy(plain), [2, 2], devices=CPUS, chunks=2, checkpoint="always")
    x = torch.rand(4, 4, dtype=torch.float64)
    found = []
    for run in (pipe, lambda x: plainly(plain, x, 2)):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(run(given).square().sum(), given, create_graph=True)
        first.square().sum().backward()
        found.append(given.grad)

    assert torch.equal(*found)
    assert equal(gradients(pipe), gradients(plain))


class Several(nn.Module):
    """Values of several kinds in several places, the first of which never requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, object]) -> dict[str, object]:
        x, rest = given["x"], given["rest"]
        return {
            "count": torch.arange(len(x)),
            "noise": x.detach() * 2,
            "x": self.linear(x),
            "rest": (*rest, self.linear(x).tanh()),
            "flag": given["flag"],
            "nothing": None,
        }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("used", ["x", 0, 1, 2], ids=str)
def test_a_loss_on_any_output(mode, used):
    torch.manual_seed(0)
    plain = nn.Sequential(Several(), Several(), Several())
    pipe = Pipe(copy.deepcopy(plain), [1, 1, 1], devices=CPUS, chunks=2, checkpoint=mode)
    x = torch.rand(4, 4)

    found = pipe({"x": x, "rest": (), "flag": "words"})
    parts = [plain({"x": one, "rest": (), "flag": "words"}) for one in x.chunk(2)]
    pick = (lambda value: value["x"]) if used == "x" else (lambda value: value["rest"][used])
    pick(found).square().sum().backward()
    torch.cat([pick(one) for one in parts]).square().sum().backward()

    assert found["count"].tolist() == [0, 1, 0, 1]
    assert not found["noise"].requires_grad
    assert found["flag"] == "words"
    assert found["nothing"] is None
    assert equal(gradients(pipe), gradients(plain))


def test_inputs_of_several_kinds():
    class Sum(nn.Module):
        def forward(self, given):
            first, *others = given
            return (first + sum(others[:-1]), *others)

    pipe = Pipe(nn.Sequential(Sum(), Sum()), [1, 1], devices=CPUS, chunks=2)

    first, second, scale = pipe((torch.ones(4, 2), 2 * torch.ones(4, 2), 3))

    assert torch.equal(first, 5 * torch.ones(4, 2))
    assert torch.equal(second, 2 * torch.ones(4, 2))
    assert scale == 3


@pytest.mark.parametrize("mode", MODES)
def test_writes_in_place_have_the_right_gradient_or_raise(mode):
    class Writes(nn.Module):
        def __init__(self, in_place: bool) -> None:
            super().__init__()
            self.in_place = in_place
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x.relu_() if self.in_place else x.relu()
            return self.linear(x)

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Writes(False), Writes(False))
    written = nn.Sequential(nn.Linear(4, 4), Writes(True), Writes(True))
    written.load_state_dict(plain.state_dict())
    pipe = Pipe(written, [1, 1, 1], devices=CPUS, chunks=2, checkpoint=mode)
    x = torch.randn(4, 4)
    plainly(plain, x, 2).sum().backward()

    if mode == "never":
        pipe(x).sum().backward()
        assert equal(gradients(pipe), gradients(plain))
    else:  # the input of a stage that writes to it is gone, and a recompute needs it
        with pytest.raises(torchremat.MutationError, match="in place"):
            pipe(x).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_a_write_to_one_of_two_inputs_that_share_memory_is_refused(mode):
    # The nodes between stages hide from autograd that one is a view of the other: gradients were wrong in silence.
    class Splits(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = super().forward(x)
            return y, y.view(-1, 4)

    class Writes(nn.Linear):
        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            one, other = given
            return super().forward(one) + other.mul_(2)

    pipe = Pipe(nn.Sequential(Splits(4, 4), Writes(4, 4)), [1, 1], devices=CPUS, chunks=2, checkpoint=mode)

    with pytest.raises(torchremat.MutationError, match="2 tensors that share memory"):
        pipe(torch.rand(4, 4))


# ------------------------------------------------------------------------------------------------------ microbatches


@pytest.mark.parametrize(("mode", "expected"), [("always", 2), ("except_last", 1), ("never", 0)])
def test_a_short_batch_checkpoints_what_the_mode_means(mode, expected):
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=CPUS, chunks=4, checkpoint=mode)

    output = pipe(torch.rand(2, 1))

    assert nodes(output).count("RecomputeBackward") == expected


def test_in_eval_mode_nothing_is_checkpointed():
    pipe = Pipe(nn.Sequential(nn.Linear(1, 1)), [1], devices=CPUS, chunks=2, checkpoint="always")

    assert nodes(pipe(torch.rand(2, 1))).count("RecomputeBackward") == 2
    assert nodes(pipe.eval()(torch.rand(2, 1))).count("RecomputeBackward") == 0


def test_without_grad_there_is_no_graph():
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2, checkpoint="always")

    with torch.no_grad():
        assert pipe(torch.rand(4, 4)).grad_fn is None
    with torch.inference_mode():
        assert pipe(torch.rand(4, 4)).is_inference()


def test_layers_that_are_frozen_are_not_recomputed():
    log = Log()
    module = nn.Sequential(Noted("0", log), Noted("1", log))
    module[0].requires_grad_(False)
    pipe = Pipe(module, [1, 1], devices=CPUS, chunks=2, checkpoint="always")

    pipe(torch.rand(2, 4)).sum().backward()

    assert log.count("R0") == 0
    assert log.count("R1") == 2


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((torch.rand(8, 4), torch.rand(3, 4)), r"\[8, 3\] rows"),
        (torch.tensor(1.0), "no dimension"),
        ("words", "at least one tensor"),
        ((torch.rand(2, 2), torch.eye(2).to_sparse()), r"tensors \[1\] of 2 are sparse or nested"),
    ],
)
def test_an_input_that_cannot_be_cut_is_refused(value, words):
    with pytest.raises(PipelineError, match=words):
        Pipe(layers(), [2, 2], devices=CPUS, chunks=2)(value)


def test_a_scalar_loss_inside_the_pipe_is_refused():
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    with pytest.raises(PipelineError, match="Compute a mean or a loss after the pipe"):
        Pipe(nn.Sequential(nn.Linear(4, 4), Mean()), [1, 1], devices=CPUS, chunks=2)(torch.rand(4, 4))


# -------------------------------------------------------------------------------------------- what surrounds the call


WORD = ContextVar("WORD", default="none")


class Surrounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.seen = Log()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        self.seen.append((torchremat.is_recomputing(), y.dtype, WORD.get(), *modes))
        return y.float().square()  # saved after that, so that a recompute gets here


def test_autocast_and_context_reach_workers_and_recomputes():
    layer = Surrounded()
    pipe = Pipe(nn.Sequential(layer), [1], devices=CPUS, chunks=1, checkpoint="always")
    WORD.set("word")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = pipe(torch.rand(2, 4)).sum()
    WORD.set("other")

    loss.backward()

    assert layer.seen == [(again, torch.bfloat16, "word", False, True) for again in (False, True)]


def test_inference_and_grad_mode_reach_the_workers():
    layer = Surrounded()
    pipe = Pipe(nn.Sequential(layer), [1], devices=CPUS, checkpoint="always")
    with torch.inference_mode():
        pipe(torch.rand(2, 4))
    with torch.no_grad():
        pipe(torch.rand(2, 4))

    assert [one[3:] for one in layer.seen] == [(True, False), (False, False)]


def test_offload_around_a_pipe_has_its_saved_tensors():
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2, checkpoint="never")
    plain = copy.deepcopy(pipe)
    x = torch.rand(4, 4)
    with torchremat.offload(torchremat.Host(), min_bytes=1) as offload:
        loss = pipe(x).sum()
    loss.backward()
    plain(x).sum().backward()

    assert offload.copied_out_bytes > 0
    assert equal(gradients(pipe), gradients(plain))


def test_a_pipe_in_a_region_is_refused():
    pipe = Pipe(layers(), [2, 2], devices=CPUS)

    with pytest.raises(UnsupportedError, match="Pipe recomputes by itself"):
        torchremat.checkpoint(pipe, torch.rand(2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_under_transforms_it_is_refused(mode):
    pipe = Pipe(layers(), [2, 2], devices=CPUS, checkpoint=mode)

    with pytest.raises(UnsupportedError, match=r"under torch\.func"):
        torch.func.grad(lambda x: pipe(x).sum())(torch.rand(2, 4))
    with pytest.raises(UnsupportedError, match=r"under torch\.func"), torch.no_grad():
        torch.func.vmap(pipe)(torch.rand(3, 2, 4))


def test_a_compiled_pipe_runs_as_it_is():
    # Dynamo went into the pipe, and warned of what it met there.
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2, checkpoint="always")
    plain = copy.deepcopy(pipe)
    x = torch.rand(4, 4)

    torch.compile(pipe, backend="aot_eager")(x).sum().backward()
    plain(x).sum().backward()

    assert equal(gradients(pipe), gradients(plain))


def test_several_threads_may_use_one_pipe_at_first():
    # Two first calls at the same time made streams for more devices than there are.
    for _ in range(20):
        pipe = Pipe(layers(), [1] * 4, devices=CPUS, chunks=4)
        with ThreadPoolExecutor(4) as executor:
            outputs = list(executor.map(pipe, [torch.ones(4, 4)] * 4))
        assert all(torch.equal(one, outputs[0]) for one in outputs)


def test_only_the_last_step_is_recorded():
    # Batches whose backwards come later than the next forward were counted as a part of the last step.
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2, checkpoint="always", record=True)
    (pipe(torch.rand(4, 4)).sum() + pipe(torch.rand(4, 4)).sum()).backward()

    kinds = [event.kind for event in pipe.timeline().events]
    assert [kinds.count(kind) for kind in ("forward", "copy", "recompute", "backward")] == [4, 4, 4, 4]


def test_a_step_that_fails_at_its_end_leaves_no_statistics():
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    pipe = Pipe(nn.Sequential(nn.BatchNorm1d(4), Mean()), [1, 1], devices=CPUS, chunks=2, deferred_batch_norm=True)
    with pytest.raises(PipelineError, match="has no dimension"):
        pipe(torch.rand(4, 4))

    assert pipe[0].num_batches_tracked == pipe[0].microbatches == 0


def test_a_session_spans_two_backwards_of_a_pipe():
    log = Log()
    pipe = Pipe(nn.Sequential(Noted("0", log), Noted("1", log)), [1, 1], devices=CPUS, chunks=2, checkpoint="always")
    with torchremat.session():
        loss = pipe(torch.rand(2, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    assert log.count("R0") == log.count("R1") == 2


# ------------------------------------------------------------------------------------------------------------ faults


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if "torchremat.Pipe" in one.name]


class Fails(nn.Module):
    """Raises in some run of the layer."""

    def __init__(self, run: int, error: type[BaseException]) -> None:
        super().__init__()
        self.run, self.error, self.runs = run, error, Count()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.runs.up()
        if self.runs.value == self.run:
            raise self.error("on purpose")
        return self.linear(x).tanh()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("number", range(3))
def test_an_error_in_any_cell_arrives_with_its_place_and_leaves_nothing(stage, number, error):
    module = nn.Sequential(*(Fails(number + 1 if one == stage else 99, error) for one in range(3)))
    pipe = Pipe(module, [1, 1, 1], devices=CPUS, chunks=3, checkpoint="always")
    alive: WeakSet[Tensor] = WeakSet()
    for layer in module:
        layer.register_forward_hook(lambda layer, given, output: alive.add(output))

    with pytest.raises(error, match="on purpose") as caught:
        pipe(torch.rand(3, 4))

    assert caught.value.__notes__ == [
        f"This was raised in the forward of stage {stage}, microbatch {number} of a pipe."
    ]
    frames = [entry.name for entry in caught.traceback]
    assert frames[-1] == "forward"
    assert threads() == []
    del caught
    assert len(alive) == 0
    for layer in module:
        layer.run = 99
    pipe(torch.rand(3, 4)).sum().backward()  # it works again


@pytest.mark.usefixtures("no_collector")
def test_an_error_is_gone_with_its_tensors_without_the_cycle_collector():
    held = []

    class Holds(Fails):
        def forward(self, x: Tensor) -> Tensor:
            held.append(ref(x))
            return super().forward(x)

    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), Holds(2, ValueError)), [1, 1], devices=CPUS, chunks=3)
    with pytest.raises(ValueError, match="on purpose") as caught:
        pipe(torch.rand(3, 4))
    del caught
    assert [one() for one in held] == [None, None]


def test_an_error_stops_later_clocks():
    log = Log()
    module = nn.Sequential(Fails(1, ValueError), Noted("1", log))
    module[0].register_forward_pre_hook(lambda *_: log.append("F0"))

    with pytest.raises(ValueError, match="on purpose"):
        Pipe(module, [1, 1], devices=CPUS, chunks=3)(torch.rand(3, 4))

    assert log == ["F0"]


@pytest.mark.parametrize("number", range(2))
def test_an_error_in_a_recompute_arrives(number):
    module = nn.Sequential(Fails(3 + number, ValueError), Fails(99, ValueError))
    pipe = Pipe(module, [1, 1], devices=CPUS, chunks=2, checkpoint="always")
    loss = pipe(torch.rand(2, 4)).sum()

    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()

    assert threads() == []


def test_nothing_is_left_when_a_graph_is_dropped():
    alive: WeakSet[Tensor] = WeakSet()
    module = layers()
    for layer in module:
        layer.register_forward_hook(lambda layer, given, output: alive.add(output))
    pipe = Pipe(module, [2, 2], devices=CPUS, chunks=2, checkpoint="except_last")

    loss = pipe(torch.rand(4, 4)).sum()
    assert len(alive) > 0
    del loss

    assert len(alive) == 0
    assert threads() == []


# -------------------------------------------------------------------------------------------------------- the module


def test_it_is_like_the_sequence():
    module = layers(4)
    pipe = Pipe(module, [1, 3], devices=CPUS)

    assert len(pipe) == 4
    assert list(pipe) == list(module)
    assert pipe[0] is module[0]
    assert pipe[-1] is module[3]
    with pytest.raises(IndexError):
        pipe[4]
    assert sorted(pipe.state_dict())[:2] == ["partitions.0.0.0.bias", "partitions.0.0.0.weight"]
    assert "partitions.1.3.0.weight" in pipe.state_dict()


def test_names_of_layers_stay():
    module = nn.Sequential()
    module.add_module("first", nn.Linear(1, 1))
    module.add_module("second", nn.Linear(1, 1))

    assert "partitions.1.second.bias" in Pipe(module, [1, 1], devices=CPUS).state_dict()


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe))], ids=["copy", "pickle"]
)
def test_a_copy_runs(again):
    pipe = Pipe(layers(), [2, 2], devices=CPUS, chunks=2)
    x = torch.rand(4, 4)
    expected = pipe(x)

    other = again(pipe)

    assert torch.equal(other(x), expected)
    assert other.partitions[0] is not pipe.partitions[0]


def test_an_empty_sequence_is_an_identity():
    x = torch.rand(4, 2)

    assert torch.equal(Pipe(nn.Sequential(), [], devices=CPUS, chunks=2)(x), x)
    with pytest.raises(PipelineError):
        Pipe(nn.Sequential(), [], devices=CPUS)("words")


def test_without_a_balance_stages_are_even_in_bytes():
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 64))

    assert Pipe(module, devices=["cpu", "cpu"]).balance == [1, 3]
    assert Pipe(module, devices=["cpu"]).balance == [4]


def test_devices_that_are_left_over_are_dropped():
    assert len(Pipe(layers(), [2, 2], devices=CPUS).devices) == 2


def test_a_dtype_can_be_changed_and_a_device_cannot():
    pipe = Pipe(layers(), [2, 2], devices=CPUS)

    assert {one.dtype for one in pipe.double().parameters()} == {torch.float64}
    with pytest.raises(UnsupportedError, match="decides where its stages are"):
        pipe.to("meta")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipe(nn.Linear(1, 1), [1], devices=CPUS), "expected an nn.Sequential, got Linear"),
        (lambda: Pipe(layers(), [1, 1], devices=CPUS), r"has 4 layers, and the balance \[1, 1\] is for 2"),
        (lambda: Pipe(layers(), [4, 0], devices=CPUS), r"at least 1, got \[4, 0\]"),
        (lambda: Pipe(layers(), [2, 2], devices=["cpu"]), "2 stages need as many devices, and there are 1"),
        (lambda: Pipe(layers(), [4], devices=CPUS, chunks=0), "chunks=0: expected an int of at least 1"),
        (lambda: Pipe(layers(), [4], devices=CPUS, chunks=2.5), "chunks=2.5"),
        (lambda: Pipe(layers(), [4], devices=CPUS, checkpoint="often"), "'always', 'except_last', 'never'"),
        (lambda: Pipe(nn.Sequential(*[nn.Linear(1, 1)] * 2), [2], devices=CPUS), "more than once"),
        (lambda: Pipe(layers(), [2, 2], devices=["cpu", "cuda:77"]), "there is no device cuda:77"),
        (lambda: Pipe(layers(), [2, 2], devices=["cpu", "meta"]), "type meta are not supported"),
    ],
)
def test_a_pipe_that_cannot_be_made_says_why(make, words):
    with pytest.raises(PipelineError, match=words):
        make()


def test_all_that_is_wrong_is_listed():
    with pytest.raises(PipelineError) as caught:
        Pipe(layers(), [1, 1, 0], devices=["cpu"])

    assert len(str(caught.value).splitlines()) == 3


def test_a_parameter_may_be_shared_on_one_device():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    plain = nn.Sequential(first, second)
    # With more microbatches, the gradients of both layers are summed in another order.
    pipe = Pipe(copy.deepcopy(plain), [1, 1], devices=CPUS, checkpoint="always")
    x = torch.rand(4, 4)

    plain(x).sum().backward()
    pipe(x).sum().backward()

    assert torch.equal(pipe[0].weight.grad, first.weight.grad)


# ------------------------------------------------------------------------------------------------------------- plans


def stage_plans(pipe: Pipe, width: int, rows: int, *, budget: str) -> list[torchremat.Plan]:
    x = torch.rand(rows, width, requires_grad=True)
    return [
        torchremat.plan(stage, lambda stage: stage(x).sum(), budget=budget, cost="flops") for stage in pipe.partitions
    ]


class Counts(nn.Linear):
    """Counts its recomputes; in `forward` itself, since hooks are outside of the regions of a plan."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.recomputes = Count()

    def forward(self, x: Tensor) -> Tensor:
        if torchremat.is_recomputing():
            self.recomputes.up()
        return super().forward(x)


def test_stages_run_by_plans():
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(Counts(32, 32), nn.GELU(), nn.GELU(), nn.GELU()) for _ in range(4)))
    plans = stage_plans(Pipe(copy.deepcopy(module), [2, 2], devices=CPUS), 32, 512, budget="70%")
    plain = copy.deepcopy(module)
    x = torch.rand(1024, 32)
    pipe = Pipe(module, [2, 2], devices=CPUS, chunks=2, checkpoint=plans)

    pipe(x).sum().backward()
    plainly(plain, x, 2).sum().backward()

    again = [layer[0].recomputes.value for layer in module]
    assert sum(again) > 0
    assert min(again) == 0  # not everything
    assert equal(gradients(pipe), gradients(plain))


def test_plans_that_do_not_fit_the_stages_are_refused():
    pipe = Pipe(layers(4, 32), [2, 2], devices=CPUS)
    plans = stage_plans(pipe, 32, 512, budget="80%")

    with pytest.raises(PipelineError, match="2 plans were given for 4 stages"):
        Pipe(layers(4, 32), [1, 1, 1, 1], devices=CPUS, checkpoint=plans)
    with pytest.raises(PlanError, match="made for another model"):
        Pipe(layers(4, 32), [1, 3], devices=CPUS, checkpoint=plans)


# --------------------------------------------------------------------------------------------------------- slow copies


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_recompute_runs_while_the_gradient_is_being_copied(monkeypatch, chunks):
    began = threading.Semaphore(0)  # one for each recompute of stage 0
    arrived = []

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if torchremat.is_recomputing():
                began.release()
            return super().forward(x).tanh()

    def wait_stream(waiting, awaited):
        # In backward: the stage waits for a gradient whose copy does not end before the stage has begun to recompute.
        if current_graph_task() != -1 and awaited is copies[0]:
            arrived.append(began.acquire(timeout=120))

    torch.manual_seed(0)
    module = nn.Sequential(Slow(4, 4), nn.Linear(4, 4))
    plain = copy.deepcopy(module)
    pipe = Pipe(module, [1, 1], devices=CPUS, chunks=chunks, checkpoint="always", record=True)
    copies = [CpuStream(), CpuStream()]  # those of the two stages
    pipe._copy_streams = [[one] * chunks for one in copies]
    monkeypatch.setattr(copying, "wait_stream", wait_stream)
    x = torch.rand(6, 4)

    pipe(x).sum().backward()
    plainly(plain, x, chunks).sum().backward()

    assert arrived == [True] * chunks
    assert equal(gradients(pipe), gradients(plain))
    order = pipe.timeline().order(0).split()
    assert [f"{kind}0.{number}" for number in reversed(range(chunks)) for kind in "RB"] == order[chunks:]
