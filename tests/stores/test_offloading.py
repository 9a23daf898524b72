import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from logs import Log
from stores.memory import Memory
from torchremat import Compressed, Disk, Host, UnsupportedError, checkpoint, checkpointed, offload
from torchremat.policies import everything_saved, save_matmuls


def network():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.RReLU(), nn.BatchNorm1d(64), nn.Dropout(0.3), nn.Linear(64, 8)
    )


def gradients(run):
    model = network()
    torch.manual_seed(0)
    x = torch.randn(32, 64, requires_grad=True)
    run(model, x).sin().sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def test_gradients_are_those_of_the_plain_run():
    store = Memory()
    plain = gradients(lambda model, x: model(x.sin()))
    context = offload(store)

    with context:
        found = gradients(lambda model, x: model(x.sin()))

    assert all(map(torch.equal, found, plain))
    assert context.copied_out_bytes == store.bytes("put") > 0
    assert not store.live


def test_the_inputs_of_a_region_are_stored_and_its_insides_recomputed():
    store, runs = Memory(), Log()
    plain = gradients(lambda model, x: model(x.sin()))

    def body(model, x):
        runs.append("run")
        return model(x)

    with offload(store):
        found = gradients(lambda model, x: checkpoint(body, model, x.sin()))

    assert all(map(torch.equal, found, plain))
    assert len(runs) == 2
    assert store.bytes("put") == 32 * 64 * 4 + 32 * 8 * 4  # the input and output of the region


@pytest.mark.parametrize("policy", [None, save_matmuls, everything_saved], ids=repr)
def test_runtime_of_a_region_it_takes_what_would_be_recomputed(policy):
    # torch.utils.checkpoint silently recomputes nothing there.
    store, runs = Memory(), Log()

    def body(model, x):
        runs.append("run")
        x = x.exp()
        with offload(store):
            x = x.sin().cos()
        return model(x)

    plain = gradients(lambda model, x: model(x.tanh().exp().sin().cos()))
    found = gradients(lambda model, x: checkpointed(body, policy=policy)(model, x.tanh()))

    assert all(map(torch.equal, found, plain))
    assert len(runs) == 2
    assert store.bytes("put") == 2 * 32 * 64 * 4  # what `sin` and `cos` save
    assert not store.live


def test_a_region_all_of_whose_tensors_are_stored_is_not_recomputed():
    store, runs = Memory(), Log()
    x = torch.randn(400, requires_grad=True)

    def body(x):
        runs.append("run")
        with offload(store):
            return x.sin().exp()

    loss = checkpoint(body, x).sum()
    again = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2)]

    assert len(runs) == 1
    assert torch.equal(again[0], again[1])
    assert torch.equal(again[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_a_backward_in_a_region_that_holds_an_offload():
    x = torch.randn(400, requires_grad=True)

    def body(x):
        with offload(Memory()):
            y = x.sin().exp()
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (grad * y).cos()

    plain = torch.autograd.grad(body(x).sum(), x)[0]
    for policy in (None, everything_saved, save_matmuls):
        loss = checkpointed(body, policy=policy)(x).sum()
        assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], plain)
        assert torch.equal(torch.autograd.grad(loss, x)[0], plain)


def test_a_region_of_torch_cannot_hold_an_offload():
    def body(x):
        with offload(Memory()):
            return x.sin()

    with pytest.raises(UnsupportedError, match=r"inside of a region of torch.utils.checkpoint"):
        torch_checkpoint(body, torch.ones(400, requires_grad=True), use_reentrant=False)


def test_runtime_of_a_region_the_inner_one_of_two_takes_what_is_saved():
    outer, inner = Memory(), Memory()
    x = torch.randn(32, 32, requires_grad=True)

    def body(h):
        with offload(outer):
            h = h.exp()
            with offload(inner):
                h = h.tanh()
        return h.sum()

    found = torch.autograd.grad(checkpoint(body, x.sin()), x)

    assert torch.equal(found[0], torch.autograd.grad(x.sin().exp().tanh().sum(), x)[0])
    assert outer.bytes("put") == inner.bytes("put") == 32 * 32 * 4


def test_of_two_that_are_nested_the_inner_one_takes_what_is_saved():
    outer, inner = offload(Memory()), offload(Memory())
    x = torch.randn(32, 32, requires_grad=True)

    with outer:
        y = x.sin().exp()
        with inner, inner:
            z = y.cos() * 2
        z = z.tanh()
    (found,) = torch.autograd.grad(z.sum(), x)

    assert torch.equal(found, torch.autograd.grad((x.sin().exp().cos() * 2).tanh().sum(), x)[0])
    assert outer.copied_out_bytes == 2 * 32 * 32 * 4  # the exponential and the tangent
    assert inner.copied_out_bytes == 32 * 32 * 4  # the exponential again, for the cosine


def test_it_may_be_entered_again_and_used_as_a_decorator():
    context = offload(Memory())
    x = torch.randn(32, 32, requires_grad=True)

    for _ in range(3):
        with context:
            y = x.sin().exp().sum()
        y.backward()
    context(lambda: x.sin().exp())()

    assert context.copied_out_bytes == 4 * 32 * 32 * 4
    assert context.copied_in_bytes == 3 * 32 * 32 * 4


def test_other_threads_do_not_see_it():
    store, done = Memory(), []
    x = torch.randn(32, 32, requires_grad=True)

    with offload(store):
        thread = threading.Thread(target=lambda: done.append(x.sin().exp()))
        thread.start()
        thread.join()

    assert done and not store.log


def test_it_is_transparent_to_a_compiled_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x = torch.randn(32, 64, requires_grad=True)
    compiled = torch.compile(model, backend="aot_eager")
    plain = torch.autograd.grad(compiled(x).sin().sum(), [x, *model.parameters()])
    store = Memory()

    with offload(store):
        found = torch.autograd.grad(compiled(x).sin().sum(), [x, *model.parameters()])

    assert all(map(torch.equal, found, plain))
    assert store.bytes("put") == store.bytes("get") > 0


def test_a_transformer_of_half_precision():
    def run(context):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        x = torch.randn(4, 16, 64, requires_grad=True)
        with context, torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    store = Memory()
    plain = run(nullcontext())

    found = run(offload(store))

    assert all(map(torch.equal, found, plain))
    assert not store.live


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Host, Disk, lambda: Compressed(Host())], ids=["host", "disk", "compressed"])
def test_on_a_device(make):
    def run(context):
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True).cuda()
        x = torch.randn(4, 16, 64, device="cuda", requires_grad=True)
        with context:
            loss = model(x.sin()).square().mean()
        return torch.autograd.grad(loss, [x, *model.parameters()])

    plain = run(nullcontext())

    found = run(offload(make()))

    assert all(map(torch.equal, found, plain))


@pytest.mark.gpu
def test_streams_that_share_what_one_of_them_has_loaded():
    x = torch.randn(2048, 2048, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()

    def run(context):
        with context:
            h = x.sin()
            first = (h * h).sum()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                second = (h.exp() * h).sum()
            torch.cuda.current_stream().wait_stream(side)
            total = first + second
            del h
        return torch.autograd.grad(total, x)[0]

    plain = run(nullcontext())

    assert all(torch.equal(run(offload(Host())), plain) for _ in range(10))
