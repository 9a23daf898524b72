"""The table of slots that need less, against the torch that is installed: each entry, in each of its forms.

A slot is swapped after the fact: what autograd has saved is replaced by NaNs of the same geometry if only the shape is
said to be needed, else by the image of its split. First and second derivatives must not notice.
"""

import math
import warnings
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from probes.stores import pack_bits
from torchremat._compat.flags import deterministic_kernels
from torchremat._compat.tensors import is_dense
from torchremat.stores.needs import NEEDS, SHAPE, in_order, surrogate
from torchremat.tensors.metadata import empty_of, metadata_of

INDEX = torch.tensor([[0, 1, 2, 1]] * 4)
MASK = torch.tensor([True, False] * 4)
# Values on which the cases of some operation border, and the special ones.
BORDERS = [0.0, -0.0, 1.0, -1.0, 6.0, 3.0, -3.0, 0.1, -0.1, 0.5, -0.5, math.inf, -math.inf]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLAT, LONG, WIDE, DEEP = (4, 8), (2, 3, 8), (2, 3, 8, 8), (2, 3, 4, 4, 4)


def classes(x, *shape):
    return (torch.arange(math.prod(shape)) % 3).view(shape).to(x.device)


def fractional(x, dimensions):
    samples = torch.full((*x.shape[:2], dimensions), 0.3, dtype=x.dtype, device=x.device)
    pool = F.fractional_max_pool2d if dimensions == 2 else F.fractional_max_pool3d
    return pool(x, 2, output_size=2, _random_samples=samples)


# node -> what makes it, and on what shape
OPERATIONS = {
    "AdaptiveAvgPool2DBackward0": [(lambda x: F.adaptive_avg_pool2d(x, 3), WIDE)],
    "AdaptiveAvgPool3DBackward0": [(lambda x: F.adaptive_avg_pool3d(x, 3), DEEP)],
    "AdaptiveMaxPool2DBackward0": [(lambda x: F.adaptive_max_pool2d(x, 3), WIDE)],
    "AdaptiveMaxPool3DBackward0": [(lambda x: F.adaptive_max_pool3d(x, 3), DEEP)],
    "AvgPool2DBackward0": [
        (lambda x: F.avg_pool2d(x, 2), WIDE),
        (lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False), WIDE),
        (lambda x: F.avg_pool1d(x, 2), LONG),
    ],
    "AvgPool3DBackward0": [(lambda x: F.avg_pool3d(x, 2), DEEP)],
    "ClampBackward1": [
        (lambda x: x.clamp(-0.1, 0.5), FLAT),
        (lambda x: (x * 1).clamp_(-0.1, 0.5), FLAT),
        (lambda x: x.clamp(min=0.1), FLAT),
        (lambda x: x.clamp(max=0.1), FLAT),
        (lambda x: x.clamp(0, 6), FLAT),
    ],
    "ClampMaxBackward0": [(lambda x: x.clamp_max(0.1), FLAT), (lambda x: x.clamp_max(math.inf), FLAT)],
    "ClampMinBackward0": [(lambda x: x.clamp_min(0.1), FLAT), (lambda x: x.clamp_min(-math.inf), FLAT)],
    "CummaxBackward0": [(lambda x: x.cummax(1).values, FLAT)],
    "CumminBackward0": [(lambda x: x.cummin(1).values, FLAT)],
    "FractionalMaxPool2DBackward0": [(lambda x: fractional(x, 2), WIDE)],
    "FractionalMaxPool3DBackward0": [(lambda x: fractional(x, 3), DEEP)],
    "GatherBackward0": [
        (lambda x: x.gather(1, INDEX.to(x.device)), FLAT),
        (lambda x: x.gather(1, INDEX.to(x.device), sparse_grad=True), FLAT),
        (lambda x: torch.take_along_dim(x, INDEX.to(x.device), 1), FLAT),
    ],
    "HardshrinkBackward0": [(lambda x: F.hardshrink(x, 0.1), FLAT), (lambda x: F.hardshrink(x, 0.0), FLAT)],
    "HardsigmoidBackward0": [(F.hardsigmoid, FLAT)],
    "HardtanhBackward0": [
        (F.hardtanh, FLAT),
        (F.relu6, FLAT),
        (lambda x: F.hardtanh(x, -0.1, 0.1), FLAT),
        (lambda x: F.hardtanh_(x * 1), FLAT),
    ],
    "LeakyReluBackward0": [
        (lambda x: F.leaky_relu(x, 0.1), FLAT),
        (lambda x: F.leaky_relu(x, 0.0), FLAT),
        (lambda x: F.leaky_relu(x, -2.0), FLAT),
    ],
    "LeakyReluBackward1": [(lambda x: F.leaky_relu_(x * 1, 0.1), FLAT)],
    "MaskedSelectBackward0": [(lambda x: x.masked_select(MASK.to(x.device)), FLAT)],
    "MaxPool2DWithIndicesBackward0": [
        (lambda x: F.max_pool2d(x, 2), WIDE),
        (lambda x: F.max_pool2d(x, 3, 2, 1), WIDE),
        (lambda x: F.max_pool2d(x, 2, dilation=2, ceil_mode=True), WIDE),
        (lambda x: F.max_pool1d(x, 2), LONG),
    ],
    "MaxPool3DWithIndicesBackward0": [(lambda x: F.max_pool3d(x, 2), DEEP)],
    "NativeLayerNormBackward0": [(lambda x: F.layer_norm(x, (8,), x[0] * 2, x[1] * 1), FLAT)],
    # torch's own backward of it asks for contiguous inputs.
    "NllLoss2DBackward0": [(lambda x: F.nll_loss(x.contiguous(), classes(x, 2, 8, 8)), WIDE)],
    "NllLossBackward0": [
        (lambda x: F.nll_loss(x, classes(x, 4), ignore_index=1), FLAT),
        (lambda x: F.nll_loss(x, classes(x, 4), torch.arange(8).to(x), reduction="none"), FLAT),
        (lambda x: F.cross_entropy(x, classes(x, 4)), FLAT),
    ],
    "ReflectionPad1DBackward0": [(lambda x: F.pad(x, (1, 1), mode="reflect"), LONG)],
    "ReflectionPad2DBackward0": [(lambda x: F.pad(x, (1,) * 4, mode="reflect"), WIDE)],
    "ReflectionPad3DBackward0": [(lambda x: F.pad(x, (1,) * 6, mode="reflect"), DEEP)],
    "ReluBackward0": [(F.relu, FLAT), (lambda x: (x * 1).relu_(), FLAT)],
    "ReplicationPad1DBackward0": [(lambda x: F.pad(x, (1, 1), mode="replicate"), LONG)],
    "ReplicationPad2DBackward0": [(lambda x: F.pad(x, (1,) * 4, mode="replicate"), WIDE)],
    "ReplicationPad3DBackward0": [(lambda x: F.pad(x, (1,) * 6, mode="replicate"), DEEP)],
    "SoftshrinkBackward0": [(lambda x: F.softshrink(x, 0.1), FLAT), (lambda x: F.softshrink(x, 0.0), FLAT)],
    "TakeBackward0": [(lambda x: x.take(INDEX.to(x.device)), FLAT)],
    "ThresholdBackward0": [(lambda x: F.threshold(x, 0.1, 20.0), FLAT)],
    "ThresholdBackward1": [(lambda x: F.threshold_(x * 1, 0.1, 20.0), FLAT)],
}
# torch has no second derivative of it.
ONCE_ONLY = {"HardsigmoidBackward0"}
# These read NaNs in one way or another by the strides of the gradient, and so are stored whole where there are NaNs.
WITHOUT_NANS = {"HardshrinkBackward0", "HardtanhBackward0", "SoftshrinkBackward0"}
HALVES_MISSING = {"AvgPool3DBackward0"}  # on the CPU

CASES = [pytest.param(node, *case, id=f"{node}-{n}") for node in OPERATIONS for n, case in enumerate(OPERATIONS[node])]


def contiguous(x):
    return x.contiguous()


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x.contiguous()


def transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def with_gaps(x):
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


LAYOUTS = [contiguous, channels_last, transposed, with_gaps]


def values(shape, dtype, *, nans):
    tensor = torch.randn(shape, dtype=torch.float64).mul_(4).round_().mul_(0.25)
    flat = tensor.view(-1)
    for number, value in enumerate(BORDERS + [math.nan] * nans):
        flat[2 * number + 1] = value
    return tensor.to(dtype)


def nodes_of(output):
    found, stack = [], [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found.append(node)
            stack.extend(before for before, _ in node.next_functions)
    return found


def garbage(metadata):
    tensor = empty_of(metadata)
    span = tensor.untyped_storage().nbytes() // tensor.element_size()
    tensor.as_strided((span,), (1,), 0).fill_(math.nan)
    return tensor


def swap(node):
    """Replace what the slots of a node in the table hold; return how many were."""
    swapped = 0
    for slot, need in NEEDS.get(node.name(), {}).items():
        saved = getattr(node, f"_saved_{slot}").detach()
        metadata = metadata_of(saved)
        if need is SHAPE:
            stand_in = garbage(metadata)
        else:
            split = need(node, in_order(saved)) if is_dense(saved) else None
            if split is None:
                continue
            stand_in = surrogate(metadata, pack_bits(split.bits), split.true, split.false)
        assert metadata_of(stand_in) == metadata
        hand_out = lambda _, stand_in=stand_in: stand_in  # noqa: E731
        getattr(node, f"_raw_saved_{slot}").register_hooks(hand_out, lambda packed: packed)
        swapped += 1
    return swapped


def derivatives(function, x, *, swaps, twice):
    """First derivatives, second ones, and how many slots were swapped."""
    x = x.detach().requires_grad_()
    output = function(x)
    swapped = sum(map(swap, nodes_of(output))) if swaps else 0
    gradient = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradient = gradient.to(x).requires_grad_()
    (first,) = torch.autograd.grad(output, x, gradient, create_graph=twice)
    second = ()
    if twice and first.layout is torch.strided and first.requires_grad:
        second = torch.autograd.grad(first, (x, gradient), torch.full_like(first, 2.0), allow_unused=True)
    return [first.detach(), *second], swapped


def same(one, other):
    if one is None or other is None:
        return one is other
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return (
        one.stride() == other.stride()
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(1e4), other.nan_to_num(1e4))
        and torch.equal(one.signbit(), other.signbit())
    )


def close(one, other):
    if one is None or other is None:
        return one is other
    bound = 64 * torch.finfo(one.dtype).eps
    return one.stride() == other.stride() and torch.allclose(one, other, rtol=bound, atol=bound, equal_nan=True)


def test_every_entry_is_tried():
    assert OPERATIONS.keys() == NEEDS.keys()


@pytest.mark.parametrize(("node", "function", "shape"), CASES)
def test_derivatives_do_not_notice(node, function, shape):
    for dtype, layout in product(FLOATS, LAYOUTS):
        if node in HALVES_MISSING and dtype.itemsize == 2:
            with pytest.raises(RuntimeError, match="not implemented for"):
                function(torch.ones(shape, dtype=dtype))
            continue
        x = layout(values(shape, dtype, nans=node not in WITHOUT_NANS))

        plain, _ = derivatives(function, x, swaps=False, twice=node not in ONCE_ONLY)
        swapped, count = derivatives(function, x, swaps=True, twice=node not in ONCE_ONLY)

        case = f"{dtype}, {layout.__name__}"
        # A tensor with gaps has no split; neither have ends that lie too close together for the dtype.
        splits = any(need is not SHAPE for need in NEEDS[node].values())
        assert count > 0 or (splits and layout is with_gaps), case
        assert all(map(same, plain, swapped)) and len(plain) == len(swapped), case


@pytest.mark.parametrize("node", sorted(WITHOUT_NANS))
def test_nans_that_kernels_disagree_on_are_left_whole(node):
    function, shape = OPERATIONS[node][0]

    _, count = derivatives(function, values(shape, torch.float32, nans=True), swaps=True, twice=False)

    assert count == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.hardtanh(x, 1.0, 1.0 + 2**-20),
        lambda x: F.hardtanh(x, -math.inf, 0.0),
        lambda x: F.threshold(x, math.inf, 0.0),
        lambda x: F.hardshrink(x, -1.0),
        lambda x: F.hardshrink(x, math.inf),
        lambda x: x.clamp(0.5, 0.5),
        lambda x: x.clamp(2.0, 1.0),
        lambda x: x.clamp(min=math.nan),
        lambda x: x.clamp_max(math.nan),
    ],
)
def test_bounds_between_which_no_value_can_stand_are_left_whole(function):
    _, count = derivatives(function, values(FLAT, torch.bfloat16, nans=False), swaps=True, twice=False)

    assert count == 0


def test_batched_gradients_do_not_notice():
    def batched(swaps):
        x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        output = F.max_pool2d(F.hardtanh(F.relu(x), -1, 0.7), 2)
        assert sum(map(swap, nodes_of(output))) == 3 if swaps else True
        gradients = torch.randn(5, *output.shape, generator=torch.Generator().manual_seed(4))
        return torch.autograd.grad(output, x, gradients, is_grads_batched=True)[0]

    assert torch.equal(batched(False), batched(True))


@pytest.mark.gpu
@pytest.mark.parametrize(("node", "function", "shape"), CASES)
def test_derivatives_do_not_notice_on_a_device(node, function, shape):
    for layout in LAYOUTS:
        for dtype in FLOATS:
            x = layout(values(shape, dtype, nans=True).cuda())

            run = partial(derivatives, function, x, twice=node not in ONCE_ONLY)
            with warnings.catch_warnings(record=True) as warned, deterministic_kernels(warn_only=True):
                warnings.simplefilter("always")
                plain, *others = (run(swaps=False)[0] for _ in range(5))
                swapped = run(swaps=True)[0]

            # Two plain runs of some kernels differ by rounding, and torch does not warn of all of them.
            alike = close if warned or not all(all(map(same, plain, other)) for other in others) else same
            assert all(map(alike, plain, swapped)) and len(plain) == len(swapped)
