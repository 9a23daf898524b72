"""Memory that torch has not allocated is in no peak, and in no prediction."""

import numpy as np
import pytest
import torch
from torch import nn

from compiled import MARKS, fresh
from planning.kinds import inputs, square
from planning.steps import Measured, blocks, differences, each, keep_all, outcome, under
from probes.planning import predict, trace
from torchremat import Planner, verify

pytestmark = MARKS

ROWS, WIDTH = 64, 256
MASK = ROWS * WIDTH * 4


def array():
    return np.tile(np.float32([0, 1]), (ROWS, WIDTH // 2))


class Masked(nn.Module):
    """A block that multiplies with what `mask` makes of its hidden values."""

    def __init__(self, mask):
        super().__init__()
        self.up, self.down = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)
        self.mask = mask

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        return x + self.down(hidden * self.mask(hidden))


class Biased(nn.Module):
    """A block that adds what it is given, and saves none of it. A region around it holds it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, x, bias):
        return self.down(torch.tanh(self.up(x) + bias))


class Given(nn.Module):
    """Blocks that are given what `mask` makes."""

    def __init__(self, mask):
        super().__init__()
        self.blocks = nn.ModuleList(Biased() for _ in range(4))
        self.mask = mask

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, self.mask(x))
        return x


def masked(mask):
    return nn.Sequential(*(Masked(mask) for _ in range(4)))


SHARED = torch.tensor(array()).share_memory_()


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mask"
    array().tofile(path)
    return str(path)


def masks(file):
    return {
        "NumPy": lambda _: torch.from_numpy(array()),
        "protocol": lambda _: torch.from_dlpack(array()),
        "buffer": lambda _: torch.frombuffer(bytearray(array()), dtype=torch.float32).view(ROWS, WIDTH),
        "shared": lambda _: SHARED,
        # These are the allocator's, and so are files that torch maps. Of the last two the storage is not torch's own.
        "file": lambda _: torch.from_file(file, size=ROWS * WIDTH).view(ROWS, WIDTH),
        "copy": lambda _: torch.tensor(array()),
        "through NumPy": lambda _: torch.from_numpy(torch.ones(ROWS, WIDTH).numpy()),
        "through the protocol": lambda _: torch.from_dlpack(torch.ones(ROWS, WIDTH)),
    }


@pytest.mark.parametrize("model_of", [masked, Given])
@pytest.mark.parametrize("kind", masks(""))
def test_predicted_is_measured_to_the_byte(kind, model_of, file):
    # A mask of NumPy's was counted as if the allocator had made it: predictions were up to 40% of the step too high.
    torch.manual_seed(0)
    model, x = model_of(masks(file)[kind]), inputs(ROWS, 32)

    def step(model):
        return square(model(x))

    profile, plain, own = blocks(model, step), outcome(model, step), Measured(model, step)
    for tree in (keep_all(4), each(4), (*keep_all(2), *each(4)[2:])):
        with under(model, profile, tree):
            assert own.peak() == predict(profile, tree).peak_bytes
            assert differences(outcome(model, step), plain) == []


@pytest.mark.parametrize("share", [1.0, 0.7, 0.5, 0.0])
def test_plans_fit_what_they_are_given(share):
    # Operators inside of the blocks may be kept as well: the product with the mask reads it, and keeps none of it.
    torch.manual_seed(0)
    model, x = masked(lambda _: torch.from_numpy(array())), inputs(ROWS, 32)

    def step(model):
        return square(model(x))

    planner = Planner(model, step, cost="flops")
    plain_bytes, _ = planner.plain_peak()
    assert planner.profiled.peak_of(planner.solver.plain) == plain_bytes
    planned = planner.plan(planner.floor_bytes + int(share * (plain_bytes - planner.floor_bytes)))
    planned.apply(model)
    found = verify(model, step)
    planned.remove(model)

    assert found.is_exact
    assert found.peak_bytes == planned.peak_bytes


def test_a_batch_from_an_array_changes_nothing():
    # It is there all the time, and no moment of a step differs from another by it.
    torch.manual_seed(0)
    model = masked(torch.ones_like)
    x, of_array = inputs(ROWS, 32), torch.from_numpy(inputs(ROWS, 32).numpy().copy())

    peaks = [
        [predict(blocks(model, lambda m, x=x: square(m(x))), tree).peak_bytes for tree in (keep_all(4), each(4))]
        for x in (x, of_array)
    ]

    assert peaks[0] == peaks[1]


def test_what_has_no_address_is_counted():
    # Where a device is simulated, an array stands for memory of the device: code that moves it there makes nothing.
    model, x = masked(lambda hidden: torch.from_numpy(array()).to(hidden.device)), inputs(ROWS, 32)

    planner = Planner(model, lambda m: square(m(x)), cost="flops", on="meta", device="h100")

    sizes = planner.profile.units.trace.storage_bytes
    assert sum(size == MASK for size in sizes.values()) >= 4
    assert 0 not in sizes.values()


def test_without_a_record_all_is_counted():
    model, x = masked(lambda _: torch.from_numpy(array())), inputs(ROWS, 32)

    assert 0 not in trace(model, lambda m: square(m(x))).storage_bytes.values()


class Compiled(Given):
    """The same with compiled blocks."""

    def __init__(self, mask):
        super().__init__(mask)
        for block in self.blocks:
            block.compile(backend="aot_eager")


def test_blocks_that_are_compiled():
    fresh()
    torch.manual_seed(0)
    model, x = Compiled(lambda _: torch.from_numpy(array())), inputs(ROWS, 32)

    def step(model):
        return square(model(x))

    profile, own = blocks(model, step), Measured(model, step)

    for tree in (keep_all(4), each(4)):
        with under(model, profile, tree):
            assert own.peak() == predict(profile, tree).peak_bytes
