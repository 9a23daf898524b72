"""What a report says of each save: where it comes from, what it repeats, and what hooks of others hold."""

import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import checkpoint

import torchremat
from torchremat import saved
from torchremat.policies import save_operators

BATCH, WIDTH = 4, 8
TENSOR = BATCH * WIDTH * 4  # bytes of a float32 tensor of this shape


def a_batch():
    return torch.randn(BATCH, WIDTH)


def places(report, kind="saved"):
    return [one.place for one in report.entries if one.kind == kind]


# -------------------------------------------------------------------------------------------------- where it comes from


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, 2 * x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1]


def test_an_entry_says_where_it_was_saved():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Softmax(-1)))
    x = a_batch()

    def step(model):
        return model(x).sum()

    report = saved(model, step)
    entry = report.entries[-1]

    assert (entry.place, entry.operator, entry.function) == (
        "SoftmaxBackward0.result",
        "aten._softmax.default",
        "softmax",
    )
    assert entry.module == "1.0"
    line = step.__code__.co_firstlineno + 1
    assert entry.source == f"{Path(__file__).relative_to(Path.cwd())}:{line} in {step.__qualname__}"
    assert (entry.shape, entry.dtype, entry.strides, entry.device) == ((BATCH, WIDTH), "float32", (WIDTH, 1), "cpu")


def test_a_custom_function_goes_by_its_name():
    x = a_batch().requires_grad_()

    report = saved(lambda: Squared.apply(x.neg()).sum())

    assert [(one.place, one.operator) for one in report.entries] == [
        ("SquaredBackward.tensors[0]", "Squared"),
        ("SquaredBackward.tensors[1]", "Squared"),
    ]


def test_a_number_that_a_tensor_is_multiplied_with_is_saved_too():
    x = a_batch().requires_grad_()

    report = saved(lambda: (x * 2.5).sum())

    (entry,) = report.entries
    assert (entry.place, entry.shape, entry.storage_bytes) == ("MulBackward0.other", (), 8)


def test_what_is_saved_before_and_after_an_operator_is_that_operators():
    x = a_batch().requires_grad_()

    report = saved(lambda: (x.sin().cos() * x.exp()).sum())

    # `sin` and `cos` save what they get, `exp` saves what it makes.
    assert [(one.place, one.operator) for one in report.entries] == [
        ("SinBackward0.self", "aten.sin.default"),
        ("CosBackward0.self", "aten.cos.default"),
        ("ExpBackward0.result", "aten.exp.default"),
        ("MulBackward0.other", "aten.mul.Tensor"),
        ("MulBackward0.self", "aten.mul.Tensor"),
    ]


# ------------------------------------------------------------------------------------------ copies and what is too much


def test_casts_of_autocast_are_copies():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = a_batch()

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    report = saved(model, step)

    # x and the second weight, cast; the first weight is not saved, as x asks for no gradient.
    assert [(one.source_kind, one.freed_bytes) for one in report.copies] == [
        ("input", TENSOR // 2),
        ("parameter", WIDTH * WIDTH * 2),
    ]
    assert {one.operator for one in report.copies} == {"aten._to_copy.default"}


def test_an_upcast_and_a_contiguous_copy_beside_their_sources():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        return (y.double().sin().float() + y.t().contiguous().cos().t()).sum()

    report = saved(step)

    # `exp` saves y; `sin` saves it in float64, and `cos` transposed.
    y = report.entries[0].storages[0]
    assert [(one.source, one.operator, one.freed_bytes) for one in report.copies] == [
        (y, "aten._to_copy.default", 2 * TENSOR),
        (y, "aten.clone.default", TENSOR),
    ]


def test_what_was_written_since_is_no_copy():
    x = a_batch().requires_grad_()

    def copied(then):
        def step():
            y = x.exp().neg()
            copy = y.clone()
            then(y, copy)
            return (y.sin() + copy.sin()).sum()

        return saved(step).copies

    assert len(copied(lambda y, copy: None)) == 1
    assert copied(lambda y, copy: copy.mul_(2)) == ()
    assert copied(lambda y, copy: y.mul_(2)) == ()


def test_a_copy_of_a_copy_that_nobody_keeps():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        return y.double().clone().sin().sum()

    (copy,) = saved(step).copies

    assert copy.freed_bytes == 2 * TENSOR
    assert copy.source_kind == "saved"


def test_shapes_and_bits():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    report = saved(lambda: F.max_pool2d(F.relu(x.neg()), 2).sum())
    needs = {one.place: one.need for one in report.entries}

    assert needs == {
        "ReluBackward0.result": "mask",
        "MaxPool2DWithIndicesBackward0.self": "shape",
        "MaxPool2DWithIndicesBackward0.result1": None,
    }
    # The result of relu is what the pool saves: one storage, of which bits would do.
    assert report.by_need() == {"mask": 2 * 3 * 8 * 8 * 4}


# ------------------------------------------------------------------------------------------------------ hooks of others


def test_regions_keep_their_inputs_and_slots_of_no_bytes():
    x = a_batch()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    torchremat.wrap(model, "[12]")

    report = saved(model, lambda model: model(x).sum())

    # The first block saves x and its tanh, which is the input of the first region; the other input is the tanh of that.
    assert [(one.operator, one.kind) for one in report.entries] == [
        ("aten.addmm.default", "input"),
        ("aten.tanh.default", "saved"),
        ("input of a region", "saved"),
        ("input of a region", "saved"),
    ]
    assert report.saved_bytes == 2 * TENSOR
    # Each saves an input and a weight for the linear, and the result of tanh.
    assert (report.regions, report.region_slots) == (2, 6)


def test_regions_keep_what_reaches_them_past_their_arguments():
    x = a_batch().requires_grad_()

    def choosing(x):
        # Of 4 * 8 bools: 32 B, which the region keeps and nobody saves.
        chosen = torchremat.frozen("chosen", x > 0)
        return torch.where(chosen, x, 0).exp()

    report = saved(lambda: torchremat.checkpoint(choosing, x).sum())

    assert [(one.operator, one.kind, one.storage_bytes) for one in report.entries] == [
        ("input of a region", "input", TENSOR),
        ("input of a region", "saved", 32),
    ]


def test_torchs_own_checkpoint():
    x = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    report = saved(model, lambda model: checkpoint(model, x, use_reentrant=False).sum())

    expected = [("checkpoint", "input")]
    if hasattr(torchs, "_NoopSaveInputs"):  # torch 2.11 holds inputs in a node of its own, an empty tensor with them
        expected = [("_NoopSaveInputs", "saved"), ("_NoopSaveInputs", "input")]
    assert [(one.operator, one.kind) for one in report.entries] == expected
    assert sum(report.unknown.values()) == 2
    assert "2 _Holder" in str(report)


def test_hooks_that_keep_another_tensor():
    x = a_batch().requires_grad_()

    def step():
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor.double(),), lambda packed: packed[0].float()
        ):
            return x.neg().sin().sum()

    report = saved(step)

    # What is kept is what the hook made of it; place and operator are known all the same.
    (entry,) = report.entries
    assert (entry.place, entry.operator, entry.dtype) == ("SinBackward0.self", "aten.sin.default", "float64")
    assert report.saved_bytes == 2 * TENSOR


def test_what_another_thread_saves_is_found_in_the_graph():
    x = a_batch().requires_grad_()

    def step():
        found = []
        thread = threading.Thread(target=lambda: found.append(x.exp()))
        thread.start()
        thread.join()
        return found[0].sin().sum()

    report = saved(step)

    # Hooks are a thread's own, and so are the numbers of nodes: which operator it was is not known.
    assert [(one.place, one.operator) for one in report.entries] == [
        ("SinBackward0.self", "aten.sin.default"),
        ("ExpBackward0.result", ""),
    ]
    assert report.saved_bytes == TENSOR


def test_a_graph_from_before_the_step_is_kept_as_well():
    x = a_batch().requires_grad_()
    y = x.exp() + 1

    report = saved(lambda: y.cos().sum())

    assert [(one.place, one.kind) for one in report.entries] == [
        ("CosBackward0.self", "input"),
        ("ExpBackward0.result", "saved"),
    ]


def graph_storages(loss):
    """The storages that a plain graph holds, by address, asked from its nodes: what a transform has used up is none."""
    found, todo, done = {}, [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in done:
            continue
        done.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor):
                found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        todo += [following for following, _ in node.next_functions]
    return found


def score(model):
    return lambda row: model(row).square().sum()


TRANSFORMED = {
    "grad": lambda model, x: torch.func.grad(score(model))(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(BATCH, WIDTH))[0],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]),
    "of each sample": lambda model, x: torch.func.vmap(torch.func.grad(score(model)))(x),
    "of parameters": lambda model, x: torch.func.grad(
        lambda own: torch.func.functional_call(model, own, (x,)).square().sum()
    )(dict(model.named_parameters()))["0.weight"],
}


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_what_is_saved_around_a_reverse_mode_transform_is_reported_and_what_it_saves_itself_is_gone(kind):
    # These transforms refuse saved-tensor hooks, with which a step is watched: torch's error said so.
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)), a_batch()

    def step(model):
        return TRANSFORMED[kind](model, x).square().mean() + model(x).mean()

    loss = step(model)
    plain = graph_storages(loss)
    before = {one.untyped_storage().data_ptr() for one in (*model.parameters(), x)}

    report = saved(model, step)

    assert report.saved_bytes == sum(size for address, size in plain.items() if address not in before) > 0


def test_a_step_that_fails_after_a_transform_leaves_hooks_as_they_were():
    def step():
        torch.func.grad(lambda one: one.sin().sum())(a_batch())
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        saved(step)

    assert torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None
    assert torch.func.grad(torch.sin)(torch.tensor(0.0)) == 1


def test_what_a_store_has_is_shown_apart():
    x = torch.randn(64, WIDTH, requires_grad=True)
    offload = torchremat.offload(torchremat.Host(), min_bytes=0)

    def step():
        with offload:
            y = x.neg()
            z = (y.sin() + y.t().cos().t()).sum()
        return z + x.exp().sum()

    report = saved(step)

    # `sin` and `cos` save one storage, the second as a view of it: the store has its bytes once.
    size = 64 * WIDTH * 4
    assert [(one.place, one.operator, one.kind) for one in report.entries] == [
        ("ExpBackward0.result", "aten.exp.default", "saved"),
        ("SinBackward0.self", "aten.sin.default", "stored"),
        ("CosBackward0.self", "aten.cos.default", "stored"),
    ]
    assert (report.saved_bytes, report.stored_bytes, offload.copied_out_bytes) == (size, size, size)
    assert [one.shape for one in report.entries[1:]] == [(64, WIDTH), (WIDTH, 64)]
    assert "taken by a store" in str(report)


def test_what_a_store_leaves_in_place():
    model = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(64, WIDTH, requires_grad=True)

    def step(model):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", torchremat.StoreWarning)
            with torchremat.offload(torchremat.Host(limit=64), min_bytes=0):
                return model(x).sin().sum()

    report = saved(model, step)

    # The weight stays, as it is a parameter, and for the rest the store has no room.
    assert [(one.place, one.kind) for one in report.entries] == [
        ("AddmmBackward0.mat1", "input"),
        ("AddmmBackward0.mat2", "parameter"),
        ("SinBackward0.self", "saved"),
    ]
    assert (report.saved_bytes, report.stored_bytes) == (64 * WIDTH * 4, 0)


def test_inputs_of_regions_in_a_store():
    x = torch.randn(64, WIDTH)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    torchremat.wrap(model, "[12]")

    def step(model):
        with torchremat.offload(torchremat.Host(), min_bytes=0):
            return model(x).sum()

    report = saved(model, step)

    # The input of block 1 is the result of tanh in block 0, which is saved there as well.
    assert sorted((one.operator, one.kind) for one in report.entries) == [
        ("aten.addmm.default", "stored"),
        ("aten.tanh.default", "stored"),
        ("input of a region", "stored"),
        ("input of a region", "stored"),
    ]
    assert (report.saved_bytes, report.stored_bytes, report.regions) == (0, 3 * 64 * WIDTH * 4, 2)


def test_what_a_store_has_as_bits():
    x = torch.randn(64, WIDTH, requires_grad=True)

    def step():
        with torchremat.offload(torchremat.Compressed(), min_bytes=0):
            return (F.relu(x.neg()) * 2).sum()

    report = saved(step)

    (relu,) = [one for one in report.entries if one.place == "ReluBackward0.result"]
    assert (relu.kind, relu.storage_bytes, relu.tensor_bytes) == ("stored", 64 * WIDTH // 8, 64 * WIDTH * 4)
    assert relu.shape == (64, WIDTH) and relu.operator == "aten.relu.default"


def test_what_regions_keep_by_a_policy():
    x = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    policy = save_operators("aten.addmm", "aten.sigmoid")
    torchremat.wrap(model, "", policy=policy)

    report = saved(model, lambda model: model(x).sum())

    # The result of tanh is recomputed, from that of the second linear, which is kept for it. The results of the first
    # one and of sigmoid are kept too, and autograd saves the latter: one storage.
    made = [(one.place, one.kind) for one in report.entries if one.kind == "saved"]
    assert made.count(("kept by a policy", "saved")) == 3
    assert report.saved_bytes == 3 * TENSOR
    assert ("SigmoidBackward0.result", "saved") in made


# ------------------------------------------------------------------------------------------------------------ compiled


@pytest.fixture(scope="module")
def compiled_report():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    compiled = torch.compile(model, backend="aot_eager")
    x = a_batch()

    def step(model):
        return compiled(x).square().sin().sum()

    return saved(model, step)


def test_compiled_code_is_one_node(compiled_report):
    report = compiled_report

    nodes = [one.node for one in report.entries]
    assert report.is_compiled
    assert nodes.count("CompiledFunctionBackward") == len(nodes) - 2
    # Outside of the graph operators are known.
    assert [(one.place, one.operator) for one in report.entries[-2:]] == [
        ("PowBackward0.self", "aten.pow.Tensor_Scalar"),
        ("SinBackward0.self", "aten.sin.default"),
    ]
    # x is the step's; the graph saves the result of tanh; pow its input and sin the square.
    assert report.saved_bytes == 3 * TENSOR


def test_no_policy_is_asked_about_compiled_code(compiled_report):
    with pytest.raises(torchremat.UnsupportedError, match="compiled code ran"):
        compiled_report.freed_by(lambda ctx, op, *args, **kwargs: True, blocks=[])
