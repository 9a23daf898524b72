"""Steps of changing shapes under plans that keep parts of a block: which operators are held is one choice for all."""

from functools import partial

import pytest
from torch import nn

from planning.test_adaptive import equal, fixed_bytes, gpt, gradients, peak_bytes, plain_bytes, step, tokens
from torchremat import Adaptive


def halved(model, run, batch):
    """A budget that leaves a half of what the plain step of a batch adds."""
    return (fixed_bytes(model) + plain_bytes(model, run, batch)) // 2


@pytest.fixture(scope="module")
def model():
    return gpt()


@pytest.fixture
def adaptive(model, adaptive_once):
    """One that has learned three lengths, of a model without gradients."""
    gradients(model)
    return adaptive_once


@pytest.fixture(scope="module")
def adaptive_once(model):
    made = Adaptive(model, step, budget=halved(model, step, tokens(207)), cost="flops")
    made.learn(tokens(16), tokens(40), tokens(64))
    return made


def learned(model, budget, **options):
    made = Adaptive(model, step, budget=budget, cost="flops", **options)
    made.learn(tokens(16), tokens(40), tokens(64))
    return made


def lowest(model, batch, **options):
    """The peak of the plan that needs the least."""
    adaptive = learned(model, fixed_bytes(model), over="warn", **options)
    adaptive._chosen(adaptive._look(batch), batch)
    return adaptive._decisions._chosen.peak_bytes


def held(adaptive, batch):
    """What units hold in the plan for a batch."""
    return adaptive._chosen(adaptive._look(batch), batch).held


def families(adaptive):
    (kind,) = adaptive._decisions.classes._kinds.values()
    return kind.families.families


def test_blocks_are_kept_in_part_with_the_plain_gradients_and_the_predicted_bytes(model, adaptive):
    batch = tokens(207)  # the largest of its class
    step(model, batch).backward()
    expected = gradients(model)

    peak = peak_bytes(model, partial(adaptive, batch), batch)

    assert equal(gradients(model), expected)
    assert held(adaptive, batch)
    own = next(one for one in adaptive.plans if one.shape == (2, 208))
    assert own.peak_bytes == peak <= adaptive.budget_bytes


def test_that_takes_fewer_flops_than_whole_blocks(model, adaptive):
    adaptive(tokens(207))
    gradients(model)
    whole = Adaptive(model, step, budget=adaptive.budget_bytes, cost="flops", operators=False)
    whole.learn(tokens(16), tokens(40), tokens(64))

    whole(tokens(207))

    gradients(model)
    assert not held(whole, tokens(207))
    flops = [one.recomputed_flops for one in (*adaptive.plans, *whole.plans) if one.shape == (2, 208)]
    assert flops[0] < 0.6 * flops[1]


def test_calls_inside_of_such_blocks_are_watched_in_the_first_profile_alone(adaptive):
    (family,) = families(adaptive)

    assert [pair.leaves is None for pair in family.pairs.values()] == [False, True, True]


def test_blocks_are_recomputed_in_parts_where_nothing_else_fits():
    model, batch = gpt(), tokens(207)
    budget = int(0.8 * lowest(model, batch, operators=False))
    adaptive = learned(model, budget)
    step(model, batch).backward()
    expected = gradients(model)

    peak = peak_bytes(model, partial(adaptive, batch), batch)

    assert equal(gradients(model), expected)
    assert all(one.cuts for one in held(adaptive, batch))
    (own,) = adaptive.plans
    assert own.peak_bytes == peak <= budget
    assert lowest(model, batch) <= budget


class Uneven(nn.Module):
    """A block that runs one more operator on long inputs, in place on a tensor that nobody saves."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        out = self.inner(x) - 1.0
        return (out.add_(0.5) if x.shape[1] > 40 else out) * 2.0


def test_blocks_whose_operators_change_with_the_shape_are_kept_or_recomputed_whole():
    # The calls and storages are the same at all shapes, so these are one family; the numbers of the operators are not.
    model = gpt()
    model.blocks = nn.ModuleList(map(Uneven, model.blocks))
    adaptive = Adaptive(model, step, budget=halved(model, step, tokens(160)), cost="flops")
    adaptive.learn(tokens(16), tokens(32), tokens(39))
    assert held(adaptive, tokens(150))
    adaptive.learn(tokens(64))
    step(model, tokens(150)).backward()
    expected = gradients(model)

    adaptive(tokens(150))

    assert equal(gradients(model), expected)
    assert not held(adaptive, tokens(150))
    assert len(families(adaptive)) == 1
