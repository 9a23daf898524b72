"""What regions and policies would free: decided from a log, and compared with what they do free."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import torchremat
from logs import Log
from models import gpt_step
from probes.memory import StorageTracker
from torchremat import PolicyError, UnsupportedError, checkpoint, saved
from torchremat.policies import everything_saved, save_attention, save_larger_than, save_matmuls, save_only_these_names

ROWS, WIDTH = 4, 8
TENSOR = ROWS * WIDTH * 4


def a_model(blocks=3):
    """Blocks that save their input, the input of tanh's backward, and that of the second linear: three storages."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())
            for _ in range(blocks)
        )
    )


def a_step(x):
    return lambda model: model(x).sum()


def an_input():
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def save_nothing(ctx, op, *args, **kwargs):
    return False


def save_everything(ctx, op, *args, **kwargs):
    return True


def test_blocks_as_regions_by_hand():
    report = saved(a_model(), a_step(an_input()))

    # Each block saves the results of tanh and sigmoid; the latter is the next block's input, and saved there as well.
    assert report.saved_bytes == 3 * 2 * TENSOR
    assert report.blocks == ("0", "1", "2")
    first, last = report.freed_by(blocks=["0"]), report.freed_by(blocks=["2"])
    # The first: tanh goes; its input is the step's own; sigmoid's result stays, for block 1 saves it.
    assert (first.freed_bytes, first.input_bytes) == (TENSOR, 0)
    # The last: both go; its input is there anyway, for the sigmoid of block 1.
    assert (last.freed_bytes, last.input_bytes) == (2 * TENSOR, TENSOR)
    # All: what is left are the inputs of 1 and 2.
    every = report.freed_by()
    assert (every.before_bytes, every.kept_bytes, every.freed_bytes) == (6 * TENSOR, 2 * TENSOR, 4 * TENSOR)


@pytest.mark.parametrize("blocks", [["0"], ["1"], ["0", "2"], ["0", "1", "2"], ["1.0", "1.1"], ["1", "1.1"]])
def test_what_is_predicted_is_what_regions_keep(blocks):
    model, step = a_model(), a_step(an_input())
    predicted = saved(model, step).freed_by(blocks=blocks)

    for block in blocks:
        torchremat.wrap(model, block)
    found = saved(model, step)

    assert found.saved_bytes == predicted.kept_bytes
    assert found.regions == len(blocks)


def test_a_transformer_as_regions():
    model, step = gpt_step(blocks=3, width=32, context=16, heads=2)
    report = saved(model, step)

    assert set(report.blocks) >= {"blocks.0", "blocks.1", "blocks.2"}
    predicted = report.freed_by(blocks=["blocks.0", "blocks.1", "blocks.2"])
    torchremat.wrap(model, "blocks.*")
    found = saved(model, step)
    assert (found.saved_bytes, found.regions) == (predicted.kept_bytes, 3)
    assert predicted.freed_bytes > 0.7 * report.saved_bytes


def test_a_module_around_everything_is_taken_apart():
    class Shell(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = a_model()

        def forward(self, x):
            return self.inner(x)

    assert saved(Shell(), a_step(an_input())).blocks == ("inner.0", "inner.1", "inner.2")


def test_a_policy_by_hand():
    report = saved(a_model(), a_step(an_input()))

    found = report.freed_by(save_products, blocks=["1"])

    # Block 1 saves its input, tanh and sigmoid, the last of which block 2 saves too. The region keeps its input, and of
    # the two products the first: tanh is made of it. After the second comes sigmoid alone, which is saved outside of
    # the region as well, but not by it: it is recomputed, and needs the second product.
    assert found.chosen == 2
    assert found.kept_bytes == report.saved_bytes - TENSOR + 2 * TENSOR
    assert found.freed_bytes == -TENSOR


def test_a_policy_that_saves_nothing_is_a_plain_region():
    report = saved(a_model(), a_step(an_input()))

    nothing, plain = report.freed_by(save_nothing), report.freed_by()

    assert (nothing.kept_bytes, nothing.chosen) == (plain.kept_bytes, 0)
    assert nothing.operators > 0


def test_a_policy_that_saves_everything_frees_nothing_and_keeps_nothing_more():
    report = saved(a_model(), a_step(an_input()))

    # All that autograd saves is served, so that nothing is recomputed, and no other result is asked for.
    assert report.freed_by(save_everything).freed_bytes == 0


def test_what_a_policy_offloads_is_apart():
    report = saved(a_model(), a_step(an_input()))

    def offload_tanh(ctx, op, *args, **kwargs):
        if op == torch.ops.aten.tanh.default:
            return CheckpointPolicy.MUST_CPU_OFFLOAD
        return CheckpointPolicy.MUST_SAVE

    found = report.freed_by(offload_tanh)

    assert (found.freed_bytes, found.stored_bytes) == (3 * TENSOR, 3 * TENSOR)


POLICIES = {
    "function of products": save_products,
    "function that saves nothing": save_nothing,
    "function that saves everything": save_everything,
    "save_matmuls": save_matmuls,
    "save_attention": save_attention,
    "everything_saved": everything_saved,
    "save_larger_than": save_larger_than(8192),
    "both": save_matmuls | save_attention,
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["blocks", "transformer"])
def test_a_policy_is_predicted_as_the_regions_do_it(policy, name):
    if name == "blocks":
        model, step, blocks = a_model(), a_step(an_input()), ["0", "1", "2"]
    else:
        model, step = gpt_step(blocks=2, width=32, context=16, heads=2)
        blocks = ["blocks.0", "blocks.1"]
    predicted = saved(model, step).freed_by(policy, blocks=blocks)
    plain = bytes_after_forward(model, step)

    for block in blocks:
        torchremat.wrap(model, block, policy=policy)

    assert plain - bytes_after_forward(model, step) == predicted.freed_bytes


def bytes_after_forward(model, step):
    """The bytes of storages that the step has made and that are alive at its end."""
    tracker = StorageTracker(torch.device("cpu"))
    with tracker:
        loss = step(model)
    assert loss.requires_grad  # and is alive, with its graph
    return tracker.live_bytes


def test_a_policy_is_told_shapes_results_and_modules():
    seen = []

    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.aten.addmm.default:
            seen.append((ctx.module, ctx.modules, tuple(args[1].shape), tuple(ctx.op_output.shape), args[1].stride()))
        return False

    saved(a_model(), a_step(an_input())).freed_by(policy, blocks=["1"])

    assert seen == [
        ("1.0", ["1.0", "1", ""], (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, 1)),
        ("1.2", ["1.2", "1", ""], (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, 1)),
    ]


def test_casts_of_weights_by_autocast_are_no_policys_business():
    x = an_input()
    asked = []

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().sum()

    def policy(ctx, op, *args, **kwargs):
        asked.append(op)
        return False

    saved(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)), step).freed_by(policy, blocks=["0"])

    # x is a leaf that asks for a gradient as well.
    assert torch.ops.aten._to_copy.default not in asked and torch.ops.aten.mm.default in asked


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"blocks": ["7"]}, PolicyError, "calls no module '7' with grad mode on; it calls 'Sequential', '0'"),
        ({"policy": lambda *_, **__: "save"}, PolicyError, "answered 'save'"),
    ],
)
def test_what_cannot_be_answered_is_an_error(arguments, error, message):
    report = saved(a_model(), a_step(an_input()))

    with pytest.raises(error, match=message):
        report.freed_by(**arguments)


def test_names_of_tensors_are_not_logged():
    with pytest.raises(UnsupportedError, match="names of tensors"):
        saved(a_model(), a_step(an_input())).freed_by(save_only_these_names("x"))


def test_checkpoint_of_a_function_is_not_asked_again():
    x = an_input()
    runs = Log()

    def body(x):
        runs.append(1)
        return x.sin().exp()

    report = saved(lambda: checkpoint(body, x).sum())
    report.freed_by(save_everything, blocks=[])

    assert runs == [1]


def test_the_policies_of_the_library_are_listed():
    report = saved(a_model(), a_step(an_input()))
    found = report.freed_by_policies()

    assert list(found) == [
        "nothing_saved",
        "save_attention",
        "save_convolutions",
        "save_unbatched_matmuls",
        "save_matmuls",
        "everything_saved",
    ]
    assert found["save_matmuls"] == report.freed_by(save_matmuls)
    assert found["nothing_saved"].freed_bytes > found["everything_saved"].freed_bytes == 0
    assert [one["policy"] for one in report.as_dict()["policies"]] == list(found)
    assert "save_unbatched_matmuls" in str(report)
