"""Operations by name, each a function of one 32 x 32 tensor that requires grad."""

import torch
from torch import nn
from torch.nn import functional as F


class Cube(torch.autograd.Function):
    """Asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx, a):
        ctx.save_for_backward(a, a * a)
        return a**3

    @staticmethod
    def backward(ctx, gradient):
        ctx.saved_tensors  # noqa: B018
        a, square = ctx.saved_tensors
        return 3 * gradient * square + 0 * a


def with_itself(function):
    """A function of a tensor that nobody but autograd keeps."""
    return lambda a: function(a.sin())


def _rope(a):
    turn = torch.polar(torch.ones(8, 16), torch.arange(128.0).reshape(8, 16))
    z = torch.view_as_complex(a[:8].reshape(8, 16, 2))
    return torch.view_as_real(z * turn * z.conj())


def _autocast(a):
    layer = nn.Linear(32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        return layer(layer(a)).float()


def _conjugate(a):
    z = torch.view_as_complex(a.sin().reshape(32, 16, 2))
    return (z.conj().imag * z.imag).exp() + (z.conj() * z).real


def _heads(a):
    q, k, v = a.repeat(1, 3).sin().chunk(3, -1)
    return (q @ k.t()).softmax(-1) @ v


def _image(a):
    return a.sin().reshape(1, 4, 16, 16)


OPERATIONS = {
    "sin": torch.sin,
    "exp": torch.exp,
    "square": with_itself(lambda u: u * u),
    "relu": with_itself(F.relu),
    "rrelu": with_itself(lambda u: F.rrelu(u, training=True)),
    "dropout": with_itself(lambda u: F.dropout(u, 0.5)),
    "gelu": with_itself(F.gelu),
    "softmax": with_itself(lambda u: u.softmax(-1)),
    "layer_norm": with_itself(lambda u: F.layer_norm(u, (32,))),
    "batch_norm": with_itself(lambda u: F.batch_norm(u, torch.zeros(32), torch.ones(32), training=True)),
    "group_norm": with_itself(lambda u: F.group_norm(u.reshape(4, 8, 32), 4)),
    "linear": with_itself(lambda u: nn.Linear(32, 32)(u)),
    "heads": _heads,
    "attention": with_itself(lambda u: F.scaled_dot_product_attention(*(u.reshape(1, 2, 16, 32),) * 3)),
    "convolution": lambda a: F.conv2d(_image(a), torch.ones(4, 4, 3, 3)),
    "channels_last": lambda a: F.conv2d(
        _image(a).contiguous(memory_format=torch.channels_last).exp(), torch.ones(4, 4, 3, 3)
    ),
    "max_pool": lambda a: F.max_pool2d(_image(a), 2),
    "interpolate": lambda a: F.interpolate(_image(a), scale_factor=2, mode="bilinear") ** 2,
    "recurrent": with_itself(lambda u: nn.LSTM(32, 32)(u.reshape(4, 8, 32))[0]),
    "cross_entropy": with_itself(lambda u: F.cross_entropy(u, torch.arange(32))),
    "columns": with_itself(lambda u: u[:, 3] * u[:, 5]),
    "unfold": with_itself(lambda u: u.unfold(0, 3, 1).exp()),
    "index": with_itself(lambda u: u[torch.arange(50) % 32] ** 2),
    "where": lambda a: torch.where(a > 0, a.sin(), a.exp()),
    "sort": with_itself(lambda u: u.sort(0)[0] ** 2),
    "solve": with_itself(lambda u: torch.linalg.solve(u + 40 * torch.eye(32), u)),
    "product": with_itself(lambda u: u.prod()),
    "einsum": with_itself(lambda u: torch.einsum("ij,kj,il->kl", u, u.cos(), u)),
    "fft": with_itself(lambda u: torch.fft.fft(u).abs()),
    "sparse": with_itself(lambda u: torch.sparse.mm(torch.eye(32).to_sparse(), u) * u),
    "half": lambda a: (a.bfloat16() @ a.bfloat16().t()).float().sin(),
    "in_place": with_itself(lambda u: u.clone().mul_(2).exp_().add(1).sin()),
    "custom": with_itself(Cube.apply),
    "complex": _rope,
    "conjugate": _conjugate,
    "autocast": _autocast,
}

# What shares bytes.
ALIASES = {
    "transpose": with_itself(lambda u: u @ u.t()),
    "slice, then whole": with_itself(lambda u: u[3:7].exp() @ u.exp() + u[3:7] * u[3:7] * (u * u)[3:7]),
    "whole, then slice": with_itself(lambda u: (u * u).sum() + u[3:7] * u[3:7]),
    "slices that meet": with_itself(lambda u: (u[3:9] ** 2).sum() + (u[5:20] ** 2).sum() + (u[19:] ** 2).sum()),
    "expand": with_itself(lambda u: u[:1].expand(32, 32) * u[1:2].expand(32, 32)),
    "expand and whole": with_itself(lambda u: u[:1].expand(32, 32) * u),
    "halves of columns": with_itself(lambda u: u.chunk(2, -1)[0] * u.chunk(2, -1)[1]),
    "column and whole": with_itself(lambda u: (u[:, 3] * u[:, 4]).sum() + u * u),
    "dtype": with_itself(lambda u: torch.view_as_complex(u.reshape(32, 16, 2)).abs() * u[:, ::2]),
    "permuted": with_itself(
        lambda u: u.reshape(4, 8, 32).permute(2, 0, 1).exp() * u.reshape(4, 8, 32).permute(2, 0, 1)
    ),
    "diagonal": with_itself(lambda u: u.diagonal() * u.diagonal(1).sum() * u[0]),
    "two versions": with_itself(lambda u: (lambda v: (v * v).sum() + (v.clone().mul_(2) ** 2).sum())(u.clone())),
    "written in between": with_itself(lambda u: (lambda v: (v * 3).exp().sum() + v.exp_().sin())(u.clone())),
    "layer norm and linear": with_itself(
        lambda u: F.layer_norm(u, (32,)) @ torch.ones(32, 8) + nn.Linear(32, 8)(u.t()) * nn.Linear(32, 8)(u)
    ),
}
