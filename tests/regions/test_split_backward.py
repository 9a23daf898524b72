"""Split backward: the input and the weight pass of torch.distributed.pipelining share one recompute of each region.

Torch's own checkpoint recomputes once per backward call, and the weight pass makes one call for each group of weights:
ten recomputes for a block in the style of Llama, where a session has one.
"""

import gc
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama import Attention, Llama
from logs import Log
from regions.comparing import Counted, live_regions
from torchremat import Session, UnsupportedError, checkpoint, session
from versions import NEEDS_SPLIT_FUNCTIONS, skip_unless

WIDTH = 8


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return x.sin() * self.weight


class Multiply(torch.autograd.Function):
    """Multiplies, and reads what it saved twice."""

    @staticmethod
    def forward(ctx, x, weight):
        y = x * weight
        ctx.save_for_backward(x, weight, y)
        return y.exp()

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        _, _, y = ctx.saved_tensors
        grad = grad * y.exp()
        return grad * weight, (grad * x).sum((0, 1))


class Custom(Scale):
    def forward(self, x):
        return Multiply.apply(x.sin(), self.weight)


KINDS = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "scale": Scale,
    "attention": lambda: Attention(WIDTH),
    "custom function": Custom,
    "batch norm": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.GELU()),
    "convolution": lambda: nn.Sequential(nn.Conv1d(4, 4, 3, padding=1), nn.GELU()),
    "llama": lambda: Llama(WIDTH),
}


def plain_call(layer, h):
    return layer(h)


class Step:
    """The training step of one pipeline stage, its microbatches in three phases: forward, input and weight pass."""

    def __init__(self, layers, microbatches=1):
        if any(isinstance(layer, Custom) for layer in layers):
            skip_unless(NEEDS_SPLIT_FUNCTIONS)
        self.layers = layers
        self.weights = [weight for layer in layers for weight in layer.parameters()]
        self.initial = {name: value.clone() for name, value in nn.ModuleList(layers).state_dict().items()}
        generator = torch.Generator().manual_seed(3)
        self.inputs = [torch.randn(2, 4, WIDTH, generator=generator) for _ in range(microbatches)]

    def begin(self):
        nn.ModuleList(self.layers).load_state_dict(self.initial)
        for weight in self.weights:
            weight.grad = None
        self.inputs = [x.detach().requires_grad_() for x in self.inputs]
        self.outputs, self.groups = {}, {}

    def forward(self, number, call):
        h = self.inputs[number]
        for layer in self.layers:
            h = call(layer, h)
        self.outputs[number] = h.sin()  # torch detaches it in place, which no view allows

    def input_pass(self, number):
        y = self.outputs[number]
        grads = [torch.ones_like(y)]
        _, self.groups[number] = stage_backward_input([y], grads, [self.inputs[number]], iter(self.weights))

    def weight_pass(self, number):
        stage_backward_weight(iter(self.weights), self.groups.pop(number))

    def full_pass(self, number):
        self.outputs[number].backward(torch.ones_like(self.outputs[number]))

    def result(self):
        buffers = [buffer.clone() for layer in self.layers for buffer in layer.buffers()]
        return [*(x.grad for x in self.inputs), *(weight.grad for weight in self.weights), *buffers]

    def run(self, call, order):
        self.begin()
        for one in order.split():
            phase = {"F": lambda n: self.forward(n, call), "I": self.input_pass, "W": self.weight_pass}
            {**phase, "B": self.full_pass}[one[0]](int(one[1:]))
        return self.result()


def counting(layers):
    """A call of each layer as a region, and the counts of its runs."""
    counted = {layer: Counted(layer) for layer in layers}
    return (lambda layer, h: checkpoint(counted[layer], h)), (lambda: [one.calls for one in counted.values()])


def all_equal(ours, plain):
    return len(ours) == len(plain) and all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("passes", [2, None])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_recomputed_once(kind, passes):
    step = Step([KINDS[kind]() for _ in range(3)])
    full = step.run(plain_call, "F0 B0")
    split = step.run(plain_call, "F0 I0 W0")
    call, calls = counting(step.layers)

    with session(passes):
        ours = step.run(call, "F0 I0 W0")

    assert calls() == [2, 2, 2]
    assert all_equal(ours, split) and all_equal(ours, full)


def test_without_a_session_each_backward_call_recomputes():
    step = Step([Llama(WIDTH)])
    plain = step.run(plain_call, "F0 I0 W0")
    call, calls = counting(step.layers)

    ours = step.run(call, "F0 I0 W0")

    # One forward, one recompute in the input pass, one for each of the nine groups of weights.
    assert calls() == [1 + 1 + 9]
    assert all_equal(ours, plain)


# -------------------------------------------------------------------------------------------------- microbatches

OVERLAPPING = ["F0 F1 I0 I1 W0 W1", "F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W3 W2"]


@pytest.mark.parametrize("kind", ["llama", "batch norm", "custom function"])
@pytest.mark.parametrize("order", OVERLAPPING)
def test_overlapping_microbatches_in_one_session(kind, order):
    microbatches = order.count("F")
    step = Step([KINDS[kind]() for _ in range(2)], microbatches)
    plain = step.run(plain_call, order)
    call, calls = counting(step.layers)

    with session(passes=2):
        ours = step.run(call, order)

    assert calls() == [2 * microbatches] * 2
    assert all_equal(ours, plain)


@pytest.mark.parametrize("passes", [2, None])
@pytest.mark.parametrize("order", OVERLAPPING)
def test_overlapping_microbatches_in_sessions_of_their_own(order, passes):
    microbatches = order.count("F")
    step = Step([Llama(WIDTH) for _ in range(2)], microbatches)
    plain = step.run(plain_call, order)
    call, calls = counting(step.layers)
    sessions = [Session(passes) for _ in range(microbatches)]
    phases = {"F": lambda n: step.forward(n, call), "I": step.input_pass, "W": step.weight_pass}

    step.begin()
    for one in order.split():
        number = int(one[1:])
        with sessions[number].active():
            phases[one[0]](number)
        if one[0] == "W":
            sessions[number].close()

    assert calls() == [2 * microbatches] * 2
    assert all_equal(step.result(), plain)


def test_two_sessions_are_not_active_at_once():
    one, other = Session(), Session()
    message = "a session is open in this thread already; sessions do not nest"

    with one.active():
        with pytest.raises(UnsupportedError, match=message), other.active():
            pass
        with pytest.raises(UnsupportedError, match=message), one.active():
            pass
    with other.active(), pytest.raises(UnsupportedError, match=message), session():
        pass


def test_a_session_of_no_pass_is_refused():
    with pytest.raises(UnsupportedError, match="passes=0: expected an int of at least 1"):
        Session(passes=0)


# ------------------------------------------------------------------------------------------------ nested, ahead


@pytest.mark.parametrize("passes", [2, None])
def test_nested_regions(passes):
    inner = [Llama(WIDTH) for _ in range(2)]
    step = Step([nn.Sequential(*inner)])
    plain = step.run(plain_call, "F0 I0 W0")
    inner_call, inner_calls = counting(inner)
    outer = Counted(lambda h: inner_call(inner[1], inner_call(inner[0], h)))

    with session(passes):
        ours = step.run(lambda _, h: checkpoint(outer, h), "F0 I0 W0")

    # The outer recompute has to run the first inner one, and stops at the input that the second one holds.
    assert outer.calls == 2 and inner_calls() == [3, 2]
    assert all_equal(ours, plain)


def test_recomputed_ahead_of_both_passes():
    step = Step([Llama(WIDTH) for _ in range(3)])
    plain = step.run(plain_call, "F0 I0 W0")
    call, calls = counting(step.layers)

    step.begin()
    with session(passes=2) as s:
        step.forward(0, call)
        assert s.recompute() == 1 and calls() == [1, 1, 2]
        assert s.recompute(2) == 2 and calls() == [2, 2, 2]
        step.input_pass(0)
        step.weight_pass(0)

    assert calls() == [2, 2, 2]
    assert all_equal(step.result(), plain)


def test_ahead_for_one_microbatch_while_another_is_in_its_passes():
    step = Step([Llama(WIDTH) for _ in range(2)], microbatches=2)
    plain = step.run(plain_call, "F0 F1 I0 I1 W0 W1")
    call, calls = counting(step.layers)
    one, other = Session(passes=2), Session(passes=2)

    step.begin()
    for number, own in enumerate((one, other)):
        with own.active():
            step.forward(number, call)
    with one.active():
        step.input_pass(0)
    assert other.recompute(2) == 2
    with other.active():
        step.input_pass(1)
    with one.active():
        step.weight_pass(0)
    with other.active():
        step.weight_pass(1)
    one.close()
    other.close()

    assert calls() == [4, 4]
    assert all_equal(step.result(), plain)


# --------------------------------------------------------------------------------------------------------- bytes


class Storages(TorchDispatchMode):
    """Knows which storages that were made under it are alive."""

    def __init__(self):
        super().__init__()
        self.alive = WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self.alive.update(one.untyped_storage() for one in tree_leaves(output) if isinstance(one, torch.Tensor))
        return output


class Recomputed:
    """A layer that knows the bytes which its recompute has made and which are alive."""

    def __init__(self, layer):
        self.layer = layer
        self.runs = Log()

    def __call__(self, h):
        with Storages() as storages:
            self.runs.append(storages)
            return self.layer(h)

    @property
    def alive(self):
        given = {id(weight.untyped_storage()) for weight in self.layer.parameters()}
        return sum(one.nbytes() for run in self.runs[1:] for one in run.alive if id(one) not in given)


@pytest.mark.parametrize("passes", [2, None])
def test_what_a_recompute_made_goes_when_the_session_closes(passes):
    step = Step([Llama(WIDTH) for _ in range(2)])
    layers = {layer: Recomputed(layer) for layer in step.layers}

    step.begin()
    with session(passes):
        step.forward(0, lambda layer, h: checkpoint(layers[layer], h))
        graph = step.outputs[0] * 1
        step.input_pass(0)
        after_input = [one.alive for one in layers.values()]
        step.weight_pass(0)
        after_weight = [one.alive for one in layers.values()]
    after_all = [one.alive for one in layers.values()]

    # The weight pass frees the nodes that it runs; those of the input pass alone wait for the session, or their graph.
    assert all(0 < late < early for late, early in zip(after_weight, after_input, strict=True))
    assert after_all == [0, 0] and graph.requires_grad


def test_what_a_recompute_made_goes_with_the_graph():
    step = Step([Llama(WIDTH)])
    recomputed = Recomputed(step.layers[0])
    before = len(live_regions())

    step.begin()
    with session(passes=2):
        step.forward(0, lambda _, h: checkpoint(recomputed, h))
        step.input_pass(0)
        after_input = recomputed.alive
        step.weight_pass(0)
        after_weight = recomputed.alive
        regions = len(live_regions()) - before

    assert after_input > 0 and after_weight == 0 and regions == 0


def test_a_tensor_that_both_passes_have_used_goes_before_the_session_closes():
    # Two products with weights: each saves its input (made here) and its weight, and runs in both passes.
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Scale(), Scale()

        def forward(self, x):
            return self.b(self.a(x))

    def alive_after_each_pass(passes):
        layer = Block()
        recomputed = Recomputed(layer)
        x = torch.randn(4, WIDTH, requires_grad=True)
        with session(passes):
            y = checkpoint(recomputed, x).sum()
            alive = []
            torch.autograd.grad(y, x, retain_graph=True)
            alive.append(recomputed.alive)
            torch.autograd.grad(y, [layer.a.weight, layer.b.weight], retain_graph=True)
            alive.append(recomputed.alive)
        return [*alive, recomputed.alive]

    one = 4 * WIDTH * 4
    # Saved and made here: the two sines, and the first product, which the second sine saves. That sine also runs in
    # both passes; the first sine, x, is an input.
    assert alive_after_each_pass(None) == [3 * one, 3 * one, 0]
    assert alive_after_each_pass(2) == [3 * one, 0, 0]


def test_nothing_outlives_a_session_of_its_own():
    gc.collect()
    before = len(live_regions())
    step = Step([Llama(WIDTH)])
    layer = Recomputed(step.layers[0])
    own = Session(passes=2)

    step.begin()
    with own.active():
        step.forward(0, lambda _, h: checkpoint(layer, h))
        step.input_pass(0)
    held = layer.alive
    step.outputs.clear()
    step.groups.clear()

    # The graph has gone, and with it all that the session held, though it is not closed.
    assert held > 0 and layer.alive == 0 and len(live_regions()) == before
