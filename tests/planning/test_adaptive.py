"""Steps of changing shapes: within the budget, with the plain step's gradients, on a model that stays as it was."""

import math
import random
import threading
import warnings
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models
from logs import Log
from planning.steps import CPU, fingerprint, profile
from probes.memory import bytes_before, record_allocations
from probes.planning import cover, every_unit, figures_of, form_of, gauges, predict, with_figures
from torchremat import Adaptive, BudgetError, BudgetWarning, PlanError, StepError, UnsupportedError, plan, wrap

BATCH = 2


def step(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(length, *, batch=BATCH, seed=0):
    return torch.randint(0, 64, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def gpt(**options):
    torch.manual_seed(0)
    return models.GPT(**{"blocks": 3, "width": 32, "heads": 2, "context": 512, "vocabulary": 64} | options)


def fixed_bytes(model):
    """The bytes of the parameters, and of the gradients at the end of a step."""
    return 2 * sum(4 * parameter.numel() for parameter in model.parameters())


def plain_bytes(model, run, batch):
    """The allocator's peak of a plain step with all that lay there before."""
    peak = peak_bytes(model, lambda: run(model, batch).backward(), batch)
    gradients(model)
    return peak


def peak_bytes(model, run, batch):
    gradients(model)
    before = bytes_before(models=[model], leaves=list(model.parameters()), optimizers=[], inputs=[batch], device=CPU)
    with record_allocations(CPU) as recorder:
        run()
    return before.total_bytes + recorder.trace.peak_bytes


def gradients(model):
    found = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    return found


def equal(one, other):
    return all(a is b is None or torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def learned(learned_once):
    """A model, an Adaptive for it that has learned three lengths, and its budget: about a half of a plain step's peak.

    At 200 tokens that is; at 60 the plain step fits. The model has no gradients.
    """
    gradients(learned_once[0])
    return learned_once


@pytest.fixture(scope="module")
def learned_once():
    model = gpt()
    plain = plain_bytes(model, step, tokens(200))
    budget = fixed_bytes(model) + (plain - fixed_bytes(model)) // 2
    adaptive = Adaptive(model, step, budget=budget, cost="flops")
    adaptive.learn(tokens(16), tokens(40), tokens(64))
    return model, adaptive, budget


# ------------------------------------------------------------------------------------------------------------- figures


@pytest.fixture(scope="module")
def pair():
    model = gpt()
    return {length: profile(model, partial(step, tokens=tokens(length))) for length in (16, 40, 64, 200)}


def test_figures_make_the_profile_that_they_are_of(pair):
    own, other = pair[40].blocks, pair[16].blocks

    made = with_figures(other, figures_of(own))

    assert figures_of(made).tolist() == figures_of(own).tolist()
    assert predict(made, every_unit(made.units)).peak_bytes == predict(own, every_unit(own.units)).peak_bytes


def test_a_fit_of_three_lengths_is_exact_at_a_fourth_three_times_as_long(pair):
    known = (16, 40, 64)
    found = cover([(length,) for length in known], (200,), exact=True)

    for own in ("blocks", "leaves"):
        real = getattr(pair[200], own)
        table = [figures_of(getattr(pair[length], own)) for length in known]
        made = with_figures(getattr(pair[64], own), found.weights @ table)
        for tree in (every_unit(real.units), every_unit(real.units, 2)):
            assert predict(made, tree).peak_bytes == pytest.approx(predict(real, tree).peak_bytes, abs=1024)
            assert predict(made, tree).flops == predict(real, tree).flops


def test_shapes_that_take_the_same_way_have_the_same_form(pair):
    assert form_of(pair[16]) == form_of(pair[200])


# --------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("length", [16, 33, 60, 100, 128, 200])
def test_gradients_are_those_of_the_plain_step(learned, length):
    model, adaptive, _ = learned
    batch = tokens(length, seed=length)
    loss = step(model, batch)
    loss.backward()
    expected = gradients(model)

    found = adaptive(batch)

    assert torch.equal(found, loss.detach())
    assert not found.requires_grad
    assert equal(gradients(model), expected)


def test_no_step_of_random_lengths_is_above_the_budget(learned):
    model, adaptive, budget = learned
    rng = random.Random(1)
    lengths = [round(math.exp(rng.uniform(math.log(16), math.log(200)))) for _ in range(40)]

    peaks = [peak_bytes(model, partial(adaptive, tokens(n)), tokens(n)) for n in lengths]
    assert max(peaks) <= budget
    assert max(peaks) > 0.9 * budget
    assert adaptive.learned == 3
    assert plain_bytes(model, step, tokens(max(lengths))) > budget


def test_short_batches_are_not_recomputed_and_long_ones_are():
    model = gpt()
    calls = Log()
    model.blocks[1].up.register_forward_pre_hook(lambda *_: calls.append(1))
    plain = plain_bytes(model, step, tokens(200))
    adaptive = Adaptive(model, step, budget=int(0.6 * plain), cost="flops")
    adaptive.learn(tokens(16), tokens(40), tokens(64))

    counts = []
    for length in (20, 200):
        calls.clear()
        adaptive(tokens(length))
        gradients(model)
        counts.append(len(calls))

    assert counts == [1, 2]
    short, long = adaptive.plans
    assert (short.recomputed_calls, short.slowdown) == (0, 1.0)
    assert long.recomputed_flops > 0
    assert long.shape == (BATCH, 208)  # 201 tokens with the last target, in the class of 193 to 208
    assert "2 x 208" in str(adaptive)


def test_predictions_are_the_measured_peaks(learned):
    _, adaptive, _ = learned

    adaptive(tokens(127))  # 128 tokens: the largest of its class

    own = next(one for one in adaptive.plans if one.shape == (BATCH, 128))
    if own.measured_bytes is not None:
        assert own.measured_bytes == pytest.approx(own.peak_bytes, rel=0.002)
    assert any(one.measured_bytes is not None for one in adaptive.plans)


def test_lengths_that_come_back_are_planned_once(learned):
    model, adaptive, _ = learned
    adaptive(tokens(90))
    planned = {one.shape: one.steps for one in adaptive.plans}

    for length in (90, 91):
        gradients(model)
        adaptive(tokens(length))

    after = {one.shape: one.steps for one in adaptive.plans}
    assert after.keys() == planned.keys()
    assert sum(after.values()) == sum(planned.values()) + 2


def test_the_first_batches_are_learned_if_nobody_has():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops")

    for length in (15, 31, 30, 63, 50, 100):
        adaptive(tokens(length))
        gradients(model)

    assert adaptive.learned == 3
    adaptive(tokens(400))  # more than four times what was seen? 401 / 101 is less
    assert adaptive.learned == 3


def test_far_beyond_the_shapes_seen_a_batch_is_learned():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops")
    adaptive.learn(tokens(7), tokens(15), tokens(31))

    adaptive(tokens(300))

    assert adaptive.learned == 4


def test_batch_and_length_vary():
    model = gpt(blocks=2, width=16)
    plain = plain_bytes(model, step, tokens(128, batch=5))
    budget = fixed_bytes(model) + (plain - fixed_bytes(model)) * 7 // 10
    adaptive = Adaptive(model, step, budget=budget, cost="flops")
    adaptive.learn(*(tokens(t, batch=b) for b, t in [(2, 16), (3, 16), (5, 16), (2, 40), (5, 40), (4, 70)]))

    peaks = [
        peak_bytes(model, lambda b=b, t=t: adaptive(tokens(t, batch=b)), tokens(t, batch=b))
        for b, t in [(5, 128), (3, 100), (2, 128), (2, 33), (4, 20)]
    ]

    assert max(peaks) <= budget
    assert adaptive.learned == 6
    assert any(one.recomputed_flops for one in adaptive.plans)
    assert not all(one.recomputed_flops for one in adaptive.plans)


def test_a_ragged_last_batch_needs_no_profile(learned):
    _, adaptive, _ = learned
    batch = tokens(60, batch=2)[:2]
    learned_before = adaptive.learned

    adaptive(batch)

    assert adaptive.learned == learned_before


class TwoWays(nn.Module):
    """Takes another way through itself where there are more than 40 rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        for block in self.first:
            x = x + block(x)
            if len(x) > 40:
                x = torch.tanh(self.last(x))
        return x


def squares(model, x):
    return model(x).square().mean()


def test_shapes_of_another_code_path_are_another_family():
    model = TwoWays()
    adaptive = Adaptive(model, squares, budget=240_000, cost="flops")
    plain = [torch.randn(rows, 16) for rows in (8, 16, 32, 64, 80, 120, 20, 100, 36, 42)]

    for x in plain:
        squares(model, x).backward()
        expected = gradients(model)
        adaptive(x)
        assert equal(gradients(model), expected)

    (kind,) = adaptive._decisions.classes._kinds.values()
    below, above = kind.families.families
    assert all(shape[0] <= 40 for shape in below.shapes)
    assert all(shape[0] > 40 for shape in above.shapes)


class Unseen(nn.Module):
    """Calls `forward` of a module, so that no hook sees the call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x).relu()
        return x


def test_calls_that_hooks_do_not_see_are_learned_once():
    model = Unseen()
    adaptive = Adaptive(model, squares, budget="1GiB", cost="flops")
    adaptive.learn(*(torch.randn(rows, 16) for rows in (8, 16, 32)))

    for rows in (20, 12, 48, 64, 100):
        adaptive(torch.randn(rows, 16))
        gradients(model)

    assert adaptive.learned == 4


class Cached(nn.Module):
    """Makes a table by a call in its first forward, and keeps it, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.angles = nn.Linear(16, 16)
        self.layer = nn.Linear(16, 16)
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = self.angles(torch.ones(16)).detach()
        return self.layer(x * self.table).relu()


@pytest.mark.parametrize("lengths", [(8,), (8, 16, 32)])
def test_a_learned_shape_that_takes_another_way_now_is_learned_anew(lengths):
    """The table was made after the shapes were learned. The family of the shape that ran had no shape any more, or
    other ones in its place, and the step was compared with what no figures were left for: NumPy's error, or another
    shape's prediction."""
    model = Cached()
    adaptive = Adaptive(model, squares, budget="1GiB", cost="flops")
    adaptive.learn(*(torch.randn(rows, 16) for rows in lengths))
    x = torch.randn(lengths[0], 16)
    squares(model, x).backward()
    expected = gradients(model)

    adaptive(x)

    assert equal(gradients(model), expected)
    assert adaptive.learned == len(lengths) + 1
    adaptive(x)
    assert adaptive.learned == len(lengths) + 1


def test_under_a_profiler_of_the_users_nothing_is_measured():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops")
    adaptive.learn(tokens(8), tokens(16), tokens(32))

    with torch.autograd.profiler.profile() as mine:
        adaptive(tokens(20))

    assert len(mine.function_events) > 10
    assert adaptive.plans[0].measured_bytes is None


class AtRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(12))

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            if len(x) >> place & 1:
                x = layer(x).relu()
        return self.layers[0](x)


def test_ever_other_ways_are_an_error():
    adaptive = Adaptive(AtRandom(), squares, budget="1GiB", cost="flops")

    with pytest.raises(StepError, match="has taken 9 different ways through the model"):
        adaptive.learn(*(torch.randn(rows, 4) for rows in range(1, 2000, 7)))


def test_training_and_evaluation_are_learned_apart():
    model = gpt(blocks=2, width=16, dropout=0.5)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops")
    for training in (True, False, True):
        model.train(training)
        adaptive(tokens(16))
        gradients(model)

    assert adaptive.learned == 2
    assert len(adaptive._decisions.classes._kinds) == 2


def test_dropout_draws_the_same_numbers():
    model = gpt(dropout=0.3)
    plain = plain_bytes(model, step, tokens(100))
    adaptive = Adaptive(model, step, budget=fixed_bytes(model) + (plain - fixed_bytes(model)) * 6 // 10, cost="flops")
    torch.manual_seed(3)
    step(model, tokens(100)).backward()
    expected, after = gradients(model), torch.get_rng_state()

    torch.manual_seed(3)
    adaptive(tokens(100))

    assert adaptive.plans[0].recomputed_flops > 0
    assert torch.equal(torch.get_rng_state(), after)
    assert equal(gradients(model), expected)


# ------------------------------------------------------------------------------------------------------------- batches


@dataclass
class Batch:
    words: torch.Tensor
    targets: torch.Tensor
    number: int = 0


def of_kind(kind, length):
    own = tokens(length)
    words, targets = own[:, :-1], own[:, 1:]
    return {
        "tuple": (words, targets),
        "dict": {"words": words, "targets": targets},
        "dict turned round": {"targets": targets, "words": words},
        "dataclass": Batch(words, targets),
        "list of strings": [" ".join(map(str, row)) for row in own.tolist()],
    }[kind]


def of_any_kind(model, batch):
    if isinstance(batch, Batch):
        words, targets = batch.words, batch.targets
    elif isinstance(batch, dict):
        words, targets = batch["words"], batch["targets"]
    elif isinstance(batch, list):
        own = torch.tensor([[int(word) for word in row.split()] for row in batch])
        words, targets = own[:, :-1], own[:, 1:]
    else:
        words, targets = batch
    return F.cross_entropy(model(words).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("kind", ["tuple", "dict", "dataclass", "list of strings"])
def test_batches_of_any_kind(kind):
    model = gpt(blocks=2, width=16)
    shape = (lambda rows: (len(rows), len(rows[0].split()))) if kind == "list of strings" else None
    adaptive = Adaptive(model, of_any_kind, budget="1GiB", cost="flops", shape=shape)
    adaptive.learn(*(of_kind(kind, length) for length in (8, 16, 32)))
    of_any_kind(model, of_kind(kind, 20)).backward()
    expected = gradients(model)

    adaptive(of_kind(kind, 20))

    assert equal(gradients(model), expected)
    assert adaptive.learned == 3


def test_the_order_of_keys_is_no_matter():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, of_any_kind, budget="1GiB", cost="flops")
    adaptive(of_kind("dict", 16))
    gradients(model)

    adaptive(of_kind("dict turned round", 16))

    assert adaptive.learned == 1


class Holder:
    """An object of the user's with what it likes inside."""

    def __init__(self, rows):
        self.rows = rows


# The length of a step is not that of the tensor beside it.
HIDDEN = {
    "array": (lambda n: np.zeros((1, n, 16), np.float32), torch.from_numpy),
    "int": (lambda n: n, lambda n: torch.zeros(1, n, 16)),
    "list of ints": (lambda n: [1] * n, lambda own: torch.zeros(1, len(own), 16)),
    "list of strings": (lambda n: ["word " * n], lambda own: torch.zeros(1, len(own[0].split()), 16)),
    "object with a tensor": (lambda n: Holder(torch.zeros(1, n, 16)), lambda own: own.rows),
    "object": (lambda n: Holder(f"{n}"), lambda own: torch.zeros(1, int(own.rows), 16)),
    "float": (lambda n: n / 1000, lambda share: torch.zeros(1, round(1000 * share), 16)),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_no_step_is_above_the_budget_in_silence_where_a_length_is_no_tensors(kind):
    hide, find = HIDDEN[kind]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))

    def run(model, batch):
        hidden, x = batch
        return model(x + find(hidden)).square().mean()

    def batch(length):
        return hide(length), torch.ones(4, 1, 16)

    rises = [peak_bytes(model, lambda n=n: run(model, batch(n)).backward(), batch(n)[1]) for n in (40, 400)]
    gradients(model)
    budget = rises[0] + (rises[1] - rises[0]) // 2
    adaptive = Adaptive(model, run, budget=budget, cost="flops", over="warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for length in (20, 40, 80, 160, 320, 400):
            adaptive(batch(length))
            gradients(model)

    if kind in ("object", "float"):
        assert any(one.category is BudgetWarning for one in told)
    else:
        assert not told
        assert max(one.recomputed_calls for one in adaptive.plans) > 0


def test_a_step_counter_in_a_batch_is_learned_a_few_times_and_no_more():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, lambda model, batch: step(model, batch["tokens"]), budget="1GiB", cost="flops")
    for number in range(1, 60):
        adaptive({"tokens": tokens(16 + number % 7), "number": number})
        gradients(model)

    assert adaptive.learned <= 12


def test_a_batch_is_not_refused_by_a_fit_that_is_none_of_its_step():
    # It pads to a multiple of 256, and the lengths that were learned make a line that rises.
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)))

    def run(model, x):
        return model(F.pad(x, (0, 0, 0, -x.shape[1] % 256))).square().mean()

    def batch(length):
        return torch.ones(2, length, 16)

    floor = plain_bytes(model, run, batch(512))
    adaptive = Adaptive(model, run, budget=floor, cost="flops")
    adaptive.learn(batch(200), batch(256), batch(260))
    learned = adaptive.learned

    adaptive(batch(500))

    assert adaptive.learned == learned + 1


def test_a_batch_without_tensors_needs_a_shape():
    adaptive = Adaptive(gpt(blocks=2, width=16), of_any_kind, budget="1GiB")

    with pytest.raises(StepError, match=r"a list, has no tensors in plain sight.* `shape=`"):
        adaptive(of_kind("list of strings", 8))


@pytest.mark.parametrize("shape", [(), (3, -1), (2.0,), None, (True,)])
def test_a_shape_that_is_none(shape):
    adaptive = Adaptive(gpt(blocks=2, width=16), step, budget="1GiB", shape=lambda _: shape)

    with pytest.raises(StepError, match="expected a tuple of sizes"):
        adaptive(tokens(8))


# --------------------------------------------------------------------------------------------------------- the budget


@pytest.fixture
def tight():
    """An Adaptive for which batches of 200 tokens are too large."""
    model = gpt(blocks=2, width=16)
    return model, fixed_bytes(model) + 100_000


def test_a_batch_that_no_plan_fits_is_not_run(tight):
    model, budget = tight
    adaptive = Adaptive(model, step, budget=budget, cost="flops")
    adaptive.learn(tokens(8), tokens(16), tokens(50))
    before = fingerprint(model)

    with pytest.raises(BudgetError, match=r"no plan fits .* for this batch \(batch 2 x 201\); it was not run"):
        adaptive(tokens(200))

    assert before.changes(fingerprint(model)) == []
    adaptive(tokens(8))


def test_the_smallest_budget_that_works_works(tight):
    model, budget = tight
    with pytest.raises(BudgetError) as error:
        Adaptive(model, step, budget=budget, cost="flops")(tokens(200))
    smallest = int(str(error.value).partition("works: ")[2].partition(" bytes")[0])

    Adaptive(model, step, budget=smallest, cost="flops")(tokens(200))


def test_with_a_warning_it_runs_in_as_little_as_can_be(tight):
    model, budget = tight
    adaptive = Adaptive(model, step, budget=budget, cost="flops", over="warn")
    adaptive.learn(tokens(8), tokens(16), tokens(50))

    with pytest.warns(BudgetWarning, match="no plan fits"):
        adaptive(tokens(200))
    gradients(model)
    adaptive(tokens(200))  # warned once

    (own,) = adaptive.plans
    assert own.steps == 2
    assert own.recomputed_flops > 0


@pytest.mark.parametrize("over", ["raise", "warn"])
def test_a_step_above_the_budget_is_told_and_the_next_plans_leave_more(monkeypatch, over):
    model = gpt()
    rise = plain_bytes(model, step, tokens(200)) - fixed_bytes(model)
    budget = fixed_bytes(model) + int(0.85 * rise)
    adaptive = Adaptive(model, step, budget=budget, cost="flops", over=over)
    adaptive.learn(tokens(16), tokens(40), tokens(64))
    step(model, tokens(150)).backward()
    expected = gradients(model)
    real = gauges.record_allocations
    monkeypatch.setattr(gauges, "record_allocations", lambda device: _Needing(real(device), rise // 5))

    with pytest.raises(BudgetError, match="measured at") if over == "raise" else pytest.warns(BudgetWarning):
        adaptive(tokens(150))

    assert equal(gradients(model), expected)  # they are there all the same
    monkeypatch.undo()
    (loose,) = adaptive.plans
    assert loose.recomputed_flops == 0
    assert loose.measured_bytes > budget
    adaptive(tokens(150))
    tight = next(one for one in adaptive.plans if one.recomputed_calls > loose.recomputed_calls)
    assert tight.peak_bytes < loose.peak_bytes


class Picking(nn.Module):
    """A wide layer for the rows that begin with a positive number."""

    def __init__(self, pick):
        super().__init__()
        self.pick, self.up, self.down = pick, nn.Linear(8, 256), nn.Linear(256, 8)

    def forward(self, x):
        rows = self.pick(x[:, 0] > 0)
        return x.index_add(0, rows, self.down(F.gelu(self.up(x[rows]))))


def picking(pick=lambda mask: torch.where(mask)[0]):
    torch.manual_seed(0)
    return nn.Sequential(*(Picking(pick) for _ in range(4)))


def picked(share, rows=128):
    """Rows of which this share is picked, whatever is added to them."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] = torch.where(torch.arange(rows) < share * rows, 100.0, -100.0)
    return x


def loss_of_rows(model, x):
    return model(x).square().mean()


@pytest.mark.parametrize(
    ("pick", "measured"),
    [
        (lambda mask: mask.nonzero()[:, 0], 3),
        (lambda mask: torch.arange(len(mask))[mask], 3),
        (lambda mask: torch.argsort(mask.byte())[:32], 1),
    ],
)
def test_where_sizes_depend_on_values_every_step_is_measured(pick, measured, monkeypatch):
    calls, real = [], gauges.record_allocations
    monkeypatch.setattr(gauges, "record_allocations", lambda device: calls.append(device) or real(device))
    model = picking(pick)
    adaptive = Adaptive(model, loss_of_rows, budget="1GiB", cost="flops")
    for _ in range(3):
        adaptive(picked(0.5))
        gradients(model)

    assert len(calls) == measured


def test_a_batch_of_a_known_shape_that_needs_more_is_told():
    # More rows were picked than in the batch that was measured, so that nobody looked, and the budget was exceeded.
    model = picking()
    rise = plain_bytes(model, loss_of_rows, picked(0.5)) - fixed_bytes(model)
    adaptive = Adaptive(model, loss_of_rows, budget=fixed_bytes(model) + int(1.2 * rise), cost="flops", over="warn")
    for _ in range(2):
        adaptive(picked(0.5))
        gradients(model)

    with pytest.warns(BudgetWarning, match="measured at .*, above the budget"):
        adaptive(picked(1.0))

    gradients(model)
    (loose,) = adaptive.plans
    assert loose.recomputed_calls == 0
    adaptive(picked(0.5))
    (tight,) = adaptive.plans
    assert tight.recomputed_calls > 0


class _Needing:
    """A recorder that saw a higher peak."""

    def __init__(self, inner, extra):
        self.inner, self.extra = inner, extra

    def __enter__(self):
        self.recorder = self.inner.__enter__()
        return self

    def __exit__(self, *error):
        return self.inner.__exit__(*error)

    @property
    def trace(self):
        return SimpleNamespace(peak_bytes=self.recorder.trace.peak_bytes + self.extra)


def test_an_optimizer_counts():
    model = gpt(blocks=2, width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops", optimizer=optimizer)

    adaptive(tokens(16))
    gradients(model)
    bare = Adaptive(model, step, budget="1GiB", cost="flops")
    bare(tokens(16))

    assert not optimizer.state
    state = sum(4 * p.numel() for p in model.parameters())
    assert adaptive.plans[0].peak_bytes == bare.plans[0].peak_bytes + state


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_count_from_the_first_call_that_begins_with_some(accumulates):
    model, batch = gpt(blocks=2, width=16), tokens(16)
    expected = []
    for begins in (accumulates, True):
        if begins:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        held = sum(parameter.grad.nbytes for parameter in model.parameters() if begins)
        before = sum(parameter.nbytes for parameter in model.parameters()) + batch.nbytes + held
        with record_allocations(CPU) as recorder:
            step(model, batch).backward()
        expected.append(before + recorder.trace.peak_bytes)
        gradients(model)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops", accumulates=accumulates)

    found = []
    for _ in range(3):
        adaptive(batch)
        found += [one.peak_bytes for one in adaptive.plans]

    assert found == [expected[0], expected[1], expected[1]]
    assert (adaptive.learned, len(set(found))) == ((1, 1) if accumulates else (2, 2))
    assert [one.steps for one in adaptive.plans] == [3 if accumulates else 2]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"budget": "60%"}, BudgetError, "differs from shape to shape"),
        ({"budget": 0}, BudgetError, "budget|size"),
        ({"cost": "joules"}, UnsupportedError, "cost='joules'"),
        ({"over": "ignore"}, UnsupportedError, "over='ignore'"),
        ({"classes": 0}, UnsupportedError, "classes=0"),
        ({"shape": 3}, UnsupportedError, "shape=3: expected a function that returns the sizes of a batch"),
    ],
)
def test_bad_options(options, error, said):
    options = {"budget": "1GiB", **options}

    with pytest.raises(error, match=said):
        Adaptive(gpt(blocks=2, width=16), step, **options)


@pytest.mark.parametrize("bad", [None, 3])
def test_a_step_that_is_none(bad):
    with pytest.raises(StepError, match="step"):
        Adaptive(gpt(blocks=2, width=16), bad, budget="1GiB")


@pytest.mark.parametrize("bad", [lambda model: None, lambda model, batch, targets: None])
def test_a_step_of_other_arguments(bad):
    # It was a bare TypeError, of the first batch.
    with pytest.raises(StepError, match=r"it is called as `step\(model, batch\)`, which .* does not take"):
        Adaptive(gpt(blocks=2, width=16), bad, budget="1GiB")


def test_a_wrapped_model_is_refused(learned):
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops")
    wrap(model, "blocks.1")

    with pytest.raises(PlanError, match="wrapped modules already"):
        adaptive(tokens(8))
    with pytest.raises(PlanError, match="wrapped modules already"):
        Adaptive(model, step, budget="1GiB")


# --------------------------------------------------------------------------------------------------------- what stays


def test_nothing_stays_on_the_model(learned):
    model, adaptive, _ = learned
    gradients(model)
    before = fingerprint(model)

    adaptive(tokens(180))
    gradients(model)

    assert before.changes(fingerprint(model)) == []


@pytest.mark.parametrize("place", ["forward", "backward", "recompute"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_a_step_leaves_the_model(place, kind):
    model = gpt()
    failing = []

    def run(model, batch):
        loss = step(model, batch)
        if failing and place == "forward":
            raise kind("on purpose")
        if failing and place == "backward":
            loss.register_hook(_raiser(kind))
        return loss

    plain = plain_bytes(model, run, tokens(100))
    adaptive = Adaptive(model, run, budget=int(0.6 * plain), cost="flops")
    adaptive(tokens(100))
    gradients(model)
    assert adaptive.plans[0].recomputed_flops > 0
    calls = Log()

    def counted(*_):
        calls.append(1)
        if failing and place == "recompute" and len(calls) == 2:
            raise kind("on purpose")

    model.blocks[1].up.register_forward_pre_hook(counted)
    before = fingerprint(model)

    failing.append(1)
    with pytest.raises(kind, match="on purpose"):
        adaptive(tokens(100))
    failing.clear()
    gradients(model)

    assert before.changes(fingerprint(model)) == []
    adaptive(tokens(100))


def _raiser(kind):
    def hook(_):
        raise kind("on purpose")

    return hook


def test_two_threads_at_once_are_refused():
    model = gpt(blocks=2, width=16)
    inside, go, errors = threading.Event(), threading.Event(), []

    def run(model, batch):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go.wait(120)
        return step(model, batch)

    adaptive = Adaptive(model, run, budget="1GiB", cost="flops")
    adaptive(tokens(8))
    gradients(model)
    worker = threading.Thread(target=lambda: adaptive(tokens(8)))
    worker.start()
    assert inside.wait(120)
    try:
        adaptive(tokens(8))
    except UnsupportedError as error:
        errors.append(str(error))
    go.set()
    worker.join()

    assert "another step of this Adaptive is running" in errors[0]
    gradients(model)
    adaptive(tokens(8))
    assert sum(one.steps for one in adaptive.plans) == 3


def test_no_more_plans_are_kept_than_asked_for():
    model = gpt(blocks=2, width=16)
    adaptive = Adaptive(model, step, budget="1GiB", cost="flops", classes=3)
    adaptive.learn(tokens(8), tokens(16), tokens(32))

    for length in range(8, 31, 2):
        adaptive(tokens(length))
        gradients(model)

    assert [one.shape[1] for one in adaptive.plans] == [28, 30, 32]


def test_closed():
    model = gpt(blocks=2, width=16)
    with Adaptive(model, step, budget="1GiB", cost="flops") as adaptive:
        adaptive(tokens(8))

    assert adaptive.plans == ()
    with pytest.raises(UnsupportedError, match="is closed"):
        adaptive(tokens(8))
    with pytest.raises(UnsupportedError, match="is closed"):
        adaptive.learn(tokens(8))


def test_without_grad_mode_there_is_nothing_to_plan(learned):
    _, adaptive, _ = learned
    with torch.no_grad(), pytest.raises(StepError, match="grad mode is off"):
        adaptive(tokens(8))


def test_a_block_that_runs_forward_and_backward_itself_is_under_a_plan():
    batch = tokens(96)
    plain = gpt()
    (step(plain, batch) / 4).backward()
    expected = gradients(plain)
    model = gpt()
    budget = fixed_bytes(model) + (plain_bytes(model, step, batch) - fixed_bytes(model)) * 3 // 5

    with Adaptive(model, step, budget=budget, cost="flops") as adaptive:
        with adaptive.under(batch):
            (step(model, batch) / 4).backward()
        found = gradients(model)
        with pytest.raises(UnsupportedError, match="another step of this Adaptive is running"), adaptive.under(batch):
            adaptive(batch)
        with pytest.raises(ZeroDivisionError), adaptive.under(batch):
            raise ZeroDivisionError

        assert all(map(torch.equal, found, expected))
        (planned,) = adaptive.plans
        assert (planned.steps, planned.recomputed_calls > 0) == (1, True)
        assert planned.measured_bytes <= budget
    assert not any("forward" in vars(module) for module in model.modules())


def smallest(error):
    return int(str(error).partition("Smallest budget that works: ")[2].partition(" bytes")[0])


def encoders():
    """Blocks whose attention is the larger part of the saved bytes the longer a batch is."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.1) for _ in range(3)))


def encoded(model, batch):
    return model(batch).square().mean()


def test_its_smallest_budget_is_that_of_a_plan_for_the_batch():
    # A batch was planned as the longest one of its class, of eight in each octave, by what was best at the longest one
    # learned: it needed up to a third more. It needs no page for errors of a prediction, since the step is measured.
    model, batch = encoders(), torch.randn(2, 65, 32)
    lowest = plan(model, lambda model: encoded(model, batch), budget="min", cost="flops")
    adaptive = Adaptive(model, encoded, budget="1kB", cost="flops")
    adaptive.learn(*(torch.randn(2, length, 32) for length in (32, 48, 256)))
    with pytest.raises(BudgetError) as told:
        adaptive(batch)
    adaptive.close()

    tight = Adaptive(model, encoded, budget=smallest(told.value), cost="flops")
    tight.learn(*(torch.randn(2, length, 32) for length in (32, 48, 256)))
    torch.manual_seed(1)
    tight(batch)
    found = gradients(model)
    torch.manual_seed(1)
    encoded(model, batch).backward()

    assert smallest(told.value) <= lowest.budget_bytes
    assert equal(found, gradients(model))


def test_the_smallest_budget_is_that_of_the_batch_where_the_optimizer_needs_less():
    # The peak of the optimizer's step was told, below which no budget works, but at which most do not.
    model, batch = encoders(), torch.randn(2, 64, 32)
    optimizer = torch.optim.AdamW(model.parameters())

    with pytest.raises(BudgetError, match="for this batch") as told:
        Adaptive(model, encoded, budget="1kB", cost="flops", optimizer=optimizer)(batch)
    Adaptive(model, encoded, budget=smallest(told.value), cost="flops", optimizer=optimizer)(batch)
