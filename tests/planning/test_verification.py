"""One real step with the regions and one without: what is compared, what is reported, and that nothing changes."""

import os
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import models
from logs import Count, Log
from planning.kinds import KINDS, Loop, block, inputs, square
from planning.steps import each, fingerprint, keep_all, recomputed_flops, with_declared_speed
from probes.planning import KeepNode, RegionNode
from torchremat import Disk, Host, Planner, StepError, plan, verify, wrap


def gpt(**options):
    return models.gpt_step(blocks=4, width=64, context=128, batch=4, **options)


def test_a_planned_model_is_exact_and_as_predicted():
    model, step = gpt(dropout=0.1)
    planner = Planner(model, step, cost="flops")
    plain = planner.plain_peak()[0]
    made = planner.plan(planner.floor_bytes)
    made.apply(model)

    report = verify(model, step)

    assert report.is_exact is True
    assert report.differences == ()
    assert report.predicted_bytes == made.step_peak_bytes
    assert abs(report.peak_bytes - made.step_peak_bytes) <= 0.01 * made.step_peak_bytes
    assert report.plain_peak_bytes == plain
    assert report.recomputed_flops == made.recomputed_flops > 0
    assert report.kept_bytes < report.plain_kept_bytes
    assert report.no_effect == ""
    assert "loss, gradients and buffers equal bit for bit" in str(report)
    assert "no effect" not in str(report)


def test_the_report_reads_like_this():
    model, step = KINDS["loop"]()
    replace(plan(model, step, budget="100%"), tree=each(4)).apply(model)

    told = []
    report = verify(model, step, progress=told.append)
    report = replace(report, seconds=0.015, plain_seconds=0.010, predicted_bytes=726_300, took_seconds=1.26)

    lines = str(report).splitlines()
    assert lines[0] == "exact      loss, gradients and buffers equal bit for bit"
    assert lines[1] == "peak       706.01 KiB, 58% of plain (1.19 MiB)"
    assert lines[2] == "predicted  709.28 KiB, measured -0.46%"
    assert lines[3].startswith("time       1.50 x plain (10 ms")
    assert lines[4] == "recomputed 0.01 GFLOP, 5 wrapped modules"
    assert lines[5] == "took       1.3 s, for 11 steps"
    assert {one.phase for one in told} == {"verifying"}
    assert [one.share for one in told][-1] == 1.0


def test_a_report_says_how_many_steps_it_took():
    model, step = KINDS["loop"]()
    replace(plan(model, step, budget="100%"), tree=each(4)).apply(model)
    ran = Log()

    report = verify(model, lambda own: ran.append("") or step(own), progress=False)

    assert report.steps == len(ran) == 11
    assert report.took_seconds > 0


def test_buffers_are_compared():
    model, step = models.resnet_step(batch=8, size=16, width=8)
    replace(made := plan(model, step, budget="100%"), tree=each(len(made.units))).apply(model)

    assert verify(model, step).is_exact is True


class Counts(nn.Module):
    """Not the same twice: what it computes hangs on how often it ran, which nobody puts back."""

    def __init__(self):
        super().__init__()
        self.inner = block()
        self.calls = Count()

    def forward(self, x):
        self.calls.up()
        return self.inner(x) * self.calls.value


def test_of_a_model_that_is_not_the_same_twice_nothing_is_known():
    torch.manual_seed(0)
    model = nn.Sequential(Counts(), block(), block(), block())
    x = inputs()
    step = lambda m: square(m(x))  # noqa: E731
    wrap(model, "0")

    report = verify(model, step)

    assert report.is_exact is None
    assert not report.is_repeatable
    assert any(line.startswith("the gradient of `0.inner.0.weight` differs by up to") for line in report.noise)
    first, second = str(report).splitlines()[:2]
    assert first.startswith("exact      NOT COMPARABLE: plain differs from plain by itself, in 17 results")
    assert second.startswith("           the loss differs by up to")


class Atomic(nn.Module):
    """Adds in another order each time, as kernels that add atomically do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * (1 + 1e-4 * int.from_bytes(os.urandom(4)) / 2**32)


def test_a_plan_is_not_called_unequal_for_what_two_plain_steps_differ_by():
    torch.manual_seed(0)
    model = nn.Sequential(Atomic(block()), block(), block())
    x = inputs()
    wrap(model, "1")

    report = verify(model, lambda m: square(m(x)))

    assert report.is_exact is None
    assert report.differences == ()
    assert any(line.startswith("the gradient of `0.inner.0.weight` differs by up to") for line in report.noise)
    assert str(report).splitlines()[0].startswith("exact      equal within the difference of two plain steps")


class AtomicUnlessAsked(Atomic):
    """Adds in one order where torch is asked for deterministic kernels."""

    def forward(self, x):
        return self.inner(x) if torch.are_deterministic_algorithms_enabled() else super().forward(x)


@pytest.mark.parametrize("changes", [False, True])
def test_where_two_plain_steps_differ_deterministic_kernels_decide(changes):
    torch.manual_seed(0)
    model = nn.Sequential(AtomicUnlessAsked(block()), OtherInBackward() if changes else block(), block())
    x = inputs()
    wrap(model, "1")
    environment = dict(os.environ)

    report = verify(model, lambda m: square(m(x)))

    assert report.is_exact is not changes
    assert report.is_deterministic
    assert report.noise
    assert bool(report.differences) is changes
    assert "with deterministic kernels; without them, two plain steps differ" in str(report).splitlines()[0]
    assert not torch.are_deterministic_algorithms_enabled()
    assert dict(os.environ) == environment


def test_where_a_kernel_has_no_deterministic_form_the_noise_decides():
    class Put(Atomic):
        def forward(self, x):
            torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Put(block()), block(), block())
    x = inputs()
    wrap(model, "1")

    report = verify(model, lambda m: square(m(x)))

    assert report.is_exact is None
    assert not report.is_deterministic
    assert report.noise


class Seldom(nn.Module):
    """Adds in another order in some of its forwards, unless torch is asked for deterministic kernels."""

    def __init__(self, inner, *seldom):
        super().__init__()
        self.inner, self.seldom, self.calls = inner, seldom, Count()

    def forward(self, x):
        self.calls.up()
        is_other = self.calls.value in self.seldom and not torch.are_deterministic_algorithms_enabled()
        return self.inner(x) * (1 + 1e-4 * is_other)


@pytest.mark.parametrize(("again", "is_exact"), [((20,), True), ((), False)])
def test_a_step_that_differs_from_itself_only_now_and_then_is_not_called_unequal(again, is_exact):
    torch.manual_seed(0)
    model = nn.Sequential(Seldom(block(), 1, *again), block(), block())
    x = inputs()
    wrap(model, "1")
    ran = Log()

    report = verify(model, lambda m: ran.append("") or square(m(x)))

    # In the step with the regions alone, and once more where it is repeated: some eight of the plain steps are alike.
    assert report.is_exact is is_exact
    assert report.is_deterministic is is_exact
    assert bool(report.differences) is not is_exact
    assert report.steps == len(ran)


def test_of_two_results_the_gradient_that_is_rounding_alone_may_differ():
    class Cancels(nn.Module):
        def forward(self, x):
            noise = int.from_bytes(os.urandom(4)) / 2**32
            torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.0]))
            return Noisy.apply(x, 1e-10 * noise)

    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(context, x, noise):
            context.noise = noise
            return x - x

        @staticmethod
        def backward(context, gradient):
            return context.noise * gradient, None

    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    model.cancels, model.bias = Cancels(), nn.Parameter(torch.zeros(8))
    x = inputs()

    def step(m):
        h = m[1](m[0](x))
        return square(h) + m.cancels(m.bias).sum()

    wrap(model, "0")

    report = verify(model, step)

    assert report.is_exact is None
    assert report.is_repeatable
    assert [line for line in report.noise if "`bias`" in line]


class ReadsUnwritten(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = Count()

    def forward(self, x):
        self.calls.up()
        found = torch.empty(1)
        if not torch.are_deterministic_algorithms_enabled():  # what an earlier tensor has left there
            found.fill_(1e-6 * (self.calls.value > 4))
        return x + found


def test_memory_that_nothing_has_written_is_no_proof_that_steps_are_equal():
    torch.manual_seed(0)
    model = nn.Sequential(ReadsUnwritten(), block(), OtherInBackward())
    x = inputs()
    wrap(model, "2")

    report = verify(model, lambda m: square(m(x)))

    # Under deterministic kernels torch fills such memory with NaN, and all would be NaN, and so equal.
    assert report.is_exact is False
    assert not report.is_deterministic


class OtherInBackward(nn.Module):
    """Is another function where a backward runs, and so in a recompute."""

    def forward(self, x):
        h = x.sin() * (1.0 if torch._C._current_graph_task_id() < 0 else 1.1)
        return h * h


def test_noise_excuses_no_difference_that_is_larger():
    torch.manual_seed(0)
    model = nn.Sequential(Atomic(block()), OtherInBackward(), block())
    x = inputs()
    wrap(model, "1")

    report = verify(model, lambda m: square(m(x)))

    assert report.is_exact is False
    assert any(line.startswith("the gradient of `0.inner.0.weight` differs") for line in report.differences)
    assert not any("2.0.weight" in line for line in report.differences)
    assert "NOT EQUAL" in str(report)


def test_without_any_region():
    report = verify(*gpt())

    assert report.regions == 0
    assert report.is_exact is True
    assert report.no_effect == "no module of the model is wrapped; apply a plan, or use wrap"
    assert "no effect because no module of the model is wrapped" in str(report)


def test_a_plan_that_keeps_everything():
    model, step = gpt()
    plan(model, step, budget="100%").apply(model)

    report = verify(model, step)

    assert report.no_effect == "the plan keeps everything: the plain step is within the budget"
    assert report.peak_bytes == report.plain_peak_bytes == report.predicted_bytes


def test_a_region_that_saves_nothing():
    class Sum(nn.Module):
        def forward(self, x):
            return x + x

    torch.manual_seed(0)
    model = nn.Sequential(block(), Sum(), block())
    x = inputs()
    wrap(model, "1")

    report = verify(model, lambda m: square(m(x)))

    assert report.recomputed_flops == 0
    assert "save nothing between forward and backward that their inputs do not hold" in report.no_effect


def test_a_store_that_frees_nothing_on_the_device():
    model, step = models.gpt_step(blocks=3, width=32, context=64, batch=4)
    with with_declared_speed():
        planner = Planner(model, step, cost="flops", stores=[Disk()])
    plan = planner.plan("70%")
    plan.apply(model, stores=[Host()])  # it was made with a disk

    report = verify(model, step)

    assert plan.stored and not plan.recomputed_flops
    assert report.no_effect.startswith("tensors in the plan's stores stay on the measured device")


def test_a_peak_elsewhere():
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    x = inputs()
    wrap(model, "1")  # whose recompute comes before anything has been freed

    report = verify(model, lambda m: m(x).sum())

    assert report.no_effect.startswith("the peak is elsewhere: the forward keeps ")


def test_a_model_in_eval_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), block()).eval()
    x = inputs()
    wrap(model, "0")

    report = verify(model, lambda m: square(m(x)))

    assert report.is_exact is True
    assert "eval mode" in report.no_effect


def test_the_optimizer_counts_among_the_bytes():
    model, step = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    without = verify(model, step)
    before_its_first_step = verify(model, step, optimizer=optimizer)
    step(model).backward()
    optimizer.step()
    model.zero_grad()

    report = verify(model, step, optimizer=optimizer)

    state = sum(value.nbytes for values in optimizer.state.values() for value in values.values())
    assert report.peak_bytes == before_its_first_step.peak_bytes == without.peak_bytes + state


@pytest.mark.parametrize("name", ["loop", "sequential in place", "siamese", "one linear", "tied", "encoder layers"])
def test_nothing_changes(name):
    model, step = KINDS[name]()
    made = plan(model, step, budget="100%")
    replace(made, tree=each(len(made.units))).apply(model)
    step(model).backward()
    before = fingerprint(model)

    report = verify(model, step)

    assert report.is_exact is True
    assert before.changes(fingerprint(model)) == []


@cache
def nested_loop():
    """A plan for a loop, with a region in another one."""
    tree = (RegionNode((KeepNode(0), RegionNode((KeepNode(1),)))), KeepNode(2), KeepNode(3))
    return replace(plan(*KINDS["loop"](), budget="100%"), tree=tree)


# In each run and place one of either kind, and of both kinds some in each place.
@pytest.mark.parametrize(
    ("run", "place", "error"),
    [
        (run, place, (ValueError, KeyboardInterrupt)[(number + (place == "backward")) % 2])
        for number, run in enumerate([1, 2, 3, 4, 8])
        for place in ("forward", "backward")
    ],
)
def test_an_error_in_any_run_leaves_everything(run, place, error):
    model, step = KINDS["loop"]()
    nested_loop().apply(model)
    step(model).backward()
    before = fingerprint(model)
    runs = Log()

    def raises(m):
        runs.append(1)
        loss = step(m)
        if len(runs) == run:
            if place == "forward":
                raise error
            loss.register_hook(lambda gradient: _raise(error))
        return loss

    with pytest.raises(error):
        verify(model, raises)

    assert before.changes(fingerprint(model)) == []
    assert recomputed_flops(model, step) > 0


def _raise(error):
    raise error


def test_a_step_without_a_loss():
    model, _ = KINDS["loop"]()

    with pytest.raises(StepError, match="returned None"):
        verify(model, lambda m: None)


def test_a_loss_of_nan_is_equal_to_itself():
    model, _ = KINDS["loop"]()
    wrap(model, "layers.*")

    assert verify(model, lambda m: square(m(inputs())) * float("nan")).is_exact is True


def test_a_step_that_cannot_run_plain_is_not_compared(monkeypatch):
    model, step = Loop(), lambda m: square(m(inputs()))
    wrap(model, "layers.*")

    def checked(m):
        if "forward" not in m.layers[0].__dict__:
            raise torch.OutOfMemoryError
        return step(m)

    report = verify(model, checked)

    assert report.is_exact is None
    assert report.plain_peak_bytes is None
    assert report.plain_seconds is None
    assert "not compared, the plain step does not fit" in str(report)
    assert keep_all(1) == (KeepNode(0),)
