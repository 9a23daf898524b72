"""Gradients that are freed in the backward."""

import contextlib
import random
import warnings
import weakref

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn, optim
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import torchremat
from optimizing.loops import (
    KINDS,
    ByTheMeanOfAll,
    ByTheNormOfAll,
    Demanding,
    Lion,
    Loop,
    Noisy,
    adamw,
    equal,
    loss_of,
    net,
    plain_end,
)
from probes.memory import record_allocations
from torchremat import MutationError, UnsupportedError, checkpoint, measure, release_gradients


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_is_bit_for_bit_the_plain_one(kind):
    plain = plain_end(kind)

    released = Loop(kind, release_gradients).run().ends_with()

    assert equal(released, plain)


def test_a_step_of_each_parameter_is_made_in_the_backward():
    """A run that released nothing would be equal as well."""
    loop = Loop(adamw, release_gradients).run(stop=1)
    before = [p.detach().clone() for p in loop.model.parameters()]
    loop.optimizer.zero_grad()
    loss_of(loop.model, 1).backward()

    written = {n for (n, p), b in zip(loop.model.named_parameters(), before, strict=True) if not torch.equal(p, b)}

    trained = {name for name, p in loop.model.named_parameters() if p.requires_grad and "unused" not in name}
    assert written == trained


def test_one_gradient_is_in_memory_at_a_time():
    # Ten layers with a weight of 256 KiB each; the gradient of the input of a layer is 1 KiB.
    def peak_over_the_end_of_forward(releases):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(10)))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        if releases:
            release_gradients(model, optimizer)
        loss = model(torch.ones(1, 256)).sum()
        with record_allocations(torch.device("cpu")) as recorder:
            loss.backward()
        return recorder.trace.peak_bytes

    # The second gradient is made while the hook of the first is over: one at a time, and at most 8 KiB of small ones.
    assert peak_over_the_end_of_forward(False) >= 10 * 2**18
    assert peak_over_the_end_of_forward(True) <= 2**18 + 2**13


def test_a_run_resumes_from_a_checkpoint_in_the_middle():
    plain = plain_end(adamw)
    first = Loop(adamw, release_gradients).run(stop=8)
    saved = [first.model.state_dict(), first.optimizer.state_dict(), first.schedule.state_dict()]

    second = Loop(adamw, release_gradients)
    for own, state in zip((second.model, second.optimizer, second.schedule), saved, strict=True):
        own.load_state_dict(state)
    second.average.load_state_dict(first.average.state_dict())

    assert equal(second.run(start=8).ends_with(), plain)


def test_hooks_after_the_step_run_once_and_see_all_of_it():
    def looked(prepare):
        loop, found = Loop(adamw, prepare), []
        loop.optimizer.register_step_post_hook(
            lambda *_: found.append([p.detach().clone() for p in loop.model.parameters()])
        )
        loop.run(stop=3)
        return found

    assert equal(looked(release_gradients), looked(lambda *_: None))


def test_parameters_that_get_no_gradient_keep_theirs_for_step():
    """A gradient that was there before the backward is the optimizer's to step on, as ever."""

    def trained(prepare):
        loop = Loop(adamw, prepare)
        loop.model.unused.weight.grad = torch.ones(32, 32)
        loss_of(loop.model, 0).backward()
        loop.optimizer.step()
        return loop.ends_with()

    assert equal(trained(release_gradients), trained(lambda *_: None))


# ------------------------------------------------------------------------------------------------------- accumulation


def test_the_last_of_several_backwards_releases():
    def trained(prepare):
        loop = Loop(adamw, prepare)
        for number in range(5):
            loop.optimizer.zero_grad()
            for part in range(3):
                if loop.prepared is not None and part == 2:
                    loop.prepared.last_microbatch()
                loss_of(loop.model, 3 * number + part).backward()
            left = [p.grad for p in loop.model.parameters() if p.grad is not None]
            loop.optimizer.step()
        return loop.ends_with(), {type(one).__name__ for one in left}

    plain, kinds = trained(lambda *_: None)
    released, left = trained(lambda model, optimizer: release_gradients(model, optimizer, accumulates=True))

    assert equal(released, plain)
    assert (kinds, left) == ({"Tensor"}, {"ReleasedGradient"})


def test_a_step_without_a_last_backward_raises():
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer, accumulates=True)
    loss_of(model, 0).backward()

    with pytest.raises(UnsupportedError, match=r"AdamW.step\(\): last_microbatch\(\) was not called"):
        optimizer.step()


def test_a_second_backward_raises():
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()

    with pytest.raises(UnsupportedError, match="accumulates=True"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match=r"complete for a second time.*optimizer.step\(\)"):
        loss_of(model, 1).backward()


# ----------------------------------------------------------------------------------------------------------- clipping


def test_two_passes_clip_by_the_norm_of_all_gradients():
    plain, released = Loop(adamw), Loop(adamw)
    release = release_gradients(released.model, released.optimizer)
    for number in range(5):
        plain.optimizer.zero_grad()
        loss_of(plain.model, number).backward()
        norm = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
        plain.optimizer.step()

        released.optimizer.zero_grad()
        with release.measured_norms():
            loss_of(released.model, number).backward()
        assert torch.equal(release.clip_norm(0.5), norm)
        loss_of(released.model, number).backward()
        released.optimizer.step()

    assert norm > 0.5
    assert equal(released.ends_with(), plain.ends_with())


def test_values_are_clipped():
    plain, released = Loop(adamw), Loop(adamw)
    release_gradients(released.model, released.optimizer, clip_value=1e-3)
    for number in range(3):
        plain.optimizer.zero_grad()
        loss_of(plain.model, number).backward()
        nn.utils.clip_grad_value_(plain.model.parameters(), 1e-3)
        plain.optimizer.step()
        released.step(number)

    assert equal([*released.model.parameters()], [*plain.model.parameters()])


@pytest.mark.parametrize(
    "read",
    [
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda model, _: model.head.weight.grad.norm(),
        lambda model, _: model.head.weight.grad[0],
        lambda model, _: model.head.weight.grad.detach(),
        lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    ],
    ids=["norm", "value", "own norm", "element", "detached", "zeros"],
)
def test_whoever_reads_a_released_gradient_is_told(read):
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()

    with pytest.raises(UnsupportedError, match=r"the gradient of .* is read, and it was released"):
        read(model, optimizer)


# --------------------------------------------------------------------------------- when a parameter may be written


class Twice(nn.Module):
    """Reads its weight where a gradient flows to it, and before that where none does."""

    def __init__(self, early):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.early = early

    def forward(self, x):
        x = (x @ self.weight.detach()).exp() if self.early else x
        return (x @ self.weight).exp()


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_weight_that_is_read_after_its_step_is_an_error(recomputes):
    model = Twice(early=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    release_gradients(model, optimizer)
    x = torch.rand(8, 8, requires_grad=True)
    halves = checkpoint(lambda x: (x @ model.weight.detach()).exp(), x) if recomputes else None
    y = model(x) if halves is None else (halves @ model.weight).exp()

    with pytest.raises(MutationError if recomputes else RuntimeError, match=r"weight|inplace operation"):
        y.sum().backward()


def test_an_optimizer_that_writes_past_versions_is_seen_too():
    model = Twice(early=True)
    optimizer = Lion(model.parameters())
    release_gradients(model, optimizer)
    y = model(torch.rand(8, 8, requires_grad=True))

    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("around", ["each", "both", "nested"])
def test_regions_recompute_before_their_parameters_step(around):
    """Tied weights, several layers in one region, and regions inside of regions."""

    def forward(model, tokens):
        def through(x):
            for block in model.blocks:
                x = x + (checkpoint(block, x) if around != "both" else block(x))
            return x

        x = checkpoint(model.embed, tokens)
        x = through(x) if around == "each" else checkpoint(through, x)
        return checkpoint(model.head, x)

    def trained(prepare):
        model = net()
        optimizer = adamw(model)
        prepare(model, optimizer)
        for number in range(5):
            tokens = torch.randint(40, (4, 8), generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            (forward(model, tokens) if prepare is release_gradients else model(tokens)).square().mean().backward()
            optimizer.step()
        return [*model.parameters()]

    assert equal(trained(release_gradients), trained(lambda *_: None))


def test_biases_alone_step_before_the_region_of_their_layers_recomputes():
    """The gradient of a last bias is complete before any recompute."""

    def trained(prepare):
        model = net()
        for name, p in model.named_parameters():
            p.requires_grad_("bias" in name)
        optimizer = adamw(model)
        prepare(model, optimizer)
        for number in range(5):
            torch.manual_seed(number)
            x = torch.randn(4, 32)
            optimizer.zero_grad()
            for block in model.blocks:
                x = checkpoint(block, x) if prepare is release_gradients else block(x)
            x.square().mean().backward()
            optimizer.step()
        return [*model.parameters()]

    assert equal(trained(release_gradients), trained(lambda *_: None))


@pytest.mark.parametrize("shares", [False, True])
def test_reentrant_checkpoints_work_unless_they_share_a_parameter(shares):
    """An inner backward completes what is only a part of the gradient of a shared parameter."""

    def trained(prepare):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        layers[1].weight = layers[0].weight if shares else layers[1].weight
        model = nn.ModuleList(layers)
        optimizer = adamw(model)
        prepare(model, optimizer)
        for number in range(3):
            torch.manual_seed(number)
            x = torch.randn(4, 8, requires_grad=True)
            optimizer.zero_grad()
            for layer in model:
                x = torch_checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=True)
            x.sum().backward()
            optimizer.step()
        return [*model.parameters()]

    if shares:
        with pytest.raises((UnsupportedError, RuntimeError), match=r"weight is read, and it was released"):
            trained(release_gradients)
    else:
        assert equal(trained(release_gradients), trained(lambda *_: None))


def test_sparse_gradients_are_released():
    def trained(prepare):
        torch.manual_seed(0)
        model = nn.Embedding(50, 8, sparse=True)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        prepare(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.tensor([number, 7, 7])).square().sum().backward()
            released = type(model.weight.grad)
            optimizer.step()
        return [*model.parameters()], released.__name__

    plain, released = trained(lambda *_: None), trained(release_gradients)

    assert equal(released[0], plain[0])
    assert released[1] == "ReleasedGradient"


def test_a_graph_that_is_kept_raises():
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer)

    with pytest.raises(UnsupportedError, match="retain_graph=True"):
        loss_of(model, 0).backward(retain_graph=True)


# --------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ByTheNormOfAll, r"ByTheNormOfAll: its step on all parameters at once is not its step .* by up to \d"),
        (Noisy, "Noisy: its step on all parameters at once is not its step"),
        # It said only that the step without gradients raises, which any optimizer that counts its parameters does.
        (ByTheMeanOfAll, r"ByTheMeanOfAll: its step on all parameters at once is not its step .* by up to \d"),
        (lambda ps: Demanding(ps, lr=1), "Demanding: whether parts .* fails: ValueError: no gradients"),
        (optim.LBFGS, "It steps with a closure"),
        (lambda ps: optim.SparseAdam(list(ps)), "SparseAdam: whether parts of its step are the step must be tried"),
        (lambda ps: optim.AdamW(ps, capturable=True), "AdamW: .*capturable"),
        (lambda ps: optim.AdamW(ps, differentiable=True), "differentiable=True"),
    ],
)
def test_an_optimizer_whose_parts_are_not_its_step_is_refused(kind, words):
    model = net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = kind(p for p in model.parameters() if p.requires_grad)
    versions = [p._version for p in model.parameters()]

    with pytest.raises(UnsupportedError, match=words):
        release_gradients(model, optimizer)

    assert [p._version for p in model.parameters()] == versions
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize("kind", [adamw, Noisy])
def test_a_trial_of_an_optimizer_draws_no_numbers_and_seeds_no_generator(kind, monkeypatch):
    # It seeded the generators of all devices, and restored those of the CPU and of devices with parameters.
    model = net()
    optimizer = kind(p for p in model.parameters()) if kind is Noisy else kind(model)
    monkeypatch.setattr(torch, "manual_seed", None)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()

    with contextlib.suppress(UnsupportedError):
        release_gradients(model, optimizer)

    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_an_optimizer_around_another_is_refused_with_the_inner_ones_name():
    model = net()
    outer = Accelerator(cpu=True).prepare(adamw(model))

    with pytest.raises(UnsupportedError, match=r"Hand over the AdamW that it wraps \(its `optimizer`\)"):
        release_gradients(model, outer)


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_step_that_is_compiled_is_the_eager_one(order):
    """torch's own differs then, by 7e-7; parts of it run eagerly."""
    plain, own = Loop(adamw), Loop(adamw)
    compiled = torch.compile(own.optimizer.step, backend="eager") if order == "first" else None
    release_gradients(own.model, own.optimizer)
    compiled = compiled or torch.compile(own.optimizer.step, backend="eager")
    for number in range(3):
        plain.step(number)
        own.optimizer.zero_grad()
        loss_of(own.model, number).backward()
        compiled()
        own.schedule.step()

    assert equal([*own.model.parameters()], [*plain.model.parameters()])


def test_a_hook_before_the_step_is_refused():
    model = net()
    optimizer = adamw(model)
    hook = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="a hook that runs before its step"):
        release_gradients(model, optimizer)
    hook.remove()
    release_gradients(model, optimizer)
    optimizer.register_step_pre_hook(lambda *_: None)
    loss_of(model, 0).backward()

    with pytest.raises(UnsupportedError, match="a hook that runs before its step"):
        optimizer.step()


def test_parameters_of_two_optimizers_are_refused():
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer)

    with pytest.raises(UnsupportedError, match="are another optimizer's as well"):
        release_gradients(model, optim.SGD(model.parameters()))


def test_a_step_that_is_measured_does_not_train():
    loop, plain = Loop(adamw, release_gradients).run(stop=2), Loop(adamw).run(stop=2)

    measured = measure(loop.model, lambda model: loss_of(model, 0), optimizer=loop.optimizer)

    assert measured.gradient_bytes == 0
    assert equal(loop.run(2, 4).ends_with(), plain.run(2, 4).ends_with())


# ---------------------------------------------------------------------------------------------------------- its life


def test_removed_it_leaves_nothing():
    model = net()
    optimizer = adamw(model)
    with release_gradients(model, optimizer):
        loss_of(model, 0).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 0).backward()

    assert isinstance(model.head.weight.grad, torch.Tensor)
    assert model.head.weight.grad.norm() > 0
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_it_is_not_removed_in_the_middle_of_a_step():
    model = net()
    optimizer = adamw(model)
    release = release_gradients(model, optimizer)
    loss_of(model, 0).backward()

    with pytest.raises(UnsupportedError, match=r"Call `optimizer.step\(\)` first"):
        release.remove()
    optimizer.step()
    release.remove()
    release.remove()


@pytest.mark.usefixtures("no_collector")
def test_an_optimizer_that_is_dropped_is_freed_without_the_collector():
    model = net()
    optimizer = adamw(model)
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    model.zero_grad()

    loss_of(model, 1).backward()
    assert model.head.weight.grad.norm() > 0


def test_autocast_around_the_backward_is_not_around_the_step():
    def trained(prepare):
        loop = Loop(KINDS["Muon"], prepare)
        for number in range(3):
            loop.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss_of(loop.model, number).backward()
            loop.optimizer.step()
        return loop.ends_with()

    assert equal(trained(release_gradients), trained(lambda *_: None))


def test_it_is_public():
    assert torchremat.release_gradients is release_gradients


class PastOperators(optim.Optimizer):
    """Writes where no operator of torch shows it, as kernels of other libraries do."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.numpy()[...] -= 0.1 * parameter.grad.numpy()


def test_a_part_that_writes_past_operators_is_undone_where_a_step_is_measured():
    # The write that undid it was seen, and the values after the part were taken for those before it.
    model = nn.Linear(128, 128)
    before = model.weight.detach().clone()
    optimizer = PastOperators(model.parameters())
    release_gradients(model, optimizer)

    report = torchremat.verify(model, lambda model: model(torch.ones(2, 128)).sum())

    assert report.is_exact and torch.equal(model.weight, before)


class RoundedAtRandom(TwoTensor):
    """Draws random numbers when it is written, as a weight of few bits does that is rounded stochastically."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.add_.Tensor, torch.ops.aten._foreach_add_.List):
            torch.rand(3)
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_parameters_that_draw_when_they_are_written():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(RoundedAtRandom(torch.ones(2, 2), torch.ones(2, 2)))
    state = torch.get_rng_state()

    with pytest.raises(UnsupportedError, match="a step on a RoundedAtRandom draws random numbers"):
        release_gradients(model, optim.SGD(model.parameters(), 0.1))
    assert torch.equal(torch.get_rng_state(), state)

    model.weight = nn.Parameter(TwoTensor(torch.ones(2, 2), torch.ones(2, 2)))
    release_gradients(model, optim.SGD(model.parameters(), 0.1))
