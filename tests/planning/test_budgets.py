"""How a budget is said: in bytes, as a share of the plain peak or of the activations, or the smallest that works."""

import re

import pytest
import torch
from torch import nn

import torchremat
from planning.kinds import inputs, linear, square
from torchremat import Adaptive, BudgetError, Planner
from torchremat.planning.budgets import Relative, checked_bytes, optimizer_alone, relative_of


def subject():
    x = inputs(512, 64)
    model = nn.Sequential(*(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(6)))
    return model, lambda model: square(model(x))


@pytest.fixture(scope="module")
def planner():
    return Planner(*subject(), cost="flops")


@pytest.mark.parametrize(
    ("budget", "percent", "of"),
    [
        ("60%", 60, "peak"),
        (" 12.5 % ", 12.5, "peak"),
        ("40% of activations", 40, "activations"),
        ("40%of Activations", 40, "activations"),
        ("60% of peak", 60, "peak"),
        ("min", 100, "smallest"),
        (" MIN ", 100, "smallest"),
    ],
)
def test_what_depends_on_the_step(budget, percent, of):
    assert relative_of(budget) == Relative(percent=percent, of=of)


@pytest.mark.parametrize("budget", [60, "60", "6GiB", 2**30])
def test_what_does_not(budget):
    assert relative_of(budget) is None


def test_a_share_of_the_activations_leaves_what_lies_there_before():
    # 1000 bytes of which 400 lie there before: 600 of activations, of which 40% are 240.
    found = Relative(percent=40, of="activations").bytes(plain_bytes=1000, before_bytes=400, smallest=int)

    assert found == 640


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (60, 'budget=60 is 60 bytes. Did you mean "60%" or "60GiB"?'),
        ("60", 'budget=\'60\' is not a size, since it has no unit. Did you mean "60%" or "60GiB"?'),
        ("0.6", 'budget=\'0.6\' is not a size, since it has no unit. Did you mean "60%" or "0.6GiB"?'),
        (0.6, 'budget=0.6 is not a size, since it has no unit. Did you mean "60%" or "0.6GiB"?'),
        (6.0, 'budget=6.0 is not a size, since it has no unit. Did you mean "6%" or "6GiB"?'),
        (512, 'budget=512 is 512 bytes. Did you mean "512MiB"?'),
    ],
)
def test_numbers_that_nobody_means_are_asked_about(budget, said):
    with pytest.raises(BudgetError, match=re.escape(said)):
        checked_bytes(budget)


def test_bytes_are_bytes_from_a_thousand_on():
    assert checked_bytes(1000) == 1000


def test_the_smallest_budget_is_planned_for(planner):
    made = planner.plan("min")

    assert made.budget_bytes == planner.floor_bytes
    assert made.peak_bytes < made.budget_bytes < made.plain_peak_bytes
    assert "(min)" in str(made)


def test_a_margin_comes_on_top_of_the_smallest(planner):
    made = planner.plan("min", margin="1KiB")

    assert made.budget_bytes == planner.floor_bytes + 1024
    assert made.peak_bytes == planner.plan("min").peak_bytes


def test_the_smallest_is_confirmed_by_a_step():
    model, step = subject()

    torchremat.fit(model, step, budget="min", cost="flops")
    report = torchremat.verify(model, step)

    assert report.is_exact
    assert report.peak_bytes <= Planner(*subject(), cost="flops").floor_bytes


def test_where_nothing_can_be_recomputed_the_smallest_is_the_plain_step():
    x = inputs(64)

    made = torchremat.plan(linear(), lambda model: square(model(x)), budget="min", cost="flops")

    assert made.budget_bytes == made.peak_bytes == made.plain_peak_bytes
    assert made.slowdown == 1.0


def test_a_frontier_has_the_smallest_and_shares_too(planner):
    frontier = planner.frontier(points=4)

    assert frontier.plan("min").peak_bytes == frontier.points[-1].peak_bytes
    assert frontier.plan("100% of activations").peak_bytes == frontier.points[0].peak_bytes


@pytest.mark.parametrize("budget", ["1%", "1% of activations", "2KiB"])
def test_an_error_says_which_shares_work_and_they_do(planner, budget):
    with pytest.raises(BudgetError) as caught:
        planner.plan(budget)

    shares = re.search(r'As shares: "(\d+%)", or "(\d+% of activations)"', str(caught.value))
    of_peak, of_activations = shares.groups()
    assert planner.plan(of_peak).peak_bytes <= planner.plan(of_peak).budget_bytes
    assert planner.plan(of_activations).peak_bytes <= planner.plan(of_activations).budget_bytes


@pytest.mark.parametrize("budget", ["min", "60%", "40% of activations"])
def test_lengths_that_change_have_no_plain_step(budget):
    with pytest.raises(BudgetError, match="differs from shape to shape; give the budget in bytes"):
        Adaptive(nn.Linear(2, 2), lambda model, batch: model(batch).sum(), budget=budget)


def test_sizes_without_units_that_are_whole_are_read_as_decimal():
    model, step = subject()

    assert torchremat.plan(model, step, budget="1G", cost="flops").budget_bytes == 10**9


# The advice was the same for every optimizer: foreach=False on the CPU, where that is the default, and options that the
# optimizer does not have.
@pytest.mark.parametrize(
    ("kind", "options", "advice"),
    [
        (torch.optim.AdamW, {"foreach": True}, " AdamW with foreach=False or fused=True needs less."),
        (torch.optim.AdamW, {}, " AdamW with fused=True needs less."),
        (torch.optim.Adamax, {"foreach": True}, " Adamax with foreach=False needs less."),
        (torch.optim.AdamW, {"fused": True}, ""),
        (torch.optim.LBFGS, {}, ""),
        (None, {}, ""),
    ],
)
def test_only_options_that_an_optimizer_has_are_advised(kind, options, advice):
    optimizer = None if kind is None else kind([torch.zeros(2, requires_grad=True)], **options)

    told = optimizer_alone(2048, "2KiB", optimizer, peak_bytes=4096, reserved_bytes=0)

    assert told.endswith(f"Smallest budget that works: 4096 bytes.{advice}")


def test_off_the_host_none_is_foreach():
    optimizer = torch.optim.AdamW([torch.zeros(2, requires_grad=True, device="meta")])

    told = optimizer_alone(2048, "2KiB", optimizer, peak_bytes=4096, reserved_bytes=0)

    assert told.endswith("AdamW with foreach=False or fused=True needs less.")


class Recording(nn.Module):
    """Returns what each of its layers makes, as a model does that keeps a cache."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x):
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]).relu())
        return found


def test_the_error_says_that_the_step_holds_outputs():
    model, held = Recording(), []

    def step(model):
        held[:] = model(torch.randn(512, 64))
        return held[-1].sum()

    with pytest.raises(BudgetError, match=r"Its peak is in backward of layers\.\d: 768\.00 KiB of outputs that the"):
        torchremat.plan(model, step, budget="10kB")


def test_the_error_says_that_the_loss_holds_the_floor():
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4096)), torch.randn(256, 8)

    def step(model):
        return torch.log_softmax(model(x), -1).square().mean()

    # The softmax saves 4 MiB; the logits, made by a module, are gone. Gradients through the loss take four times that.
    match = r"loss, between .*: 3\.99 MiB of what the step's own code holds, which no plan lowers; 16\.00 MiB needed"
    with pytest.raises(BudgetError, match=match):
        torchremat.plan(model, step, budget="10kB")
