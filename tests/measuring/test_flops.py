"""Flops against torch's counter, and against hand counts where torch counts nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from policies.counting import Counted
from probes.memory import FlopCounter, FlopsByOperator, formula_of


class Mixed(nn.Module):
    """Convolutions (one grouped, one transposed), linears, and attention written out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=4, stride=2)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        x = self.up(self.grouped(self.conv(x).relu()))
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out((q @ k.transpose(1, 2)).softmax(-1) @ v)


def test_totals_equal_torchs_own():
    model, x = Mixed(), torch.randn(2, 3, 12, 12)

    with FlopCounterMode(display=False) as theirs:
        model(x).sum().backward()
    with FlopsByOperator() as ours:
        model(x).sum().backward()

    assert ours.total == theirs.get_total_flops() > 0
    assert ours.by_operator == {str(k): v for k, v in theirs.get_flop_counts()["Global"].items()}
    assert ours.recomputed == 0


def test_totals_equal_torchs_own_under_inference_mode():
    # There `linear` and `matmul` arrive at the mode undecomposed.
    model, x = Mixed(), torch.randn(2, 3, 12, 12)

    with torch.inference_mode():
        with FlopCounterMode(display=False) as theirs:
            model(x)
        with FlopCounter() as ours:
            model(x)

    assert ours.total == theirs.get_total_flops() > 0


def test_an_operator_that_has_a_kernel_is_not_taken_apart():
    # The backward of `silu` has parts as well, which took three times the memory, and rounded in other places.
    x = torch.linspace(-3, 3, 1001).requires_grad_()
    plain = torch.autograd.grad(F.silu(x).sum(), x)[0]

    with Counted() as counted, FlopCounter():
        found = torch.autograd.grad(F.silu(x).sum(), x)[0]

    assert torch.equal(found, plain)
    assert counted.counts["silu_backward"] == 1 and counted.counts["sigmoid"] == 0


@pytest.mark.parametrize("groups", [6, 2, 1])
def test_attention_on_the_cpu_is_counted(groups):
    # Forward: q @ k.T and p @ v, each 2*B*H*T*T*D. Backward: p again, then dv, dp, dq, dk: five products. Groups of
    # heads share keys and values, and are multiplied by them head by head: torch 2.11 has no formula for that.
    b, h, t, d = 2, 6, 16, 8
    q, k, v = (torch.randn(b, heads, t, d, requires_grad=True) for heads in (h, groups, groups))
    product = 2 * b * h * t * t * d

    with FlopsByOperator() as counter:
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=groups < h)
        forward = counter.total
        out.sum().backward()

    assert forward == 2 * product
    assert counter.total == 7 * product
    assert set(counter.by_operator) == {
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    }


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
def test_attention_of_other_devices_may_have_groups_of_heads(kernel):
    b, h, t, d = 2, 6, 16, 8
    q, k, v = (torch.empty(b, heads, t, d, device="meta") for heads in (h, 2, 2))
    product = 2 * b * h * t * t * d
    operators = [
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{suffix}") for suffix in ("", "_backward")
    ]

    forward, backward = map(formula_of, operators)

    assert forward(q, k, v, is_causal=True, out_val=None) == 2 * product
    assert backward(q, q, k, v, is_causal=True, out_val=None) == 5 * product


def test_the_total_can_be_read_in_a_hook():
    # One product of (4, 8) and (8, 2) is 2*4*8*2 = 128 flops.
    seen: list[int] = []
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False)
    second.register_forward_pre_hook(lambda module, args: seen.append(counter.total))

    with FlopCounter() as counter:
        second(first(torch.randn(4, 8)))

    assert seen == [512]
    assert counter.total == 512 + 128


def test_recomputed_flops_are_those_the_hook_claims():
    claimed = [False]

    with FlopCounter(lambda: claimed[0]) as counter:
        torch.ones(4, 8) @ torch.ones(8, 2)
        claimed[0] = True
        torch.ones(4, 8) @ torch.ones(8, 1)

    assert counter.total == 128 + 64
    assert counter.recomputed == 64


def test_grad_mode_inside_backward_tells_a_recompute():
    linear, x = nn.Linear(8, 8, bias=False), torch.randn(4, 8, requires_grad=True)

    def is_recomputing() -> bool:
        return phase == "backward" and torch.is_grad_enabled()

    phase = "forward"
    with FlopCounter(is_recomputing) as counter:
        loss = checkpoint(lambda x: linear(x).sin(), x, use_reentrant=False).sum()
        phase = "backward"
        loss.backward()

    # Forward and its recompute 2*4*8*8 = 512 each; backward 512 for the weight and 512 for the input.
    assert counter.total == 4 * 512
    assert counter.recomputed == 512


def test_gradients_are_those_of_the_plain_run():
    model, x = Mixed(), torch.randn(2, 3, 12, 12)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    with FlopCounter():
        counted = gradients()

    assert all(map(torch.equal, plain, counted))


def test_products_of_nested_tensors():
    # Five rows through a layer of 8 and 4: 2*5*8*4 flops. The layer was taken apart as for a plain tensor.
    layer = nn.Linear(8, 4)
    rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(2, 8)], layout=torch.jagged)

    with FlopCounter() as counter:
        layer(rows)

    assert counter.total == 2 * 5 * 8 * 4
