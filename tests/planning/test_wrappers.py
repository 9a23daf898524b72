"""Plans of models whose parameters, inputs or activations are wrapper subclasses: their bytes lie in their parts."""

import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from planning.steps import Measured
from probes.memory import tensors_in
from torchremat import Disk, Planner, UnsupportedError, checkpointed, measure, plan, saved


def two(tensor):
    return TwoTensor(tensor, tensor.clone())


class Frozen(nn.Module):
    """A linear layer with a frozen weight of two parts, as quantized weights are, and one that trains."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(two(torch.randn(16, 16)), requires_grad=False)
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        whole = F.linear(x, self.weight.a * self.weight.b)  # a weight made anew, as of a quantized one
        return torch.tanh(self.linear(torch.tanh(F.linear(whole, self.weight.a))))


class Opened(torch.autograd.Function):
    @staticmethod
    def forward(ctx, wrapped):
        return wrapped.a + wrapped.b

    @staticmethod
    def backward(ctx, gradient):
        return two(gradient)


class Both(nn.Module):
    """Takes and returns tensors of two parts; what autograd saves between has two parts as well."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(two(torch.randn(16, 16)))

    def forward(self, x):
        return torch.sin(torch.sin(torch.sin(x @ self.weight)))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def frozen_weights(_):
    model, x = nn.Sequential(*(Frozen() for _ in range(4))), torch.randn(256, 16)
    return model, lambda model: model(x).square().mean()


def wrapped_throughout(_):
    model, x = nn.Sequential(*(Both() for _ in range(4))), torch.randn(256, 16)
    return model, lambda model: Opened.apply(model(two(x))).square().mean()


def tensor_parallel(mesh):
    blocks = (nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.randn(256, 16)
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model, lambda model: model(x).square().mean()


KINDS = [frozen_weights, wrapped_throughout, tensor_parallel]


def gradients(model, step):
    model.zero_grad()
    step(model).backward()
    return [part.clone() for one in model.parameters() if one.grad is not None for part in tensors_in(one.grad)]


# A wrapper's own storage has no memory. Whoever asked it for an address got an internal error of torch's.
@pytest.mark.parametrize("share", ["75%", "floor"])
@pytest.mark.parametrize("kind", KINDS)
def test_planned_steps_have_the_bytes_and_the_gradients_that_were_promised(kind, share, mesh):
    torch.manual_seed(0)
    model, step = kind(mesh)
    expected = gradients(model, step)
    model.zero_grad()
    planner = Planner(model, step, cost="flops")
    runs = Measured(model, step)
    plain_bytes = planner.fixed_bytes + runs.peak()
    made = planner.plan(planner.floor_bytes if share == "floor" else share)

    made.apply(model)
    measured, flops = planner.fixed_bytes + runs.peak(), runs.recomputed_flops()
    found = gradients(model, step)
    made.remove(model)

    assert measured == made.step_peak_bytes < plain_bytes
    assert flops == made.recomputed_flops
    assert flops > 0 or share != "floor"  # elementwise operators have none
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


# The parts of a wrapper are its attributes, too: regions held them with these, and so the memory of tensors between
# units that a plan had given up.
def test_a_region_holds_no_input_of_a_region_inside_of_it():
    model = nn.Sequential(Both(), Both())
    memory = []
    model[0].register_forward_hook(lambda _, args, output: memory.append(weakref.ref(output.a)))
    inner = [checkpointed(one) for one in model]
    outer = checkpointed(lambda x: inner[1](inner[0](x)))

    output = outer(two(torch.randn(8, 16)))

    assert memory[0]() is None
    output.a  # noqa: B018  the graph lives


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_measured_and_their_saved_tensors_listed(kind, mesh):
    model, step = kind(mesh)
    weights_bytes = sum(part.nbytes for one in model.parameters() for part in tensors_in(one))

    assert measure(model, step).parameter_bytes == weights_bytes
    assert saved(model, step).saved_bytes > 0


class Opaque(torch.Tensor):
    """Wraps a tensor and does not say which."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        opened = torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        made = func(*opened[0], **opened[1])
        return cls(made) if func is torch.ops.aten.detach.default else made


# Nobody can tell where the bytes of such a tensor are, so the message has to say which tensor it is.
def test_a_wrapper_that_does_not_tell_its_parts_is_named():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = nn.Parameter(Opaque(torch.randn(8, 8)), requires_grad=False)
    x = torch.randn(4, 8)

    with pytest.raises(UnsupportedError, match=r"`1.weight`.*Opaque.*__tensor_flatten__"):
        plan(model, lambda model: model(x).sum(), budget="90%")


def test_without_running_it_no_wrapper_can_be_planned():
    model, step = frozen_weights(None)

    with pytest.raises(UnsupportedError, match=r"TwoTensor.*on='meta'"):
        plan(model, step, budget="90%", device="h100", on="meta")


# What a store takes are the parts; a plan knew the wrapper by its empty storage.
def test_stores_take_the_parts(tmp_path):
    torch.manual_seed(0)
    model, step = wrapped_throughout(None)
    expected = gradients(model, step)
    made = plan(model, step, budget="60%", stores=[Disk(tmp_path)])

    made.apply(model)
    found = gradients(model, step)
    made.remove(model)

    assert all(map(torch.equal, found, expected))
