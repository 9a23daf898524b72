"""Batch norms over microbatches against one batch norm over the mini-batch."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

from logs import Count
from pipeline.layered import equal
from torchremat import checkpoint, checkpointed, is_recomputing, measure
from torchremat.errors import ScheduleError, UnsupportedError
from torchremat.pipeline.batchnorm import (
    DeferredBatchNorm,
    commit_statistics,
    convert_deferred_batch_norm,
    discard_statistics,
)
from torchremat.policies import everything_saved, save_matmuls


def statistics(module):
    return [module.running_mean.clone(), module.running_var.clone(), module.num_batches_tracked.clone()]


def close(some, others, **tolerance):
    return all(
        torch.allclose(one.double(), other.double(), **tolerance) for one, other in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
def test_statistics_are_those_of_one_batch_norm(chunks, momentum):
    # 12 rows, which 8 chunks cut into 6 pieces: a mini-batch shorter than configured.
    plain = nn.BatchNorm2d(3, momentum=momentum)
    deferred = DeferredBatchNorm(3, momentum=momentum, chunks=chunks)

    for _ in range(3):
        batch = torch.rand(12, 3, 2, 2) * 5 + 3
        plain(batch)
        for microbatch in batch.chunk(chunks):
            deferred(microbatch)
        deferred.commit()

    # In floats: sums in another order.
    assert close(statistics(deferred), statistics(plain), rtol=1e-5, atol=1e-6)
    assert int(deferred.num_batches_tracked) == 3
    assert torch.allclose(deferred.eval()(batch), plain.eval()(batch), rtol=1e-5, atol=1e-5)


def test_a_variance_that_is_small_against_the_mean_is_kept():
    # E[x^2] - E[x]^2 in floats has an error of about 1e4^2 * 6e-8 = 6 here, and was 0 or negative.
    batch = torch.randn(64, 4) * 0.01 + 1e4
    deferred = DeferredBatchNorm(4, momentum=1.0, chunks=None)

    for microbatch in batch.chunk(8):
        deferred(microbatch)
    deferred.commit()

    expected = batch.double().var(0)
    assert torch.allclose(deferred.running_var.double(), expected, rtol=0.05)
    assert (batch.square().mean(0) - batch.mean(0).square() - expected).abs().max() > 1


def test_output_and_gradients_are_those_of_each_microbatch():
    plain = nn.BatchNorm1d(3)
    deferred = convert_deferred_batch_norm(copy.deepcopy(plain), 4)
    batch = torch.rand(8, 3)

    for microbatch in batch.chunk(4):
        one, other = plain(microbatch), deferred(microbatch)
        assert torch.equal(one, other)
        one.square().sum().backward()
        other.square().sum().backward()

    assert equal([one.grad for one in deferred.parameters()], [one.grad for one in plain.parameters()])


def test_when_statistics_are_committed():
    norm = DeferredBatchNorm(2, chunks=2)
    events = []

    def run(*actions):
        for action in actions:
            match action:
                case "forward":
                    norm(torch.rand(4, 2))
                case "commit":
                    norm.commit()
                case "discard":
                    norm.discard()
            events.append(f"{action[0]}{norm.microbatches}{int(norm.num_batches_tracked)}")

    # Letter, microbatches that wait, mini-batches that were tracked.
    run("forward", "forward", "commit", "forward", "commit", "forward", "discard", "commit", "forward", "forward")

    assert " ".join(events) == "f10 f01 c01 f11 c02 f12 d02 c02 f12 f03"


def test_a_failed_mini_batch_leaves_nothing():
    model = nn.Sequential(DeferredBatchNorm(2, chunks=None), nn.Sequential(DeferredBatchNorm(2, chunks=None)))
    before = [statistics(model[0]), statistics(model[1][0])]

    model(torch.rand(4, 2))
    discard_statistics(model)
    commit_statistics(model)
    after = [statistics(model[0]), statistics(model[1][0])]
    model(torch.rand(4, 2))
    commit_statistics(model)

    assert all(map(equal, before, after))
    assert [int(norm.num_batches_tracked) for norm in (model[0], model[1][0])] == [1, 1]


def test_evaluation_is_that_of_a_batch_norm():
    norm = DeferredBatchNorm(2, chunks=3)
    norm(torch.rand(4, 2))
    before = statistics(norm)
    batch = torch.rand(4, 2)

    output = norm.eval()(batch)

    plain = nn.BatchNorm1d(2).eval()
    assert torch.equal(output, plain(batch))
    assert equal(statistics(norm), before) and norm.microbatches == 1


def test_statistics_of_half_floats_are_those_of_floats():
    # The mean of 4096 halves near 300, where halves are 0.25 apart; and a module whose buffers are halves themselves.
    batch = (torch.rand(4096, 2) * 2 + 300).half()
    mixed, half = DeferredBatchNorm(2, momentum=1.0, chunks=4), DeferredBatchNorm(2, momentum=1.0, chunks=4).half()

    for microbatch in batch.chunk(4):
        mixed(microbatch)
        half(microbatch)

    exact = [batch.double().mean(0), batch.double().var(0)]
    assert close(statistics(mixed)[:2], exact, rtol=1e-5)
    assert half.running_var.dtype == torch.half
    assert equal(statistics(half)[:2], [one.half() for one in exact])


def test_nothing_that_waits_requires_grad():
    norm = DeferredBatchNorm(2, chunks=2)

    output = norm(torch.rand(4, 2, requires_grad=True))

    assert output.requires_grad
    assert [one.requires_grad for noted in norm._noted for one in (noted.mean, noted.variance)] == [False, False]
    assert not any(buffer.requires_grad for buffer in norm.buffers())


def test_state_is_that_of_a_batch_norm():
    norm = DeferredBatchNorm(2, chunks=2)
    norm(torch.rand(4, 2))

    plain = nn.BatchNorm1d(2)
    plain.load_state_dict(norm.state_dict())
    again = pickle.loads(pickle.dumps(norm))
    copied = copy.deepcopy(norm)
    norm.reset_running_stats()

    assert list(norm.state_dict()) == ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert (again.microbatches, copied.microbatches, norm.microbatches) == (1, 1, 0)
    assert repr(norm).endswith("track_running_stats=True, chunks=2)")


# ------------------------------------------------------------------------------------------------------- recomputing


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.forwards, self.recomputes = Count(), Count()

    def forward(self, x):
        (self.recomputes if is_recomputing() else self.forwards).up()
        return x


def net(features, chunks):
    torch.manual_seed(1)
    norm = DeferredBatchNorm(features, chunks=chunks)
    return nn.Sequential(nn.Linear(4, features), norm, Counting(), nn.Tanh(), nn.Linear(features, 4))


# A large buffer is one that a region does not copy, but watches for writes: more than 16 KiB. The first forward of a
# module is looked at more closely than others.
@pytest.mark.parametrize("features", [3, 5000])
@pytest.mark.parametrize("chunks", [None, 4])
@pytest.mark.parametrize(
    ("options", "recomputes"),
    [({}, 12), ({"check": "values"}, 12), ({"policy": save_matmuls}, 12), ({"policy": everything_saved}, 0)],
)
def test_regions_change_neither_statistics_nor_gradients(features, chunks, options, recomputes):
    plain, region = net(features, chunks), net(features, chunks)
    whole = nn.BatchNorm1d(features)

    for step in range(3):
        batch = torch.rand(16, 4, generator=torch.Generator().manual_seed(step))
        whole(plain[0](batch))
        for model in (plain, region):
            run = model if model is plain else checkpointed(model, **options)
            # As a pipe does: all forwards, the end of the mini-batch, and backward from the last microbatch on.
            outputs = [run(microbatch.requires_grad_()) for microbatch in batch.chunk(4)]
            commit_statistics(model)
            for output in reversed(outputs):
                output.square().sum().backward()

    assert equal(statistics(region[1]), statistics(plain[1]))
    assert equal([one.grad for one in region.parameters()], [one.grad for one in plain.parameters()])
    assert (region[2].forwards.value, region[2].recomputes.value) == (12, recomputes)
    assert region[1].microbatches == 0
    # In floats: sums in another order.
    assert close(statistics(plain[1]), statistics(whole), rtol=1e-4, atol=1e-6)


def test_a_region_that_ends_between_microbatches_and_backward_in_other_threads():
    plain, region = net(5000, None), net(5000, None)
    batch = torch.rand(16, 4)
    for model in (plain, region):
        outputs = []

        def forward(model=model, outputs=outputs):
            for microbatch in batch.chunk(4):
                outputs.append(checkpoint(model, microbatch) if model is region else model(microbatch))

        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
        commit_statistics(model)
        sum(output.square().sum() for output in outputs).backward()

    assert equal(statistics(region[1]), statistics(plain[1]))
    assert equal([one.grad for one in region.parameters()], [one.grad for one in plain.parameters()])
    assert region[2].recomputes.value == 4 and region[1].microbatches == 0


def test_a_measured_step_leaves_no_statistics():
    model = net(3, None)
    before = statistics(model[1])

    def step(model):
        loss = sum(checkpoint(model, microbatch).sum() for microbatch in torch.rand(8, 4).chunk(2))
        commit_statistics(model)
        return loss

    measure(model, step)

    assert equal(statistics(model[1]), before) and model[1].microbatches == 0


# -------------------------------------------------------------------------------------------------------- conversion


def test_conversion_reuses_what_is_there():
    norm = nn.BatchNorm2d(3, eps=1e-3, momentum=None).eval()
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(norm, nn.Sequential(shared, nn.ReLU()), shared, nn.BatchNorm1d(3, track_running_stats=False))
    seen = []
    norm.register_forward_hook(lambda *_: seen.append("hook"))
    untracked = model[3]

    converted = convert_deferred_batch_norm(model, 4)

    assert converted is model
    deferred = model[0]
    assert type(deferred) is DeferredBatchNorm and type(norm) is nn.BatchNorm2d
    assert (deferred.chunks, deferred.eps, deferred.momentum, deferred.training) == (4, 1e-3, None, False)
    assert deferred.weight is norm.weight and deferred.running_mean is norm.running_mean
    assert model[1][0] is model[2] and type(model[2]) is DeferredBatchNorm
    assert model[3] is untracked
    deferred(torch.rand(2, 3, 4, 4))
    assert seen == ["hook"]


def test_conversion_by_as_many_chunks_changes_nothing():
    norm = nn.BatchNorm1d(3)

    two = convert_deferred_batch_norm(norm, 2)
    same = convert_deferred_batch_norm(two, 2)
    four = convert_deferred_batch_norm(two, 4)
    by_pipe = convert_deferred_batch_norm(two, None)

    assert two is not norm and same is two
    assert four is not two and (two.chunks, four.chunks, by_pipe.chunks) == (2, 4, None)
    assert four.weight is norm.weight and four.running_var is norm.running_var
    linear = nn.Linear(1, 1)
    assert convert_deferred_batch_norm(linear, 2) is linear


def test_one_name_for_each_place_of_a_shared_module():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.BatchNorm1d(2)

    model = convert_deferred_batch_norm(Twice(), 2)

    assert type(model.first) is DeferredBatchNorm and model.first is model.second


def test_inputs_are_looked_at_as_before():
    converted = convert_deferred_batch_norm(nn.BatchNorm2d(3), 2)

    with pytest.raises(ValueError, match="expected 4D input"):
        converted(torch.rand(2, 3))
    with pytest.raises(ValueError, match="expected 4D input"):
        converted.eval()(torch.rand(2, 3))
    with pytest.raises(UnsupportedError, match=r"rows, 3 features and any more dimensions, .* shape \(3,\)"):
        DeferredBatchNorm(3)(torch.rand(3))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        DeferredBatchNorm(3)(torch.rand(1, 3))


def test_what_cannot_be_converted_is_listed_and_nothing_is_changed():
    class Own(nn.BatchNorm1d):
        pass

    wrapped = nn.BatchNorm1d(2)
    wrapped.forward = wrapped.forward
    model = nn.Sequential(nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.Sequential(Own(2)), nn.LazyBatchNorm1d(), wrapped)

    with pytest.raises(UnsupportedError) as raised:
        convert_deferred_batch_norm(model, 2)

    assert str(raised.value).splitlines() == [
        "convert_deferred_batch_norm: 4 modules cannot be converted:",
        "  `1`: SyncBatchNorm takes its statistics from all processes; deferred, it would take them from one. Give the "
        "model to the pipe with plain batch norms, or with track_running_stats=False",
        "  `2.0`: Own is a class of its own, whose forward would be lost",
        "  `3`: LazyBatchNorm1d does not know its number of features yet; run the model once first",
        "  `4`: this BatchNorm1d has its own forward, or is wrapped; convert first, then wrap",
    ]
    assert type(model[0]) is nn.BatchNorm1d


@pytest.mark.parametrize("chunks", [0, -1, 1.5, "2", True])
def test_chunks_that_cannot_be(chunks):
    with pytest.raises(ScheduleError, match="expected a positive integer, or None"):
        DeferredBatchNorm(2, chunks=chunks)
    with pytest.raises(ScheduleError, match="expected a positive integer, or None"):
        convert_deferred_batch_norm(nn.BatchNorm1d(2), chunks)


@pytest.mark.gpu
def test_statistics_on_a_device():
    plain, deferred = nn.BatchNorm2d(3).cuda(), DeferredBatchNorm(3, chunks=4).cuda()
    batch = torch.rand(16, 3, 4, 4, device="cuda") * 5 + 3

    plain(batch)
    for microbatch in batch.chunk(4):
        deferred(microbatch)

    assert close(statistics(deferred), statistics(plain), rtol=1e-5, atol=1e-6)
