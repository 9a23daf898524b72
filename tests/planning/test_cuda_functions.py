"""What functions do on CUDA and not on the CPU, in plans for a device that is not here."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchremat
from logs import Log
from probes.planning import device_of

H100 = device_of("h100")
# The same, but for what depends on the type: blocks of 512 bytes, and the same seconds.
LIKE_H100 = dataclasses.replace(H100, type="cpu")


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.taken, self.given, self.drop = norm(32), nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (2, 16)).transpose(1, 2) for one in self.taken(self.norm(x)).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        return x + self.drop(self.given(y.transpose(1, 2).flatten(2)))


def planner(model, step, device=H100):
    return torchremat.Planner(model, step, on="meta", device=device, cost="flops")


def operators(found):
    return {run.name for run in found.profile.units.trace.operators.runs}


def blocks(norm, dtype):
    return nn.Sequential(*(Block(norm) for _ in range(2))).to(dtype), torch.randn(2, 64, 32, dtype=dtype)


def test_operators_of_a_plan_are_those_that_cuda_runs():
    # A plan names the operators whose outputs it holds. With those of the CPU, nothing would be held on CUDA.
    model, x = blocks(nn.RMSNorm, torch.bfloat16)
    found = planner(model, lambda model: model(x).sum())

    assert operators(found) >= {
        "aten._fused_rms_norm.default",
        "aten._scaled_dot_product_flash_attention.default",
        "aten.native_dropout.default",
    }
    assert not {one for one in operators(found) if "for_cpu" in one or "rsqrt" in one}
    plain, floor = found.plain_peak()[0], found.floor_bytes
    held = found.plan((plain + floor) // 2).held
    assert held and any("_scaled_dot_product_flash_attention" in name for one in held for name in one.operators)


def test_attention_in_float32_is_another_kernel_whose_workspace_nobody_knows():
    model, x = blocks(nn.LayerNorm, torch.float32)

    with pytest.warns(torchremat.DeviceWarning, match="efficient_attention_backward"):
        found = planner(model, lambda model: model(x).sum())

    assert "aten._scaled_dot_product_efficient_attention.default" in operators(found)


def test_a_norm_is_one_operator_that_keeps_its_input():
    # On the CPU it is seven, of which two more keep a tensor as large. In bfloat16 x of 64 x 32 has 4096 bytes.
    x = torch.randn(64, 32, dtype=torch.bfloat16)
    model = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32)).bfloat16()
    kept = [planner(model, lambda model: model(x).sum(), one).plan("100%").kept_bytes for one in (H100, LIKE_H100)]

    # The norm keeps a float for each row, the layer its input, and there is the loss; small ones are blocks of 512.
    assert kept[0] == 512 + 4096 + 512
    assert kept[1] >= kept[0] + 4096


def test_batches_are_normalised_by_cudnn():
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 8, 8)

    with pytest.warns(torchremat.DeviceWarning, match="convolution"):
        assert "aten.cudnn_batch_norm.default" in operators(planner(model, lambda model: model(x).sum()))


def mlp():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))


def test_autocast_of_cuda_is_there_without_cuda():
    # Torch warns and switches it off where there is no CUDA, so that a plan counted twice the bytes.
    model, x = mlp(), torch.randn(64, 16)
    own = torch.autocast.__init__

    def under(kind):
        def step(model):
            with torch.autocast(kind, dtype=torch.bfloat16):
                return model(x).float().sum()

        return step

    cuda = planner(model, under("cuda")).plan("100%")
    cpu = planner(model, under("cpu"), LIKE_H100).plan("100%")
    without = planner(model, lambda model: model(x).sum()).plan("100%")

    assert (cuda.peak_bytes, cuda.kept_bytes) == (cpu.peak_bytes, cpu.kept_bytes)
    assert cuda.kept_bytes < 0.8 * without.kept_bytes
    assert torch.autocast.__init__ is own


def test_autocast_of_cuda_computes_norms_in_float32():
    model, x, seen = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)), torch.randn(64, 16), Log()

    def step(model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = model[1](model[0](x))
            seen.append((model[0](x).dtype, y.dtype, y.bfloat16().softmax(-1).dtype))
            return y.sum()

    planner(model, step)

    assert set(seen) == {(torch.bfloat16, torch.float32, torch.float32)}
