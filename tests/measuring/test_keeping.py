"""What autograd keeps: bytes counted by hand, on steps of every kind, and no sign of it afterwards."""

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from logs import Log
from models import Block
from torchremat import MutationError, StepError, saved

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

    report = saved(model, lambda model: model(x).sum())

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

    report = saved(lambda: F.dropout(x, 0.5).masked_fill(mask.logical_not(), 0).softmax(-1).sum())

    # Dropout is a product with noise on a CPU, which is saved; the mask has one byte for each element; softmax saves
    # its result, and `sum` nothing.
    assert places(report) == ["MulBackward0.other", "MaskedFillBackward0.mask", "SoftmaxBackward0.result"]
    assert report.by_dtype() == {"float32": 2 * TENSOR, "bool": BATCH * WIDTH}
    assert report.by_need() == {"mask": BATCH * WIDTH}


def test_attention():
    q, k, v = (torch.randn(2, 3, 5, 8, requires_grad=True) for _ in range(3))

    report = saved(lambda: F.scaled_dot_product_attention(q.neg(), k.neg(), v.neg()).sum())

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

    report = saved(block, step)

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

    report = saved(step)
    exp, product = report.entries[0], next(one for one in report.entries if one.slot == "self")

    assert exp.place == "ExpBackward0.result"
    assert product.storages == exp.storages and product.others == (0,) and not product.is_first
    assert exp.storage_bytes == product.storage_bytes == TENSOR


def test_a_slice_keeps_all_of_its_storage():
    x = torch.randn(100, 8, requires_grad=True)

    report = saved(lambda: x.neg()[:1].sin().sum())

    (entry,) = report.entries
    assert (entry.tensor_bytes, entry.storage_bytes, report.saved_bytes) == (32, 3200, 3200)


def test_views_of_a_parameter_are_recognised_by_their_storage():
    model = nn.Linear(WIDTH, WIDTH)
    x = a_batch().requires_grad_()

    report = saved(model, lambda model: (model(x) * model.weight[0]).sum())

    # `mat2` of a linear is `weight.t()`, neither a leaf nor a Parameter.
    assert places(report, "parameter") == ["AddmmBackward0.mat2", "MulBackward0.other"]
    assert report.parameter_bytes == WIDTH * WIDTH * 4


def test_buffers_are_recognised():
    model = nn.BatchNorm1d(WIDTH).eval()
    x = a_batch().requires_grad_()

    report = saved(model, lambda model: model(x).sum())

    assert {"running_mean", "running_var"} <= {one.slot for one in report.entries if one.kind == "buffer"}
    assert report.bytes_of("buffer") == 2 * WIDTH * 4


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, 2 * x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[1]


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

    report = saved(model, lambda model: step(model, x))
    loss = step(model, x)

    sizes = sorted(one.size for one in report.storages.values())
    assert sizes == sorted(size for _, size in kept_in_graph(loss))
    assert all(one.node for one in report.entries)


# ----------------------------------------------------------------------------------------------------- nothing is kept


def test_a_step_without_grad_has_an_empty_report_that_says_so():
    x = a_batch()

    report = saved(lambda: x.exp().sum())

    assert report.entries == () and not report.requires_grad
    assert str(report) == "The loss does not require grad: autograd keeps nothing for it."


def test_what_autograd_has_dropped_again_is_not_kept():
    x = a_batch().requires_grad_()

    def step():
        x.exp().sin().sum()  # nobody keeps this graph
        return x.cos().sum()

    assert [one.place for one in saved(step).entries] == ["CosBackward0.self"]


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda model: model(torch.ones(2, WIDTH)).sum().backward(), "returned None"),
        (lambda model: model(torch.ones(2, WIDTH)), "shape"),
    ],
)
def test_a_step_without_a_loss_is_an_error(step, message):
    with pytest.raises(StepError, match=message):
        saved(nn.Linear(WIDTH, WIDTH), step)


def test_a_step_that_runs_backward_is_an_error():
    x = a_batch().requires_grad_()

    def step():
        loss = x.sin().sum()
        loss.backward()
        return loss

    with pytest.raises(StepError, match="has run backward itself"):
        saved(step)
    assert x.grad is None


def test_a_write_before_the_steps_own_backward_is_an_error_as_without_the_report():
    x = a_batch().requires_grad_()

    def step():
        y = x.exp()
        z = y.sin()
        y.mul_(2)
        return torch.autograd.grad(z.sum(), x, create_graph=True)[0].sum()

    with pytest.raises(MutationError, match=r"written in place .* version 0 and is at 1"):
        saved(step)
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

    saved(model, step)

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
            saved(model, lambda model: model(x).square().sum())
        model.zero_grad()
        model(x).square().sum().backward()
        return [one.grad for one in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(looks=False), gradients(looks=True), strict=True))


def test_a_gradient_inside_a_step_is_that_of_the_plain_step():
    x = a_batch().requires_grad_()
    seen = Log()

    def step():
        (gradient,) = torch.autograd.grad((x.sin() * x.exp()).sum(), x, create_graph=True)
        seen.append(gradient.detach().clone())
        return gradient.square().sum()

    step()
    saved(step)

    assert torch.equal(*seen)


def test_a_step_that_raises_leaves_no_hooks():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    x = a_batch()

    def step(model):
        model(x)
        raise KeyError("the user's own")

    with pytest.raises(KeyError, match="the user's own"):
        saved(model, step)

    assert all(not one._forward_hooks and not one._forward_pre_hooks for one in model.modules())
    loss = model(x).sum()
    assert loss.grad_fn.next_functions[0][0]._raw_saved_result.unpack_hook is None


def test_nothing_of_the_step_stays_in_memory():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = a_batch()
    seen = Log()

    def step(model):
        y = model(x)
        seen.extend([ref(y), ref(y.untyped_storage())])
        return y.square().sum()

    gc.collect()
    gc.disable()
    try:
        report = saved(model, step)
        assert [one() for one in seen] == [None, None]
        model_alive = ref(model)
        del model
        assert model_alive() is None and report.entries
    finally:
        gc.enable()


def test_a_report_of_another_report_runs():
    x = a_batch().requires_grad_()
    inner = Log()

    def step():
        inner.append(saved(lambda: x.sin().sum()))
        return x.cos().sum()

    report = saved(step)

    assert [one.place for one in report.entries] == ["CosBackward0.self"]
    assert [one.place for one in inner[0].entries] == ["SinBackward0.self"]


def in_a_nested_tensor(layout):
    return torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(5, WIDTH)], layout=layout)


def values_of(nested):
    return nested.values() if nested.layout is torch.jagged else torch.cat([one.flatten() for one in nested.unbind()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_shown_by_the_sizes_that_their_items_share(layout):
    # They have no shape of plain numbers, or none at all: the report crashed. Their parts were counted nowhere in the
    # totals where another save has one of them too, such as the offsets.
    model, x = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()), in_a_nested_tensor(layout)

    report = saved(model, lambda model: values_of(model(x)).square().mean())
    result = next(one for one in report.entries if one.place == "ReluBackward0.result")

    assert (result.shape, result.operator) == ((2, -1, 4), "aten.relu.default")
    assert result.tensor_bytes == 8 * 4 * 4
    assert report.by_operator()["ReluBackward0"] == 8 * 4 * 4
    assert sum(report.by_operator().values()) == report.saved_bytes
    assert "float32[2, -1, 4]" in str(report)
    assert report.freed_by_policies().keys() >= {"nothing_saved"} or not report.blocks
