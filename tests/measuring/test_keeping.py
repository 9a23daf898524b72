"""What autograd keeps: bytes counted by hand, on steps of every kind, and no sign of it afterwards."""

import gc
import warnings
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torchremat
from models import Block
from torchremat import MutationError, StepError, saved_tensors
from torchremat.policies import save_operators

BATCH, WIDTH = 4, 8
TENSOR = BATCH * WIDTH * 4  # bytes of a float32 tensor of this shape


def a_batch():
    return torch.randn(BATCH, WIDTH)


def places(report, kind="saved"):
    return [one.place for one in report.entries if one.kind == kind]


def kept_in_graph(loss):
    """The storages below a loss, read from the nodes alone: another way to the same set."""
    found, waiting, seen = set(), [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                values = getattr(node, name)
                for value in values if isinstance(values, tuple | list) else [values]:
                    if isinstance(value, torch.Tensor):
                        found.add((value.untyped_storage().data_ptr(), value.untyped_storage().nbytes()))
        waiting += [one for one, _ in node.next_functions]
    return found


# ----------------------------------------------------------------------------------------------------- counted by hand


def test_linear_relu_layer_norm():
    x = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))

    report = saved_tensors(lambda model: model(x).sum(), model)

    # The first linear saves x, a tensor of the step's (its weight needs no place: x asks for no gradient). ReLU saves
    # its result, which is the norm's input as well; the norm saves mean and deviation of each row, weight and bias; the
    # last linear the norm's result and its own weight. `sum` saves nothing.
    assert places(report) == [
        "ReluBackward0.result",
        "NativeLayerNormBackward0.input",
        "NativeLayerNormBackward0.result1",
        "NativeLayerNormBackward0.result2",
        "AddmmBackward0.mat1",
    ]
    assert report.saved_bytes == TENSOR + 2 * BATCH * 4 + TENSOR
    assert report.bytes_by_save == TENSOR + TENSOR + 2 * BATCH * 4 + TENSOR
    assert report.parameter_bytes == WIDTH * 4 + WIDTH * 4 + WIDTH * WIDTH * 4
    assert report.bytes_of("input") == TENSOR
    assert report.by_operator() == {
        "ReluBackward0": TENSOR,
        "AddmmBackward0": TENSOR,
        "NativeLayerNormBackward0": 2 * BATCH * 4,
    }
    assert report.by_module() == {"1": TENSOR, "3": TENSOR, "2": 2 * BATCH * 4}
    assert report.by_dtype() == {"float32": 2 * TENSOR + 2 * BATCH * 4}


def test_dropout_softmax_and_masks():
    x = a_batch().requires_grad_()
    mask = torch.rand(BATCH, WIDTH) > 0.5

    report = saved_tensors(lambda: F.dropout(x, 0.5).masked_fill(mask.logical_not(), 0).softmax(-1).sum())

    # Dropout is a product with noise on a CPU, which is saved; the mask has one byte for each element; softmax saves
    # its result, and `sum` nothing.
    assert places(report) == ["MulBackward0.other", "MaskedFillBackward0.mask", "SoftmaxBackward0.result"]
    assert report.by_dtype() == {"float32": 2 * TENSOR, "bool": BATCH * WIDTH}
    assert report.by_need() == {"mask": BATCH * WIDTH}


def test_attention():
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))

    report = saved_tensors(lambda: F.scaled_dot_product_attention(q.neg(), k.neg(), v.neg()).sum())

    one = 2 * 3 * 5 * 8 * 4
    # Query, key, value and the result, and a number for each row of the scores, of which no matrix is kept.
    assert report.saved_bytes == 4 * one + 2 * 3 * 5 * 4
    assert {entry.slot for entry in report.entries} == {"query", "key", "value", "output", "logsumexp"}


def test_a_transformer_block_has_18_saves_of_15_storages():
    block = Block(32, 2)
    x = torch.randn(2, 16, 32, requires_grad=True)

    def step(block):
        h = x.neg()
        h = h + F.dropout(block.attend(block.norm1(h)), 0.1)
        return (h + F.dropout(block.down(F.gelu(block.up(block.norm2(h)))), 0.1)).sum()

    report = saved_tensors(step, block)

    # Norms 2 x 3, linears 4 x 1, gelu 1, dropouts 2 x 1, attention 5. Query, key and value are views of one storage,
    # and the result of attention is the input of the linear after it.
    made = [one.size for one in report.storages.values() if one.kind == "saved"]
    assert (len(places(report)), len(made)) == (18, 15)
    rows, element = 2 * 16, 4
    # In each row: h, its norm and noise, twice; qkv; the result of attention and a sum for each head; up and gelu; mean
    # and deviation, twice.
    assert report.saved_bytes == sum(made) == rows * element * (6 * 32 + 3 * 32 + 32 + 2 + 2 * 128 + 4)


def test_what_is_saved_twice_is_counted_once():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        return (y * y[:2].repeat(2, 1) + y.t().reshape(BATCH, WIDTH)).sum()

    report = saved_tensors(step)
    exp, product = report.entries[0], next(one for one in report.entries if one.slot == "self")

    assert exp.place == "ExpBackward0.result"
    assert product.storages == exp.storages and product.others == (0,) and not product.is_first
    assert exp.storage_bytes == product.storage_bytes == TENSOR


def test_a_slice_keeps_all_of_its_storage():
    x = torch.randn(100, 8, requires_grad=True)

    report = saved_tensors(lambda: x.neg()[:1].sin().sum())

    (entry,) = report.entries
    assert (entry.tensor_bytes, entry.storage_bytes, report.saved_bytes) == (32, 3200, 3200)


def test_views_of_a_parameter_are_recognised_by_their_storage():
    model = nn.Linear(WIDTH, WIDTH)
    x = a_batch().requires_grad_()

    report = saved_tensors(lambda model: (model(x) * model.weight[0]).sum(), model)

    # `mat2` of a linear is `weight.t()`, neither a leaf nor a Parameter.
    assert places(report, "parameter") == ["AddmmBackward0.mat2", "MulBackward0.other"]
    assert report.parameter_bytes == WIDTH * WIDTH * 4


def test_buffers_are_recognised():
    model = nn.BatchNorm1d(WIDTH).eval()
    x = a_batch().requires_grad_()

    report = saved_tensors(lambda model: model(x).sum(), model)

    assert {"running_mean", "running_var"} <= {one.slot for one in report.entries if one.kind == "buffer"}
    assert report.bytes_of("buffer") == 2 * WIDTH * 4


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

    report = saved_tensors(step, model)
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

    report = saved_tensors(lambda: Squared.apply(x.neg()).sum())

    assert [(one.place, one.operator) for one in report.entries] == [
        ("SquaredBackward.0", "Squared"),
        ("SquaredBackward.1", "Squared"),
    ]


def test_a_number_that_a_tensor_is_multiplied_with_is_saved_too():
    x = a_batch().requires_grad_()

    report = saved_tensors(lambda: (x * 2.5).sum())

    (entry,) = report.entries
    assert (entry.place, entry.shape, entry.storage_bytes) == ("MulBackward0.other", (), 8)


def test_what_is_saved_before_and_after_an_operator_is_that_operators():
    x = a_batch().requires_grad_()

    report = saved_tensors(lambda: (x.sin().cos() * x.exp()).sum())

    # `sin` and `cos` save what they get, `exp` saves what it makes.
    assert [(one.place, one.operator) for one in report.entries] == [
        ("SinBackward0.self", "aten.sin.default"),
        ("CosBackward0.self", "aten.cos.default"),
        ("ExpBackward0.result", "aten.exp.default"),
        ("MulBackward0.other", "aten.mul.Tensor"),
        ("MulBackward0.self", "aten.mul.Tensor"),
    ]


STEPS = {
    "mlp": lambda model, x: model(x).square().mean(),
    "in place": lambda model, x: F.relu(model(x), inplace=True).mul(x).sum(),
    "indices": lambda model, x: model(x)[torch.tensor([0, 2])].exp().sum(),
    "list of tensors": lambda model, x: torch.stack([model(x), x]).prod(0).sum(),
    "custom function": lambda model, x: Squared.apply(model(x)).sum(),
    "gradient inside": lambda model, x: (
        torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)[0].square().sum()
    ),
    "dropped": lambda model, x: (model(x).exp(), model(x).sum())[1],
    "norm and pool": lambda model, x: F.max_pool1d(F.layer_norm(model(x), (WIDTH,)), 2).sum(),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_hooks_and_the_graph_agree_on_what_is_kept(name):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = a_batch().requires_grad_()
    step = STEPS[name]

    report = saved_tensors(lambda model: step(model, x), model)
    loss = step(model, x)

    sizes = sorted(one.size for one in report.storages.values())
    assert sizes == sorted(size for _, size in kept_in_graph(loss))
    assert all(one.node for one in report.entries)


# ------------------------------------------------------------------------------------------ copies and what is too much


def test_casts_of_autocast_are_copies():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    x = a_batch()

    def step(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    report = saved_tensors(step, model)

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

    report = saved_tensors(step)

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

        return saved_tensors(step).copies

    assert len(copied(lambda y, copy: None)) == 1
    assert copied(lambda y, copy: copy.mul_(2)) == ()
    assert copied(lambda y, copy: y.mul_(2)) == ()


def test_a_copy_of_a_copy_that_nobody_keeps():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        return y.double().clone().sin().sum()

    (copy,) = saved_tensors(step).copies

    assert copy.freed_bytes == 2 * TENSOR
    assert copy.source_kind == "saved"


def test_shapes_and_bits():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)

    report = saved_tensors(lambda: F.max_pool2d(F.relu(x.neg()), 2).sum())
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

    report = saved_tensors(lambda model: model(x).sum(), model)

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


def test_torchs_own_checkpoint():
    x = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    report = saved_tensors(lambda model: checkpoint(model, x, use_reentrant=False).sum(), model)

    assert [(one.operator, one.kind) for one in report.entries] == [("checkpoint", "input")]
    assert sum(report.unknown.values()) == 2
    assert "2 _Holder" in str(report)


def test_hooks_that_keep_another_tensor():
    x = a_batch().requires_grad_()

    def step():
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor.double(),), lambda packed: packed[0].float()
        ):
            return x.neg().sin().sum()

    report = saved_tensors(step)

    # What is kept is what the hook made of it; place and operator are known all the same.
    (entry,) = report.entries
    assert (entry.place, entry.operator, entry.dtype) == ("SinBackward0.self", "aten.sin.default", "float64")
    assert report.saved_bytes == 2 * TENSOR


def test_what_a_store_has_is_shown_apart():
    x = torch.randn(64, WIDTH, requires_grad=True)
    offload = torchremat.offload(torchremat.Host(), min_bytes=0)

    def step():
        with offload:
            y = x.neg()
            z = (y.sin() + y.t().cos().t()).sum()
        return z + x.exp().sum()

    report = saved_tensors(step)

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

    report = saved_tensors(step, model)

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

    report = saved_tensors(step, model)

    # The input of block 1 is the result of tanh in block 0, which is saved there as well.
    assert sorted((one.operator, one.kind) for one in report.entries) == [
        ("aten.addmm.default", "stored"),
        ("aten.tanh.default", "stored"),
        ("input of a region", "stored"),
        ("input of a region", "stored"),
    ]
    assert (report.saved_bytes, report.stored_bytes, report.regions) == (0, 3 * 64 * WIDTH * 4, 2)


def test_what_regions_keep_by_a_policy():
    x = a_batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    policy = save_operators("aten.addmm", "aten.sigmoid")
    torchremat.wrap(model, "", policy=policy)

    report = saved_tensors(lambda model: model(x).sum(), model)

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

    return saved_tensors(step, model)


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


# ----------------------------------------------------------------------------------------------------- nothing is kept


def test_a_step_without_grad_has_an_empty_report_that_says_so():
    x = a_batch()

    report = saved_tensors(lambda: x.exp().sum())

    assert report.entries == () and not report.requires_grad
    assert str(report) == "The loss does not require grad: autograd keeps nothing for it."


def test_what_autograd_has_dropped_again_is_not_kept():
    x = a_batch().requires_grad_()

    def step():
        x.exp().sin().sum()  # nobody keeps this graph
        return x.cos().sum()

    assert [one.place for one in saved_tensors(step).entries] == ["CosBackward0.self"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model: model(torch.ones(2, WIDTH)).sum().backward(), "returned None"),
        (lambda model: model(torch.ones(2, WIDTH)), "shape"),
    ],
)
def test_a_step_without_a_loss_is_an_error(step, message):
    with pytest.raises(StepError, match=message):
        saved_tensors(step, nn.Linear(WIDTH, WIDTH))


def test_a_step_that_runs_backward_is_an_error():
    x = a_batch().requires_grad_()

    def step():
        loss = x.sin().sum()
        loss.backward()
        return loss

    with pytest.raises(StepError, match="has run backward itself"):
        saved_tensors(step)
    assert x.grad is None


def test_a_write_before_the_steps_own_backward_is_an_error_as_without_the_report():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        z = y.sin()
        y.mul_(2)
        return torch.autograd.grad(z.sum(), x, create_graph=True)[0].sum()

    with pytest.raises(MutationError, match=r"written in place .* version 0 and is at 1"):
        saved_tensors(step)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step()


# ------------------------------------------------------------------------------------------------------- no sign of it


def test_the_step_and_the_model_are_as_before():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout())
    x = a_batch()
    step = lambda model: model(x).square().sum()  # noqa: E731
    step(model).backward()
    gradients = [one.grad.clone() for one in model.parameters()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.get_rng_state()
    hooks = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()]

    saved_tensors(step, model)

    assert all(torch.equal(one.grad, before) for one, before in zip(model.parameters(), gradients, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in model.modules()] == hooks


def test_gradients_are_those_without_a_report():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = a_batch()

    def gradients(*, looks):
        torch.manual_seed(1)
        if looks:
            saved_tensors(lambda model: model(x).square().sum(), model)
        model.zero_grad()
        model(x).square().sum().backward()
        return [one.grad for one in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(looks=False), gradients(looks=True), strict=True))


def test_a_gradient_inside_a_step_is_that_of_the_plain_step():
    x = a_batch().requires_grad_()
    seen = []

    def step():
        (gradient,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
        seen.append(gradient.detach().clone())
        return gradient.square().sum()

    step()
    saved_tensors(step)

    assert torch.equal(*seen)


def test_a_step_that_raises_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = a_batch()

    def step(model):
        model(x)
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        saved_tensors(step, model)

    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())
    loss = model(x).sum()
    assert loss.grad_fn.next_functions[0][0]._raw_saved_result.unpack_hook is None


def test_nothing_of_the_step_stays_in_memory():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = a_batch()
    seen = []

    def step(model):
        y = model(x)
        seen.extend([ref(y), ref(y.untyped_storage())])
        return y.square().sum()

    gc.collect()
    gc.disable()
    try:
        report = saved_tensors(step, model)
        assert [one() for one in seen] == [None, None]
        model_alive = ref(model)
        del model
        assert model_alive() is None and report.entries
    finally:
        gc.enable()


def test_a_report_of_another_report_runs():
    x = a_batch().requires_grad_()
    inner = []

    def step():
        inner.append(saved_tensors(lambda: x.sin().sum()))
        return x.cos().sum()

    report = saved_tensors(step)

    assert [one.place for one in report.entries] == ["CosBackward0.self"]
    assert [one.place for one in inner[0].entries] == ["SinBackward0.self"]
