"""Steps that hold what moves on by itself, iterators and optimizers, and the bytes that a guard holds."""

import functools

import pytest
import torch
from torch import nn

from probes.memory import bytes_before, record_allocations
from torchremat import GuardError, UnsupportedError, guard

CPU = torch.device("cpu")


def small():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])


def loss_of(model, x):
    return model(x).square().mean()


def out_of_memory():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class Trainer:
    """A step that is a method, with its loader as an attribute."""

    def __init__(self, batches):
        self.loader = iter(batches)
        self.spare = iter(batches)  # not named by the step

    def step(self, model):
        return loss_of(model, next(self.loader))

    def other(self, model, x):
        return loss_of(model, x)


def test_a_step_that_takes_its_batch_from_an_iterator_is_refused():
    # Run again, such a step would silently train on the next batch, and planning would take some as well.
    model, batches = small(), [torch.randn(8, 16) for _ in range(4)]
    loader = iter(batches)
    trainer = Trainer(batches)

    def following():
        return next(loader)

    steps = {
        "`loader`": lambda model: loss_of(model, next(loader)),
        "`self`|`loader`": trainer.step,
        "`argument 0`": functools.partial(lambda it, model: loss_of(model, next(it)), loader),
        "`it`": lambda model, it=loader: loss_of(model, next(it)),
        r"\(`loader`": lambda model: loss_of(model, following()),
    }
    for words, step in steps.items():
        with guard(model, step) as run, pytest.raises(UnsupportedError, match=words):
            run()
    given = pytest.raises(UnsupportedError, match=r"an argument.*`for batch in loader")
    with guard(model, lambda model, it: loss_of(model, next(it))) as run, given:
        run(loader)
    assert next(loader) is batches[0]

    with guard(model, trainer.other) as run:  # holds one, and does not name it
        run(batches[0])


@pytest.mark.parametrize("known", ["given", "held"])
def test_memory_that_runs_out_in_the_midst_of_an_optimizer_is_told(known):
    # Adam writes its moments, and then asks for memory; no parameter is written by then. Run again, the step would have
    # counted twice in the moments.
    model, x = small(), torch.randn(8, 16)
    optimizer = torch.optim.Adam(model.parameters())
    loss_of(model, x).backward()
    optimizer.step()
    before = [one.clone() for one in model.parameters()]

    def backward(loss, optimizer=optimizer if known == "held" else None):
        loss.backward()
        for state in (model[0], model[1]):
            points.state[state[0].weight]["exp_avg"].mul_(0.9)
        raise out_of_memory()

    points = optimizer if known == "held" else type("", (), {"state": optimizer.state})
    given = {"optimizer": optimizer} if known == "given" else {}
    told = pytest.raises(GuardError, match="state of an optimizer")
    with guard(model, loss_of, backward=backward, **given) as run, told:
        run(x)

    assert len(run.attempts) == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


def test_the_first_step_of_an_optimizer_is_noticed_as_well():
    model, x = small(), torch.randn(8, 16)
    optimizer = torch.optim.Adam(model.parameters())

    def backward(loss):
        loss.backward()
        parameter = model[0][0].weight
        optimizer.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
        raise out_of_memory()

    with guard(model, loss_of, backward=backward) as run, pytest.raises(GuardError, match="state of an optimizer"):
        run(x)


class Counting(nn.Module):
    """Blocks with buffers that every step writes, so that a guard copies them before each."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4))
        self.register_buffer("seen", torch.zeros(100_000))

    def forward(self, x):
        self.seen += 1
        for block in self.blocks:
            x = x + block(x)
        return x


def test_what_a_guard_copies_counts_in_its_budget():
    torch.manual_seed(0)
    model, x = Counting(), torch.randn(256, 32)
    copies = model.seen.nbytes

    def peak(run):
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        leaves = list(model.parameters())
        before = bytes_before(models=[model], leaves=leaves, optimizers=[], inputs=[x], device=CPU)
        with record_allocations(CPU) as recorder:
            run()
        return before.total_bytes + recorder.trace.peak_bytes

    budget = int(0.8 * (peak(lambda: loss_of(model, x).backward()) + copies))
    with guard(model, loss_of, budget=budget, cost="flops") as run:
        run(x)
        assert copies <= run.held_bytes < copies + 10_000
        assert peak(lambda: run(x)) <= budget
        assert run.plan.peak_bytes <= budget - copies
