"""A U-Net whose skips jump over stages: the gradients, and who holds what."""

import copy

import pytest
import torch

import torchremat
import unet
from logs import Log
from pipeline.holding import StageBytes, own_memory
from torchremat import Pipe
from turns import in_turn

MODES = ["never", "always", "except_last"]
# Stage 0 stashes both skips and stage 3 pops them: 2 x (2 convs, stash), a pool between | pool, conv | conv, grow |
# the rest.
BALANCE = [7, 2, 2, 8]


def model():
    return unet.UNet(2, 2, 4)


def loss_of(output):
    return output.square().mean()


def test_the_layers_are_those_of_the_module():
    plain = model()
    layers = copy.deepcopy(plain).layers()
    x = torch.rand(2, 3, 16, 16)

    expected, output = plain(x), layers(x)
    loss_of(expected).backward()
    loss_of(output).backward()

    assert len(layers) == 19
    assert torch.equal(output, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(layers.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("checkpoint", MODES)
@in_turn("chunks", range(1, 9))
def test_gradients_are_those_of_the_plain_model(checkpoint, chunks):
    plain = model()
    pipe = Pipe(copy.deepcopy(plain).layers(), BALANCE, chunks=chunks, checkpoint=checkpoint)
    x = torch.rand(8, 3, 16, 16)

    output = pipe(x)
    loss_of(output).backward()

    expected = torch.cat([plain(rows) for rows in x.chunk(chunks)])
    loss_of(expected).backward()
    assert torch.equal(output, expected)
    gradients, wanted = ({name: one.grad for name, one in each.named_parameters()} for each in (pipe, plain.layers()))
    assert len(gradients) == 22
    assert all(torch.equal(gradient, wanted[name.split(".", 2)[2]]) for name, gradient in gradients.items())


def test_skips_are_recomputed_with_their_stage():
    runs = Log()
    layers = model().layers()
    layers[2].register_forward_hook(lambda *_: runs.append("stash" if not torchremat.is_recomputing() else "again"))
    layers[11].register_forward_hook(lambda *_: runs.append("pop" if not torchremat.is_recomputing() else "again"))

    loss_of(Pipe(layers, BALANCE, chunks=2)(torch.rand(4, 3, 16, 16))).backward()

    assert runs == ["stash", "stash", "pop", "pop", "again", "again"]


# Bytes of one microbatch of 2 images, 16 x 16 floats, 4 channels on the first level and twice as many on each below:
SKIP_0 = 2 * 4 * 16 * 16 * 4
SKIP_1 = 2 * 8 * 8 * 8 * 4
TO_1 = SKIP_1  # what was stashed last is passed on as well
TO_2 = 2 * 16 * 4 * 4 * 4
TO_3 = 2 * 16 * 8 * 8 * 4
OUTPUT = 2 * 1 * 16 * 16 * 4


def test_stages_between_hold_no_skip():
    pipe = Pipe(model().layers(), BALANCE, chunks=4, checkpoint="always")
    held = StageBytes(pipe.partitions)
    x = torch.rand(8, 3, 16, 16)

    with own_memory(), held:
        output = pipe(x)
        live = dict(held.live)
        loss_of(output).backward()

    # The input of stage 0 is a part of what was there before.
    assert live == {0: 0, 1: 4 * TO_1, 2: 4 * TO_2, 3: 4 * (TO_3 + SKIP_0 + SKIP_1), None: 4 * OUTPUT}
    pipe.zero_grad()
    assert +held.live == {None: 4 * OUTPUT}


# The last 8 layers pop; what is in front of them lies on one stage, two or three.
@pytest.mark.parametrize("counts", [[11, 8], [7, 4, 8], [7, 2, 2, 8]], ids=str)
def test_skips_are_held_by_the_stage_that_pops(counts):
    pipe = Pipe(model().layers(), counts, chunks=2, checkpoint="always")
    held = StageBytes(pipe.partitions)
    x = torch.rand(4, 3, 16, 16)

    with own_memory(), held:
        output = pipe(x)

    between = [2 * TO_1, 2 * TO_2][: len(counts) - 2]
    assert [held.live[stage] for stage in range(len(counts))] == [0, *between, 2 * (TO_3 + SKIP_0 + SKIP_1)]
    assert output.shape == (4, 1, 16, 16)


def test_without_recomputes_the_same_is_held_as_by_plain_layers():
    pipe = Pipe(model().layers(), BALANCE, chunks=2, checkpoint="never")
    held = StageBytes(pipe.partitions)
    x = torch.rand(4, 3, 16, 16)

    with own_memory(), held:
        output = pipe(x)

    # Pool: its input and its indices, of 8 bytes each for a quarter of the elements. Conv: its input; the inputs of its
    # norm and its activation; the norm's mean and deviation.
    pool = TO_1 + TO_1 // 4 * 2
    norms = 2 * 2 * 16 * 4
    conv = TO_1 // 4 + TO_2 + TO_2 + norms
    assert held.live[1] == 2 * (pool + conv)
    assert output.requires_grad
