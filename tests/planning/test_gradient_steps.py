"""Steps that take gradients themselves are planned by running them."""

import copy
import gc
import itertools

import pytest
import torch
from torch import nn

from planning.gradient_steps import STEPS, Energy, energy_and_forces, mlp, molecule
from torchremat import (
    Adaptive,
    BudgetError,
    Disk,
    Plan,
    Planner,
    RepeatWarning,
    StepError,
    UnsupportedError,
    fit,
    frontier,
    measure,
    offload,
    plan,
    verify,
)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def step_bytes(found):
    """Return the peak of a plan or a measurement beyond what is live before the step."""
    before = found.before_bytes
    return found.peak_bytes - (sum(before.values()) if isinstance(before, dict) else before)


def trained(model, step):
    """Return the parameters after three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for seed in range(3):
        torch.manual_seed(seed)
        step(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters()]


# A device's thread frees the graph of the step before a moment later.
@pytest.mark.filterwarnings("ignore:since the previous forward")
@pytest.mark.parametrize(
    ("budget", "name"),
    [*(("min", name) for name in STEPS), *(("95% of activations", name) for name in ("molecules", "penalty", "maml"))],
)
def test_a_plan_is_exact_in_bits_and_in_bytes(name, budget):
    model, step = STEPS[name]()
    plain = copy.deepcopy(model)

    made = plan(model, step, budget=budget, cost="flops")
    made.apply(model)
    ours, theirs = measure(model, step), measure(plain, step)

    assert made.peak_bytes <= made.budget_bytes
    assert step_bytes(ours) == step_bytes(made) < step_bytes(theirs)
    assert ours.flops - theirs.flops == made.recomputed_flops
    assert made.recomputed_calls > 0
    ends = trained(plain, step)
    assert all(map(torch.equal, trained(model, step), ends))
    assert all(one.isfinite().all() for one in ends)


def test_each_budget_of_the_frontier_is_kept():
    model, step = STEPS["forces"]()

    points = frontier(model, step, points=4, cost="flops").points

    assert len(points) >= 3
    assert points[-1].step_bytes < points[0].step_bytes / 2
    for point in points[1:]:
        made = plan(model, step, budget=point.budget_bytes, cost="flops")
        assert made.peak_bytes <= point.budget_bytes
        assert made.recomputed_flops <= point.recomputed_flops


def test_the_budget_of_the_plain_step_needs_no_region():
    model, step = STEPS["burgers"]()

    made = plan(model, step, budget="100%")

    assert made.recomputed_calls == 0
    assert step_bytes(made) == step_bytes(measure(model, step))


@pytest.fixture(scope="module")
def least():
    """The plan of the step with forces for the smallest budget, which is not applied yet."""
    torch.manual_seed(0)
    model, step = STEPS["forces"]()
    return plan(model, step, budget="min", cost="flops", certify=True)


def test_a_budget_below_the_lowest_names_the_lowest(least):
    planner = Planner(*STEPS["forces"](), cost="flops")
    lowest = planner.floor_bytes

    assert lowest < least.budget_bytes < 1.02 * lowest  # the cheapest near it
    with pytest.raises(BudgetError, match=f"Smallest budget that works: {lowest} bytes.*backward of"):
        planner.plan(lowest - 1)
    assert planner.plan(lowest).peak_bytes <= lowest


def test_the_optimizer_counts(least):
    model, step = STEPS["forces"]()
    optimizer = torch.optim.Adam(model.parameters())

    made = plan(model, step, budget="min", optimizer=optimizer, cost="flops")

    assert made.optimizer_state_bytes > 2 * sum(one.nbytes for one in model.parameters())
    assert made.peak_bytes == least.peak_bytes + made.optimizer_state_bytes


def test_it_is_verified_written_and_read(tmp_path, least):
    model, step = STEPS["forces"]()
    least.save(tmp_path / "plan.json")

    least.apply(model)
    found = verify(model, step)

    assert found.is_exact
    assert found.recomputed_flops == least.recomputed_flops
    again = Plan.load(tmp_path / "plan.json")
    assert again.tree == least.tree
    assert "takes gradients itself" in str(again)
    assert "takes gradients itself" in least.certificate.claim


def test_the_gradient_is_shown_as_a_part_of_the_step(least, tmp_path):
    phases = [point.what.partition(" ")[0] for point in least.curve]
    _, planned = least.drawn
    least.plot(tmp_path / "plan.png")

    assert [phase for phase, _ in itertools.groupby(phases)] == ["forward", "gradient", "forward", "backward"]
    assert {(one.kind, one.name) for one in planned.slices} >= {("gradient", "gradient"), ("module", "blocks.0")}
    assert least.where.startswith("backward of blocks.")


def test_planning_leaves_nothing():
    model, step = STEPS["forces"]()

    def planned():
        plan(model, step, budget="min", cost="flops")
        gc.collect()
        return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())

    planned()
    assert planned() == planned()


def test_a_loop_is_fitted():
    model, step = STEPS["molecules"]()
    plain = step_bytes(measure(model, step))
    fitted = fit(model, step, budget="60% of activations")

    assert step_bytes(measure(fitted, step)) <= 0.6 * plain


def test_it_is_planned_without_being_run(least):
    model, step = STEPS["forces"]()

    absent = plan(model, step, budget="min", cost="flops", on="meta", device="h100")

    assert absent.recomputed_flops == least.recomputed_flops > 0
    assert absent.peak_bytes < 0.5 * absent.plain_peak_bytes


class Counting(nn.Module):
    numbers = itertools.count()

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return (self.linear(x) * (1 + next(self.numbers) % 7)).tanh()


def test_a_module_that_does_not_repeat_its_forward_is_kept():
    model, step = STEPS["burgers"]()
    model.insert(3, Counting())

    with pytest.warns(RepeatWarning, match="would not do in a recompute what they do in their forward"):
        made = plan(model, step, budget="min")

    assert [*made.unlike] == ["3"]
    assert "3" not in [unit.name for unit in made.units]


class ForcesOf(nn.Module):
    """Takes the gradient of an energy that it is given."""

    def forward(self, energy, positions):
        return torch.autograd.grad(energy, positions, create_graph=True)[0]


class InTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy, self.forces = mlp(3, 1, 32, 3), ForcesOf()

    def forward(self, positions):
        positions = positions.clone().requires_grad_()
        return self.forces(self.energy(positions).sum(), positions)


def test_a_module_that_takes_the_gradient_of_its_input_is_kept_without_a_warning():
    model, positions = InTwo(), torch.randn(64, 3)

    made = plan(model, lambda model: model(positions).square().sum(), budget="min")  # warnings are errors here

    assert [*made.unlike] == ["forces"]
    assert "takes the gradient of what it is given" in made.unlike["forces"]
    assert made.recomputed_calls > 0


def remade(module, changed):
    """Return a module like another, as learn2learn's `clone_module` makes it: all attributes, other parameters."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {name: changed(one) for name, one in module._parameters.items()}
    made._modules = {name: remade(one, changed) for name, one in module._modules.items()}
    return made


def test_modules_made_of_others_attributes_run_their_own_weights_in_all_runs():
    # In the traced step they ran those of the modules that they were made of, so that their gradients were None.
    x, losses = torch.randn(64, 8), set()

    def step(model):
        own = remade(model, torch.clone)
        loss = own(x).square().mean()
        gradients = iter(torch.autograd.grad(loss, [*own.parameters()], create_graph=True))
        found = remade(own, lambda one: one - 0.5 * next(gradients))(x).square().mean()
        losses.add(found.item())
        return found

    model = mlp(8, 1, 32, 3)
    plain = [*torch.autograd.grad(step(model), [*model.parameters()])]
    plan(model, step, budget="min").apply(model)

    assert all(map(torch.equal, torch.autograd.grad(step(model), [*model.parameters()]), plain))
    assert len(losses) == 1


def gradients(model, train):
    model.zero_grad()
    train()
    return [one.grad.clone() for one in model.parameters()]


def test_sizes_that_change_are_planned_from_a_few():
    model = Energy()

    def plain(given):
        return measure(model, lambda model: energy_and_forces(model, given))

    budget = plain(molecule(20)).peak_bytes
    adaptive = Adaptive(model, energy_and_forces, budget=budget, shape=lambda given: given[0].shape, cost="flops")
    adaptive.learn(*map(molecule, (8, 12, 16)))

    for atoms in (10, 24, 28, 20):
        given = molecule(atoms)
        want = gradients(model, lambda given=given: energy_and_forces(model, given).backward())
        assert all(map(torch.equal, gradients(model, lambda given=given: adaptive(given)), want))

    assert adaptive.learned == 3  # no other size was run for a plan
    first, *others = adaptive.plans
    assert first.shape == (10,) and not first.recomputed_calls
    assert all(one.recomputed_calls > 0 for one in others)
    for one in adaptive.plans:
        assert one.peak_bytes <= budget
        # Of sizes that were not run the peak is exact: it is a polynomial of the number of atoms.
        assert one.measured_bytes is None or one.measured_bytes == one.peak_bytes
    assert budget < plain(molecule(24)).peak_bytes


# ------------------------------------------------------------------------------------------------------- what is not


def test_a_step_that_calls_backward_is_told_to_return_its_loss():
    model = mlp(4, 1, 8, 2)

    def step(model):
        loss = model(torch.ones(2, 4)).sum()
        loss.backward()
        return loss

    with pytest.raises(StepError, match=r"Return the loss without calling backward.*`torch\.autograd\.grad`"):
        plan(model, step, budget="min")


def test_stores_are_around_the_step(least):
    model, step = STEPS["forces"]()

    with pytest.raises(
        UnsupportedError, match=r"takes gradients itself.*leave out `stores=`.*offload\(store\)` around"
    ):
        plan(model, step, budget="min", stores=[Disk()])

    least.apply(model)
    plain, disk = measure(model, step), Disk()

    def stored(model):
        with offload(disk, min_bytes=0):
            return step(model)

    assert measure(model, stored).kept_bytes < plain.kept_bytes
    assert disk.statistics.peak_stored_bytes > 0
