"""Models whose step differentiates a gradient: forces, derivatives in the residual, a gradient penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module], Tensor]


@dataclass(frozen=True)
class Subject:
    """A model, its step, and the modules that become regions.

    Attributes:
        model: The model.
        step: Returns the loss.
        region: The class of these modules.
        most: The largest share of plain's bytes that a region may need.
    """

    model: nn.Module
    step: Step
    region: type[nn.Module]
    most: float


class Message(nn.Module):
    """A block of a message-passing network: each edge makes a message of both nodes and their distance."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, h: Tensor, distances: Tensor, i: Tensor, j: Tensor) -> Tensor:
        messages = self.message(torch.cat([h[i], h[j], distances], -1))
        return h + self.update(torch.cat([h, torch.zeros_like(h).index_add(0, i, messages)], -1))


class Energy(nn.Module):
    """The energy of a molecule: kinds of atoms (atoms,), positions (atoms, 3), edges i and j."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.kinds = nn.Embedding(5, width)
        self.blocks = nn.ModuleList([Message(width) for _ in range(blocks)])
        self.out = nn.Linear(width, 1)

    def forward(self, kinds: Tensor, positions: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distances = (positions[i] - positions[j]).square().sum(-1, keepdim=True)
        h = self.kinds(kinds)
        for block in self.blocks:
            h = block(h, distances, i, j)
        return self.out(h).sum()


class Forces(nn.Module):
    """The energy of a molecule, and the forces on its atoms."""

    def __init__(self, energy: nn.Module) -> None:
        super().__init__()
        self.energy = energy

    def forward(self, kinds: Tensor, positions: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.energy(kinds, positions, i, j)
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


Molecule = tuple[Tensor, Tensor, Tensor, Tensor]


def _molecule(atoms: int) -> Molecule:
    i, j = torch.where(~torch.eye(atoms, dtype=torch.bool))
    return torch.randint(0, 5, (atoms,)), torch.randn(atoms, 3), i, j


def _loss(molecules: list[Molecule]) -> Step:
    def step(model: nn.Module) -> Tensor:
        found = [model(*molecule) for molecule in molecules]
        return sum((1e-3 * energy + forces.square().mean() for energy, forces in found), torch.zeros(()))

    return step


def forces(small: bool) -> Subject:
    """One large molecule: each block is a region, inside of the gradient."""
    width, blocks, atoms = (8, 2, 6) if small else (32, 8, 96)
    return Subject(Forces(Energy(width, blocks)), _loss([_molecule(atoms)]), Message, 0.25)


def molecules(small: bool) -> Subject:
    """A batch of molecules: energy and forces of each are a region, around the gradient."""
    width, blocks, atoms, count = (8, 2, 6, 3) if small else (32, 6, 24, 16)
    return Subject(Forces(Energy(width, blocks)), _loss([_molecule(atoms) for _ in range(count)]), Forces, 0.25)


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


def _network(small: bool, inputs: int) -> nn.Sequential:
    width, layers = (8, 2) if small else (64, 12)
    return nn.Sequential(nn.Linear(inputs, width), *(Layer(width) for _ in range(layers)), nn.Linear(width, 1))


def deep(small: bool) -> Subject:
    """One deep network, and the gradient of its output."""
    points = torch.rand(16 if small else 1024, 3)

    def step(model: nn.Module) -> Tensor:
        x = points.clone().requires_grad_()
        energy = model(x)
        (gradient,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy.square().mean() + gradient.square().mean()

    return Subject(_network(small, 3), step, Layer, 0.35)


def residual(small: bool) -> Subject:
    """A network that solves Burgers' equation: u_t + u u_x = 0.1 u_xx."""
    points = torch.rand(16 if small else 1024, 2)

    def step(model: nn.Module) -> Tensor:
        x = points.clone().requires_grad_()
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
        return (first[:, 1] + u[:, 0] * first[:, 0] - 0.1 * second[:, 0]).square().mean()

    return Subject(_network(small, 2), step, Layer, 0.6)


class Strided(nn.Module):
    """A block of a critic."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.same, self.down = nn.Conv2d(inputs, inputs, 3, padding=1), nn.Conv2d(inputs, outputs, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(self.down(F.leaky_relu(self.same(x), 0.2)), 0.2)


def penalty(small: bool) -> Subject:
    """The critic of a WGAN, with its gradient penalty."""
    width, images, size = (4, 2, 8) if small else (16, 16, 64)
    model = nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), Strided(width, 2 * width), Strided(2 * width, 4 * width),
        Strided(4 * width, 4 * width), nn.Flatten(), nn.Linear(4 * width * (size // 8) ** 2, 1),
    )  # fmt: skip
    real, made, share = (
        torch.randn(images, 3, size, size),
        torch.randn(images, 3, size, size),
        torch.rand(images, 1, 1, 1),
    )

    def step(model: nn.Module) -> Tensor:
        between = (real + share * (made - real)).requires_grad_()
        (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        lengths = gradient.flatten(1).norm(2, dim=1)
        return model(made).mean() - model(real).mean() + 10 * (lengths - 1).square().mean()

    return Subject(model, step, Strided, 0.6)


SUBJECTS: dict[str, Callable[[bool], Subject]] = {
    "message passing with forces, a region for each block": forces,
    "a batch of molecules with forces, a region for each": molecules,
    "a deep network and its gradient": deep,
    "Burgers' equation, second derivatives": residual,
    "critic with a gradient penalty": penalty,
}
