"""Steps that take gradients themselves: each a model with its step, by name."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F


def mlp(given, returned, width, depth):
    hidden = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(given, width), nn.Tanh(), *hidden, nn.Linear(width, returned))


class Messages(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * width + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())

    def forward(self, h, distances, i, j):
        messages = self.message(torch.cat([h[i], h[j], distances], -1))
        return h + torch.zeros_like(h).index_add(0, i, messages) / len(h)


class Energy(nn.Module):
    def __init__(self, width=16, blocks=4):
        super().__init__()
        self.atoms, self.out = nn.Embedding(5, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Messages(width) for _ in range(blocks))

    def forward(self, kinds, positions, i, j):
        distances = (positions[i] - positions[j]).square().sum(-1, keepdim=True)
        h = self.atoms(kinds)
        for block in self.blocks:
            h = block(h, distances, i, j)
        return self.out(h).sum()


class EnergyAndForces(nn.Module):
    """Takes its own gradient, as those of force fields do."""

    def __init__(self, energy):
        super().__init__()
        self.energy = energy

    def forward(self, kinds, positions, i, j):
        positions = positions.clone().requires_grad_()
        energy = self.energy(kinds, positions, i, j)
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, gradient


def molecule(atoms=24):
    i, j = torch.where(~torch.eye(atoms, dtype=torch.bool))
    return torch.randint(0, 5, (atoms,)), torch.randn(atoms, 3), i, j


def energy_and_forces(model, given):
    """The loss of a model of energies for a molecule, with a gradient that is taken here."""
    kinds, positions, i, j = given
    own = positions.clone().requires_grad_()
    energy = model(kinds, own, i, j)
    (gradient,) = torch.autograd.grad(energy, own, create_graph=True)
    return 1e-3 * energy + gradient.square().mean()


def forces():
    """A gradient in the step's own code."""
    given = molecule()
    return Energy(), lambda model: energy_and_forces(model, given)


def forces_inside():
    """A gradient in the model."""
    given = molecule()

    def step(model):
        energy, gradient = model(*given)
        return 1e-3 * energy + gradient.square().mean()

    return EnergyAndForces(Energy()), step


def molecules():
    """A gradient in each of several calls of the model."""
    batch = [molecule(atoms) for atoms in (12, 16, 20, 24)]

    def step(model):
        found = [model(*one) for one in batch]
        return sum(1e-3 * energy + gradient.square().mean() for energy, gradient in found)

    return EnergyAndForces(Energy(blocks=2)), step


def burgers():
    """A second derivative in the residual of a differential equation."""
    points = torch.rand(256, 2)

    def step(model):
        own = points.clone().requires_grad_()
        u = model(own)
        (first,) = torch.autograd.grad(u.sum(), own, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), own, create_graph=True)
        return (first[:, 1] + u[:, 0] * first[:, 0] - 0.01 * second[:, 0]).square().mean()

    return mlp(2, 1, 64, 6), step


def penalty():
    """A critic, three of whose forwards have a gradient and a penalty on another gradient."""
    real, fake = torch.randn(128, 16), torch.randn(128, 16)

    def step(model):
        share = torch.rand(128, 1)
        mixed = (share * real + (1 - share) * fake).requires_grad_()
        (gradient,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        return model(fake).mean() - model(real).mean() + 10 * (gradient.norm(dim=1) - 1).square().mean()

    return mlp(16, 1, 64, 6), step


def maml():
    """Three inner steps, each with the gradient of all weights."""
    x, y = torch.randn(2, 64, 8), torch.randn(2, 64, 1)

    def step(model):
        weights = dict(model.named_parameters())
        for _ in range(3):
            loss = F.mse_loss(functional_call(model, weights, (x[0],)), y[0])
            gradients = torch.autograd.grad(loss, [*weights.values()], create_graph=True)
            pairs = zip(weights.items(), gradients, strict=True)
            weights = {name: one - 0.01 * gradient for (name, one), gradient in pairs}
        return F.mse_loss(functional_call(model, weights, (x[1],)), y[1])

    return mlp(8, 1, 32, 3), step


class Divergence(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(9, 8, 32, 2)

    def forward(self, time, z):
        dz = self.net(torch.cat([z, time.expand(len(z), 1)], 1))
        ones = torch.ones_like(z)
        (product,) = torch.autograd.grad(dz, z, ones, create_graph=True)
        return dz, -(product * ones).sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.field = Divergence()

    def forward(self, z):
        z, likelihood = z.clone().requires_grad_(), torch.zeros(len(z))
        for number in range(8):
            dz, dl = self.field(torch.tensor(number / 8), z)
            z, likelihood = z + dz / 8, likelihood + dl / 8
        return z, likelihood


def flow():
    """Steps of a solver, each with a gradient in it, as in FFJORD."""
    given = torch.randn(64, 8)

    def step(model):
        z, likelihood = model(given)
        return (z.square().sum(1) / 2 - likelihood).mean()

    return Flow(), step


def adversarial():
    """A gradient that is not differentiated, for an input that fools the model."""
    x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))

    def step(model):
        own = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(own), y), own)
        return F.cross_entropy(model(x + 0.1 * gradient.sign()), y)

    return mlp(16, 4, 64, 8), step


STEPS = {one.__name__: one for one in (forces, forces_inside, molecules, burgers, penalty, maml, flow, adversarial)}
