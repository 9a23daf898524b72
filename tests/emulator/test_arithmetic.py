import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def both(function, *shapes):
    """What it returns on the CPU and on the device, for the same numbers."""
    inputs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(i), device=CPU) for i, shape in enumerate(shapes)
    ]
    return function(*inputs), function(*[one.to(CUDA) for one in inputs])


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, y: x @ y, [(3, 4), (4, 5)]),
        (lambda x: x.softmax(1), [(3, 4)]),
        (lambda x: x.t().contiguous(), [(3, 4)]),
        (lambda x: x[1:, ::2] * 2, [(3, 4)]),
        (lambda x: x[x > 0], [(3, 4)]),
        (lambda x: x.sort(1).values, [(3, 4)]),
        (lambda x: torch.cat([x, x]).cumsum(0), [(3, 4)]),
        (lambda x: torch.view_as_real(torch.view_as_complex(x) * 1j), [(3, 2)]),
        (lambda x: x.clone().resize_(2, 2), [(3, 4)]),
        (lambda x: x.to(torch.bfloat16).sum(), [(3, 4)]),
        (lambda x: torch.linalg.inv(x), [(3, 3)]),
        (lambda x: functional.layer_norm(x, (4,)), [(3, 4)]),
        (lambda x: torch.stack(torch._foreach_mul([x, x], 3.0)), [(3, 4)]),
        (lambda x: torch.index_put(x, (torch.tensor([0], device=x.device),), x[1]), [(3, 4)]),
    ],
)
def test_operators_are_those_of_the_cpu(function, shapes):
    expected, found = both(function, *shapes)

    assert found.device == torch.device("cuda", 0)
    assert torch.equal(found.cpu(), expected)
    assert found.stride() == expected.stride()


def test_a_training_step_is_that_of_the_cpu():
    def step(device):
        torch.manual_seed(0)
        with torch.device(CPU):
            model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            x = torch.randn(2, 5, 16)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            with sdpa_kernel(SDPBackend.MATH):
                model(x.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(map(torch.equal, step(CUDA), step(CPU)))


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_are_those_of_the_cpu(make, bias):
    def run(device):
        torch.manual_seed(0)
        with torch.device(CPU):
            cell, x = make(4, 3, bias=bias), torch.randn(2, 4)
        cell.to(device)
        x = x.to(device).requires_grad_()
        state = cell(x, cell(x))
        loss = sum(one.square().sum() for one in (state if isinstance(state, tuple) else [state]))
        return [one.cpu() for one in torch.autograd.grad(loss, [x, *cell.parameters()])]

    # In one kernel or in several: sums of three numbers are in another order.
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(run(CUDA), run(CPU), strict=True))


def test_views_share_memory():
    x = torch.zeros(4, 4, device=CUDA)

    x.t()[0].view(2, 2).add_(1)
    x.unfold(0, 2, 2)[0, 3].fill_(7)

    assert x.tolist() == [[1, 0, 0, 7], [1, 0, 0, 7], [1, 0, 0, 0], [1, 0, 0, 0]]


def test_a_result_that_does_not_fit_is_resized():
    x = torch.arange(4.0, device=CUDA)
    out = torch.empty(0, device=CUDA)

    torch.mul(x, 2, out=out)

    assert out.tolist() == [0, 2, 4, 6]


def test_tensors_of_two_devices_are_refused():
    x = torch.ones(3, device=CUDA)

    assert (x * torch.tensor(2.0, device=CPU)).tolist() == [2, 2, 2]  # a number may be on the host
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu!"):
        x + torch.ones(3, device=CPU)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cuda:1!"):
        x + torch.ones(3, device="cuda:1")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode():
    x = torch.arange(3.0, device=CUDA)

    value, tangent = torch.func.jvp(lambda x: x.square().sum(), (x,), (torch.ones_like(x),))

    assert (value.item(), tangent.item()) == (5, 6)


class TestGenerators:
    def test_a_state_is_a_seed_and_an_offset(self):
        torch.manual_seed(5)
        torch.randn(3, device=CUDA)

        state = torch.cuda.get_rng_state()

        assert state.device == CPU and state.view(torch.int64).tolist() == [5, 4]

    @pytest.mark.parametrize(
        "draw",
        [
            lambda: torch.rand(5, device=CUDA),
            lambda: torch.randn(5, device=CUDA),
            lambda: torch.randperm(50, device=CUDA),
            lambda: functional.dropout(torch.ones(50, device=CUDA), 0.5),
            lambda: torch.ones(50, device=CUDA).exponential_(),
            lambda: torch.multinomial(torch.ones(50, device=CUDA), 20),
        ],
    )
    def test_a_draw_comes_again_with_the_state_and_leaves_the_host_alone(self, draw):
        host, state = torch.get_rng_state(), torch.cuda.get_rng_state()

        first, second = draw(), draw()
        torch.cuda.set_rng_state(state)

        assert torch.equal(draw(), first) and not torch.equal(first, second)
        assert torch.equal(torch.get_rng_state(), host)

    def test_each_device_has_its_own(self):
        torch.manual_seed(0)
        state = torch.cuda.get_rng_state(1)

        torch.rand(3, device="cuda:0")

        assert torch.equal(torch.cuda.get_rng_state(1), state)

    def test_one_of_the_host_is_refused(self):
        with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
            torch.rand(3, device=CUDA, generator=torch.Generator())


def test_storages_are_made_and_copied():
    x = torch.arange(3.0, device=CUDA)

    storage = torch.UntypedStorage(12, device=CUDA)
    twin = copy.deepcopy(x)

    assert (storage.device, storage.nbytes()) == (torch.device("cuda", 0), 12)
    assert twin.data_ptr() != x.data_ptr() and torch.equal(twin, x)
