"""A loop has the gradients of the plain loop, and runs as many steps again as its schedule says."""

import gc
import threading

import pytest
import torch
from torch import nn
from torch.func import functional_call

from logs import Count
from torchremat import Disk, Host, checkpoint, loop, policies, session
from torchremat.errors import MutationError
from torchremat.regions.region import Region
from torchremat.schedules.binomial import OnlineBorders, advances

STEPS = 23
STATES = STEPS * 5056  # each step draws, and keeps the state of its generator


# Slots; a mixture of carries and recorded steps; blocks; a store with a limit, which the schedule uses.
OPTIONS = [
    {"slots": 3},
    {"budget": 5000 + STATES},
    {"budget": 12_000 + STATES},
    {"slots": 2, "stores": (Host(600),), "transfer_steps": 0.5},
]


class Machine:
    """A recurrent body with dropout, a buffer that it writes, writes in place, two carries and two outputs."""

    def __init__(self):
        self.cell, self.norm, self.drop = nn.GRUCell(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.xs = torch.randn(STEPS, 5, 4, requires_grad=True)
        self.h0 = torch.randn(5, 6, requires_grad=True)
        self.leaves = [*self.cell.parameters(), *self.norm.parameters(), self.xs, self.h0]
        self.runs = Count()

    def carry(self):
        return {"h": self.h0, "sum": (torch.zeros(()),)}

    def body(self, carry, x):
        self.runs.up()
        h = self.norm(self.cell(x, self.drop(carry["h"])))
        out = h.sin()
        out.mul_(2)
        return {"h": h, "sum": (carry["sum"][0] + out.sum(),)}, (out, h.cos())

    def plain(self):
        carry, outputs = self.carry(), []
        for x in self.xs.unbind():
            carry, output = self.body(carry, x)
            outputs.append(output)
        return carry, tuple(map(torch.stack, zip(*outputs, strict=True)))

    def loop(self, **options):
        return loop(self.body, self.carry(), self.xs, **options)

    def online(self, **options):
        """The same by a condition: the index is a part of the carry."""

        def body(carry, _):
            inner, output = self.body(carry["inner"], self.xs[int(carry["index"])])
            return {"inner": inner, "index": carry["index"] + 1}, output

        start = {"inner": self.carry(), "index": torch.zeros((), dtype=torch.long)}
        carry, outputs = loop(body, start, condition=lambda carry: carry["index"] < STEPS, **options)
        return carry["inner"], outputs

    def results(self, run, backward=torch.Tensor.backward):
        """The loss, the gradients, and all state that the loop leaves."""
        torch.manual_seed(3)
        self.norm.reset_running_stats()
        for leaf in self.leaves:
            leaf.grad = None
        start = self.runs.value
        carry, (first, second) = run()
        # Parts of the outputs are used alone.
        loss = carry["h"].sum() + carry["sum"][0] / 10 + first.square().mean() + second[5].sum()
        gradients = backward(loss) or [leaf.grad for leaf in self.leaves]
        found = [loss.detach(), *gradients, self.norm.running_mean.clone(), self.norm.running_var.clone()]
        return [*found, torch.rand(1)], self.runs.value - start


def assert_equal(found, plain):
    assert [torch.equal(one, other) for one, other in zip(found, plain, strict=True)] == [True] * len(plain)


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8, 30])
def test_with_slots_the_fewest_steps_run_again(slots):
    machine = Machine()

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(lambda: machine.loop(slots=slots))

    assert_equal(found, plain)
    assert runs == STEPS + advances(STEPS, slots)  # of the last step none, of the others one run records


@pytest.mark.parametrize("budget", [3000, 4000, 8000, 20_000, 2**20])
def test_with_a_budget_runs_are_as_the_schedule_says(budget):
    machine, schedules = Machine(), []

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(lambda: machine.loop(budget=budget + STATES, on_schedule=schedules.append))

    assert_equal(found, plain)
    assert runs == STEPS + schedules[0].recomputed_steps
    assert schedules[0].saved_bytes <= budget + STATES
    assert schedules[0].state_bytes == 5056
    assert schedules[0].least_recomputed() <= schedules[0].recomputed_steps


@pytest.mark.parametrize("store", [Disk, Host])
@pytest.mark.parametrize("transfer_steps", [1, 10])
def test_with_a_store_runs_are_as_the_schedule_says(store, transfer_steps):
    machine, schedules, made = Machine(), [], store()
    options = {"slots": 3, "stores": (made,), "transfer_steps": transfer_steps, "on_schedule": schedules.append}

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(lambda: machine.loop(**options))

    assert_equal(found, plain)
    assert runs == STEPS + schedules[0].recomputed_steps
    assert made.statistics.stored_bytes == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 6, 40])
def test_a_loop_of_unknown_length_runs_what_its_borders_cost(slots):
    machine = Machine()
    borders = OnlineBorders(slots)
    for _ in range(STEPS - 1):
        borders.next()
    *stretches, last = borders.lengths
    again = sum(advances(length, slots - place) + length for place, length in enumerate(stretches))
    # The last step keeps what autograd saves, and to reach the others of its stretch is not free.
    again += advances(last, slots - len(stretches)) - (last - 1) + (last - 1)

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(lambda: machine.online(slots=slots))

    assert_equal(found, plain)
    assert runs == STEPS + again


@pytest.mark.parametrize("options", [{"slots": 1}, {"slots": 4}, {"budget": 118_000}, {"budget": 125_000}])
def test_with_times_of_steps_runs_are_as_the_schedule_says(options):
    machine, schedules, costs = Machine(), [], [1.0] * 10 + [9.0] * 3 + [2.0] * 10

    plain, _ = machine.results(machine.plain)
    options = {**options, "step_costs": costs, "on_schedule": schedules.append}
    found, runs = machine.results(lambda: machine.loop(**options))

    assert_equal(found, plain)
    (schedule,) = schedules
    assert STEPS < runs <= STEPS + schedule.recomputed_steps
    assert runs == STEPS + schedule.recomputed_steps or schedule.block > 1  # of which the last one may be shorter


def test_a_loop_of_unknown_length_within_a_budget():
    machine, schedules = Machine(), []

    plain, _ = machine.results(machine.plain)
    found, _ = machine.results(lambda: machine.online(budget=6000, on_schedule=schedules.append))

    assert_equal(found, plain)
    assert schedules[0].steps is None
    assert schedules[0].saved_bytes <= 6000


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def in_a_session(loss):
    with session():
        twice(loss)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("backward", [twice, in_a_session])
def test_a_second_backward(backward, options):
    machine = Machine()

    plain, _ = machine.results(machine.plain, twice)
    found, runs = machine.results(lambda: machine.loop(**options), backward)

    assert_equal(found, plain)
    assert runs > STEPS


def test_a_session_shares_one_recompute():
    machine = Machine()

    _, runs = machine.results(lambda: machine.loop(slots=3), in_a_session)

    assert runs == STEPS + advances(STEPS, 3)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_double_backward(options):
    machine = Machine()

    def double(loss):
        leaves = [*machine.cell.parameters(), machine.h0, machine.xs]
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in gradients), leaves)

    plain, _ = machine.results(machine.plain, double)
    found, _ = machine.results(lambda: machine.loop(**options), double)

    assert_equal(found, plain)


@pytest.mark.parametrize("options", OPTIONS)
def test_in_a_region(options):
    machine = Machine()

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(lambda: checkpoint(machine.loop, **options))
    _, alone = machine.results(lambda: machine.loop(**options))

    assert_equal(found, plain)
    assert runs == STEPS + alone  # the region runs its loop once more


def test_in_a_loop():
    machine = Machine()

    def nested():
        head, tail = machine.xs[:20].reshape(4, 5, 5, 4), machine.xs[20:]
        carry, outputs = loop(lambda carry, x: loop(machine.body, carry, x, slots=2), machine.carry(), head, slots=2)
        carry, others = loop(machine.body, carry, tail, slots=1)
        return carry, tuple(torch.cat([one.flatten(0, 1), two]) for one, two in zip(outputs, others, strict=True))

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(nested)

    assert_equal(found, plain)
    assert runs > STEPS


def test_under_other_hooks():
    machine = Machine()

    def on_cpu():
        with torch.autograd.graph.save_on_cpu():
            return machine.loop(slots=3)

    plain, _ = machine.results(machine.plain)
    found, runs = machine.results(on_cpu)

    assert_equal(found, plain)
    assert runs == STEPS + advances(STEPS, 3)


def test_with_a_policy_and_by_value():
    machine = Machine()

    plain, _ = machine.results(machine.plain)
    kept, _ = machine.results(lambda: machine.loop(slots=3, policy=policies.save_matmuls))
    online, _ = machine.results(lambda: machine.online(slots=3, policy=policies.save_matmuls))
    compared, _ = machine.results(lambda: machine.loop(slots=3, check="values"))

    assert_equal(kept, plain)
    assert_equal(online, plain)
    assert_equal(compared, plain)


def test_a_part_of_the_gradients():
    machine = Machine()

    def of_start(loss):
        return list(torch.autograd.grad(loss, [machine.h0]))

    plain, _ = machine.results(machine.plain, of_start)
    found, _ = machine.results(lambda: machine.loop(slots=4), of_start)

    assert_equal(found, plain)


def test_without_grad_it_is_the_plain_loop():
    machine = Machine()

    with torch.no_grad():
        carry, (first, _) = machine.loop(slots=2)

    assert machine.runs.value == STEPS
    assert not carry["h"].requires_grad
    assert first.shape == (STEPS, 5, 6)


def test_inner_steps_that_run_backward():
    """MAML: the gradient of what inner steps of gradient descent have learned."""
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    names = [name for name, _ in net.named_parameters()]
    x, y, rate = torch.randn(20, 2), torch.randn(20, 1), torch.tensor(0.1, requires_grad=True)

    def loss_of(weights):
        return (functional_call(net, dict(zip(names, weights, strict=True)), (x,)) - y).square().mean()

    def inner(weights, _):
        loss = loss_of(weights)
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return tuple(one - rate * grad for one, grad in zip(weights, gradients, strict=True)), loss

    def outer(run):
        weights, losses = run(tuple(net.parameters()))
        return torch.autograd.grad(loss_of(weights) + losses.sum() / 100, [*net.parameters(), rate])

    def plainly(weights):
        losses = []
        for _ in range(12):
            weights, loss = inner(weights, None)
            losses.append(loss)
        return weights, torch.stack(losses)

    plain = outer(plainly)

    for options in ({"slots": 1}, {"slots": 3}, {"budget": 10_000}):
        assert_equal(outer(lambda weights, options=options: loop(inner, weights, length=12, **options)), plain)


def wave(h, w):
    return (h * w).sin()


# Forward-mode differentiation makes torch script its own functions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.func.grad(f)(torch.ones(3)),
        lambda f: torch.func.vmap(torch.func.grad(f))(torch.linspace(0, 1, 12).reshape(4, 3)),
        lambda f: torch.func.jacrev(f)(torch.ones(3)),
        lambda f: torch.func.hessian(f)(torch.ones(3)),
        lambda f: torch.func.jvp(f, (torch.ones(3),), (torch.ones(3),))[1],
    ],
    ids=["grad", "vmap", "jacrev", "hessian", "jvp"],
)
def test_under_torch_func(transform):
    w, count = torch.linspace(0.5, 1.5, 3, requires_grad=True), Count()

    def body(h, _):
        count.up()
        return wave(h, w), None

    def plain(h):
        for _ in range(9):
            h = wave(h, w)
        return h.sum()

    found = transform(lambda h: loop(body, h, length=9, slots=2)[0].sum())

    assert torch.equal(found, transform(plain))
    assert count.value >= 9


# Dynamo looks at the gradients of all that a resumed function is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_in_compiled_functions():
    w = torch.linspace(0.5, 1.5, 3, requires_grad=True)
    compiled_wave = torch.compile(wave, backend="eager")

    def step(h, inner=wave):
        return loop(lambda h, _: (inner(h, w), None), h, length=9, slots=2)[0].sum()

    (plain,) = torch.autograd.grad(step(torch.ones(3)), w)
    (around,) = torch.autograd.grad(torch.compile(step, backend="eager")(torch.ones(3)), w)
    (inside,) = torch.autograd.grad(step(torch.ones(3), compiled_wave), w)

    assert torch.equal(around, plain)
    assert torch.equal(inside, plain)


def test_backwards_in_several_threads():
    machine, found = Machine(), []
    machine.norm.eval()  # buffers belong to all threads
    plain, _ = machine.results(machine.plain)

    def work(loss):
        found.append(torch.autograd.grad(loss, machine.leaves, retain_graph=True))

    torch.manual_seed(3)
    for leaf in machine.leaves:
        leaf.grad = None
    carry, (first, second) = machine.loop(budget=5000 + STATES)
    loss = carry["h"].sum() + carry["sum"][0] / 10 + first.square().mean() + second[5].sum()
    threads = [threading.Thread(target=work, args=(loss,)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)

    assert len(found) == 4
    for gradients in found:
        assert_equal(gradients, plain[1 : 1 + len(machine.leaves)])


class Changing(nn.Module):
    """A body whose steps change what the next one reads, at some of the steps."""

    def __init__(self, every):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.every, self.steps, self.scales = every, 0, [1.0]
        self.table = {"shift": 0.1}

    def forward(self, h, _):
        self.steps += 1
        if self.steps % self.every == 0:
            self.scales.append(0.9 * self.scales[-1])
            self.table["shift"] = 0.3 * self.steps
            self.linear.weight.note = self.steps  # an attribute of a tensor
        return (self.linear(h) * self.scales[-1] + self.table["shift"]).sin(), None


@pytest.mark.parametrize("every", [1, 3, 100])
def test_a_step_sees_what_the_steps_before_have_changed(every):
    torch.manual_seed(0)
    plain, found = Changing(every), Changing(every)
    found.load_state_dict(plain.state_dict())

    h = torch.ones(3)
    for _ in range(10):
        h, _ = plain(h, None)
    h.sum().backward()
    loop(found, torch.ones(3), length=10, slots=2)[0].sum().backward()

    assert torch.equal(found.linear.weight.grad, plain.linear.weight.grad)
    assert (found.steps, found.scales, found.table) == (plain.steps, plain.scales, plain.table)


def test_a_step_after_a_list_has_become_short_sees_it_as_it_was():
    # Its step shared the snapshot of the steps before, for which the list was too long to be state.
    log = [0.5] * 2000

    def body(h, x):
        place = int(x)
        if place == 3:
            del log[3:]
        if place == 6:
            log[0] = 5.0
        return (h * (log[0] if place > 3 else 1.0)).sin(), None

    found = []
    for run in (lambda h, xs: [h := body(h, x)[0] for x in xs][-1], lambda h, xs: loop(body, h, xs, slots=2)[0]):
        log[:] = [0.5] * 2000
        h = torch.linspace(0.1, 1, 5).requires_grad_()
        run(h, torch.arange(10.0)).sum().backward()
        found.append(h.grad)

    assert torch.equal(*found)


@pytest.mark.parametrize(("changes", "worlds"), [(False, 2), (True, 10)])
def test_steps_share_a_snapshot_of_what_they_reach_while_it_stays(changes, worlds):
    linear, marks = nn.Linear(3, 3), []

    def body(h, _):
        if changes:
            marks.append(0)
        return linear(h).sin(), None

    before = {id(one) for one in gc.get_objects() if type(one) is Region}
    last, _ = loop(body, torch.ones(3), length=11, slots=2)
    regions = [one for one in gc.get_objects() if type(one) is Region and id(one) not in before]

    assert last.requires_grad
    assert len(regions) == 10  # the last step is a plain one
    # The first step searches, and the second compares.
    assert len({id(one.calls[0].world) for one in regions}) == worlds


def test_steps_that_may_write_past_versions_share_no_snapshot():
    # What stands for the bits of a tensor is taken before each step, and dropped when it has run.
    weight = nn.Parameter(torch.ones(3))

    def body(h, _):
        if h.sum() > 3:
            weight.data.mul_(1.5)
        return h * weight + 0.5, None

    last, _ = loop(body, torch.full((3,), 0.1, requires_grad=True), length=8, slots=2)

    with pytest.raises(MutationError, match="its forward wrote `weight` in place"):
        last.sum().backward()


@pytest.mark.usefixtures("no_collector")
def test_ten_thousand_steps_need_no_stack_and_leave_nothing():
    w = torch.full((3,), 0.9, requires_grad=True)
    last, _ = loop(lambda h, _: (wave(h, w), None), torch.ones(3), length=10_000, slots=200)
    last.sum().backward()
    dropped, _ = loop(lambda h, _: (wave(h, w), None), torch.ones(3), length=10_000, slots=3)
    del dropped
    left = [one for one in gc.get_objects() if type(one) is Region]
    found, w.grad = w.grad, None
    h = torch.ones(3)
    for _ in range(10_000):
        h = wave(h, w)
    h.sum().backward()

    assert torch.equal(found, w.grad)
    assert left == []
