"""Sessions that are told which backward calls are those for inputs: what no weight pass needs is dropped there."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from llama import Llama
from logs import Log
from regions.comparing import Counted, Tied
from regions.test_split_backward import KINDS, WIDTH, Recomputed, Step, all_equal, counting
from torchremat import Session, checkpoint, checkpointed, session

OVERLAPPING = "F0 F1 F2 I0 F3 I1 W0 I2 W1 I3 W3 W2"


class Passes:
    """A session for each microbatch, and what was dropped too early."""

    def __init__(self, step):
        self.step = step
        self.sessions = {}
        self.mistakes = 0

    def recomputing(self, number): ...

    def recomputed(self, number, region, *, is_whole): ...

    def dropped_too_early(self):
        self.mistakes += 1

    def run(self, call, order, after=lambda phase: None):
        step = self.step
        step.begin()
        for phase, number in ((one[0], int(one[1:])) for one in order.split()):
            if phase == "F":
                self.sessions[number] = Session(watch=self)
            with self.sessions[number].active():
                if phase == "F":
                    step.forward(number, call)
                elif phase == "I":
                    with self.sessions[number].input_pass():
                        step.input_pass(number)
                else:
                    step.weight_pass(number)
            after(phase)
            if phase == "W":
                self.sessions.pop(number).close()
        return step.result()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_recomputed_once(kind):
    step = Step([KINDS[kind]() for _ in range(3)], microbatches=4)
    plain = step.run(lambda layer, h: layer(h), OVERLAPPING)
    call, calls = counting(step.layers)
    passes = Passes(step)

    ours = passes.run(call, OVERLAPPING)

    assert calls() == [8, 8, 8] and passes.mistakes == 0
    assert all_equal(ours, plain)


class Gated(nn.Module):
    """Saves the output of each of three functions without weights, and the input of one with."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return (x.exp().tanh().sigmoid() * self.weight).sin()


def test_what_leads_to_no_weight_goes_in_the_input_pass():
    step = Step([Gated()])
    layer = Recomputed(step.layers[0])
    alive = []

    Passes(step).run(lambda _, h: checkpoint(layer, h), "F0 I0 W0", lambda phase: alive.append(layer.alive))

    # Of five tensors (2 x 4 x WIDTH floats) that the recompute makes and saves, the product alone has to wait for the
    # weight pass: its input is the output of the sigmoid. After that it is gone as well, before the session closes.
    assert alive == [0, 2 * 4 * WIDTH * 4, 0]


def test_a_block_keeps_less_between_its_passes():
    step = Step([Llama(WIDTH)])
    layer = Recomputed(step.layers[0])
    between = {}

    for drops in (False, True):
        layer.runs.clear()
        session = Session()
        step.begin()
        with session.active():
            step.forward(0, lambda _, h: checkpoint(layer, h))
            if drops:
                with session.input_pass():
                    step.input_pass(0)
            else:
                step.input_pass(0)
            between[drops] = layer.alive
            step.weight_pass(0)
        session.close()

    # Attention keeps query, key, value, its own output and a number per row; SwiGLU three tensors of double width. The
    # inputs of the linear layers and norms stay.
    assert 0 < between[True] < 0.7 * between[False]


def test_between_two_uses_of_a_weight_the_region_is_recomputed_once_more():
    step = Step([Tied(WIDTH)])
    plain = step.run(lambda layer, h: layer(h), "F0 I0 W0")
    call, calls = counting(step.layers)
    passes = Passes(step)

    ours = passes.run(call, "F0 I0 W0")

    assert calls() == [3] and passes.mistakes == 1
    assert all_equal(ours, plain)


def saving(*operators):
    """A policy that saves the outputs of operators, and the storages that it has saved."""
    saved = []

    def policy(ctx, op, *args, **kwargs):
        chosen = op.overloadpacket.__name__ in operators
        if chosen:
            saved.append(StorageWeakRef(ctx.op_output.untyped_storage()))
        return chosen

    return policy, lambda: [not one.expired() for one in saved]


def test_what_a_policy_holds_and_no_weight_needs_goes_in_the_input_pass():
    step = Step([Gated()])
    plain = step.run(lambda layer, h: layer(h), "F0 I0 W0")
    # What exp and tanh return is needed by their own backward alone; that of the sigmoid by the product's as well,
    # which has a weight.
    policy, alive = saving("exp", "tanh", "sigmoid")
    found = Log()

    passes = Passes(step)
    ours = passes.run(
        lambda layer, h: checkpointed(layer, policy=policy)(h), "F0 I0 W0", lambda phase: found.append(alive())
    )

    assert found == [[True, True, True], [False, False, True], [False, False, False]]
    assert all_equal(ours, plain) and passes.mistakes == 0


def test_what_a_policy_held_between_two_uses_of_a_weight_is_recomputed():
    step = Step([Tied(WIDTH)])
    plain = step.run(lambda layer, h: layer(h), "F0 I0 W0")
    counted = Counted(step.layers[0])
    policy, _ = saving("sin", "exp")
    passes = Passes(step)

    ours = passes.run(lambda _, h: checkpointed(counted, policy=policy)(h), "F0 I0 W0")

    # All that autograd saves is held but the first product, so the input pass recomputes that. The other one asks for
    # what was dropped, and recomputes all.
    assert counted.calls == 3 and passes.mistakes == 1
    assert all_equal(ours, plain)


@pytest.mark.parametrize(("passes", "left"), [(1, [False]), (None, [True])])
def test_what_a_policy_holds_goes_in_the_recompute_for_a_single_pass(passes, left):
    x = torch.randn(4, WIDTH, requires_grad=True)
    # What sin returns is saved by no node: the recompute of the exponential begins from it.
    policy, alive = saving("sin")

    with session(passes):
        loss = checkpointed(lambda x: (x.sin() + 1).exp(), policy=policy)(x).sum()
        assert alive() == [True]
        loss.backward(retain_graph=True)

        assert alive() == left
