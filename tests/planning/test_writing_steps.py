"""Steps that change what they run on: every call of ours leaves all of it as it was, or was refused before it ran."""

from collections import UserDict, deque
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from logs import Log
from planning.optimizer_kinds import changes, insides
from torchremat import Adaptive, StepError, UnsupportedError, fit, frontier, measure, plan, saved, unwrap, verify
from torchremat.extend import only_watches
from turns import meetings

BATCH = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8)) for _ in range(3)))


def loss_of(model, batch=BATCH):
    return model(batch).square().mean()


CALLS = {
    "plan": lambda m, s: plan(m, s, budget="95%", cost="flops", operators=False),
    "fit": lambda m, s: fit(m, s, budget="95%", cost="flops", operators=False),
    "verify": verify,
    "frontier": lambda m, s: frontier(m, s, cost="flops", operators=False, points=3),
    "measure": lambda m, s: measure(m, s),
    "saved": lambda m, s: saved(m, s),
    "learn": lambda m, s: Adaptive(m, lambda m, _: s(m), budget="1GiB").learn(BATCH),
}
# What runs no backward is not refused for what happens in one.
FORWARDS = {"saved"}


class Taught(nn.Module):
    """A teacher that follows in the forward, a count in a plain tensor, and a queue in a list."""

    def __init__(self):
        super().__init__()
        self.net, self.teacher = net(), net().requires_grad_(False)
        self.count, self.queue = torch.zeros(1), [torch.zeros(4096, 8)]

    def forward(self, x):
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
        self.count += 1
        self.queue[0][int(self.count)] = x[0]
        return self.net(x) - self.teacher(x) + self.queue[0].sum()


class Followed(nn.Module):
    """A copy that follows by operators on lists of tensors; its norms have the values that they had, as they begin."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(net(), nn.LayerNorm(8))
        self.follower = deepcopy(self.net).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            slow, fast = list(self.follower.parameters()), list(self.net.parameters())
            torch._foreach_mul_(slow, 0.5)
            torch._foreach_add_(slow, fast, alpha=0.5)
        return self.net(x) - self.follower(2 * x)


class Constrained(nn.Module):
    """Weights that each forward puts into other memory."""

    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x):
        for one in self.net.parameters():
            one.data = one.data.clamp(-0.1, 0.1)
        return self.net(x)


class Clipped(nn.Module):
    """A batch that is scaled in place, through `.data`."""

    def __init__(self, own):
        super().__init__()
        self.net, self.own = net(), own

    def forward(self, x):
        (x.data if self.own else x).div_(2)
        return self.net(x)


def a_teacher():
    return Taught(), loss_of


# In a dispatch mode torch does not count the writes of such operators. A write that also left the values as they were
# was no write, the next run copied nothing, and the step was refused for a write that could not be undone.
def a_follower():
    return Followed(), loss_of


def constrained():
    return Constrained(), loss_of


def a_batch_in_place():
    batch = torch.randn(640, 8)
    return Clipped(own=False), lambda model: loss_of(model, batch)


def a_batch_through_data():
    batch = torch.randn(640, 8)
    return Clipped(own=True), lambda model: loss_of(model, batch)


def by_hand_after_a_gradient():
    model, momenta = net(), {}
    for one in model.parameters():
        momenta[one] = torch.zeros_like(one)

        def hook(leaf):
            momenta[leaf].mul_(0.9).add_(leaf.grad)
            leaf.data.add_(momenta[leaf], alpha=-0.1)
            leaf.grad = None

        one.register_post_accumulate_grad_hook(hook)
    model.momenta = momenta
    return model, loss_of


def by_hand_before_a_gradient():
    model = net()

    def hook(gradient):
        for one in model.parameters():
            if one.grad is not None:
                one.data.add_(one.grad + 1, alpha=-0.1)
        return gradient

    for one in model.parameters():
        one.register_hook(hook)
    return model, loss_of


def by_hand_at_a_node():
    model, model.nodes = net(), []
    for one in model.parameters():
        model.nodes.append(torch.autograd.graph.get_gradient_edge(one).node)

        def hook(*_, leaf=one):
            leaf.data.add_(leaf.grad, alpha=-0.1)

        model.nodes[-1].register_hook(hook)
    return model, loss_of


def frozen_and_thawed():
    model = net()
    model[0].requires_grad_(False)

    def step(model):
        model[0].requires_grad_(True)
        model[1].requires_grad_(False)
        loss = loss_of(model)
        model[2].requires_grad_(False)
        return loss

    return model, step


def hooked():
    def step(model):
        for one in model.parameters():
            one.register_hook(lambda gradient: gradient * 1)
        return loss_of(model)

    return net(), step


def a_popped_label():
    batch = {"x": BATCH, "labels": torch.randn(64, 8)}

    def step(model):
        labels = batch.pop("labels")
        return (model(batch["x"]) - labels).square().mean()

    model = net()
    model.batch = [batch]
    return model, step


def a_popped_label_of_a_class():
    batch = UserDict({"x": BATCH, "labels": torch.randn(64, 8)})
    model = net()
    model.batch = [batch]
    return model, lambda model: (model(batch["x"]) - batch.pop("labels")).square().mean()


def a_queue_of_an_object():
    source = SimpleNamespace(batches=deque([BATCH, BATCH * 2]))
    model = net()
    model.batches = (source,)
    return model, lambda model: loss_of(model, source.batches.popleft())


def a_list_taken_from():
    batches = [BATCH, BATCH * 2]
    model = net()
    model.batches = (batches,)
    return model, lambda model: loss_of(model, batches.pop())


STEPS = [
    a_teacher, a_follower, constrained, a_batch_in_place, a_batch_through_data, by_hand_after_a_gradient,
    by_hand_before_a_gradient, by_hand_at_a_node, frozen_and_thawed, hooked, a_popped_label,
    a_popped_label_of_a_class, a_list_taken_from, a_queue_of_an_object,
]  # fmt: skip


def state(model, step):
    parameters = [(one.grad, dict(one._backward_hooks or {}), one.data_ptr()) for one in model.parameters()]
    # A hook or the memory of a parameter is told by nothing that `insides` looks at.
    return insides(model, step), parameters


@pytest.mark.parametrize(("make", "call"), meetings(STEPS, CALLS, each=3))
def test_what_a_step_writes_is_put_back(make, call):
    model, step = make()
    before, parameters = state(model, step)

    CALLS[call](model, step)

    after, parameters_now = state(unwrap(model), step)
    assert changes(before, after) == []
    assert parameters_now == parameters


def hooks_that_step(model):
    optimizers = {one: torch.optim.AdamW([one]) for one in model.parameters()}

    def hook(leaf):
        optimizers[leaf].step()
        optimizers[leaf].zero_grad()

    for one in model.parameters():
        one.register_post_accumulate_grad_hook(hook)
    return optimizers, loss_of


def a_node_that_steps(model):
    # As torch.distributed.optim's `_apply_optimizer_in_backward` does it.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nodes = [torch.autograd.graph.get_gradient_edge(one).node for one in model.parameters()]
    for node in nodes:
        node.register_hook(lambda *_: optimizer.step())
    return (optimizer, nodes), loss_of


def a_module_hook_that_steps(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model[1].register_full_backward_hook(lambda *_: optimizer.step())
    return optimizer, loss_of


def a_step_that_steps(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model):
        optimizer.step()
        optimizer.zero_grad()
        return loss_of(model)

    return optimizer, step


BACKWARDS = [hooks_that_step, a_node_that_steps, a_module_hook_that_steps]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("trains", [*BACKWARDS, a_step_that_steps])
def test_a_step_that_trains_is_refused_before_anything_is_written(trains, call):
    # 24 of 24 parameters had moved, without a word.
    model = net()
    optimizer, step = trains(model)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    held = [step, optimizer]
    before, parameters = state(model, held)

    if call in FORWARDS and trains in BACKWARDS:
        CALLS[call](model, step)
    else:
        phase = "backward" if trains in BACKWARDS else "forward"
        with pytest.raises(UnsupportedError, match=rf"the step trains: \w+\.step\(\) runs within its {phase}"):
            CALLS[call](model, step)

    after, parameters_now = state(model, held)
    assert changes(before, after) == []
    assert parameters_now == parameters


def test_other_threads_may_train_other_models_meanwhile():
    from threading import Thread

    def train():
        other = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        before = other.weight.detach().clone()
        loss_of(other).backward()
        optimizer.step()
        moved.append(not torch.equal(before, other.weight))

    moved = Log()

    def step(model):
        thread = Thread(target=train)
        thread.start()
        thread.join()
        return loss_of(model)

    measure(net(), step)

    assert moved == [True] * 4


def test_what_nobody_could_copy_is_told_by_name():
    model = net()
    runs = Log()

    def step(model):
        runs.append(1)
        loss = loss_of(model)
        if len(runs) == 2:  # not in the run that is looked at
            with torch.no_grad():
                model[0][0].weight.add_(1)
        return loss

    with pytest.raises(StepError, match=r"has written in place to `0\.0\.weight`, which was not copied"):
        measure(model, step)


@pytest.mark.parametrize("call", sorted(CALLS.keys() - FORWARDS))
def test_an_iterator_that_ends_is_named(call):
    loader = iter([BATCH])

    with pytest.raises(StepError, match=r"ran once, and then took from an iterator that has ended \(`loader`\)"):
        CALLS[call](net(), lambda model: loss_of(model, next(loader)))


class Ahead:
    """Batches from a buffer of its own, each read one ahead of its turn."""

    def __init__(self):
        self.source = iter(range(100))
        self.following, self.buffer = next(self.source), torch.zeros_like(BATCH)

    def __next__(self):
        number, self.following = self.following, next(self.source)
        return number, self.buffer.copy_(BATCH)


@pytest.mark.parametrize("call", sorted(CALLS.keys() - FORWARDS))
def test_an_iterator_has_advanced_as_a_whole(call):
    batches, numbers = Ahead(), Log()

    def step(model):
        number, batch = next(batches)
        numbers.append(number)
        return loss_of(model, batch)

    CALLS[call](net(), step)

    assert next(batches)[0] == len(numbers)
    assert numbers == [*range(len(numbers))]


@pytest.mark.parametrize("call", sorted(CALLS.keys() - FORWARDS))
def test_what_is_used_up_out_of_reach_is_told(call):
    @only_watches
    class Places(deque):
        """No state of a step, as far as anyone can see."""

    places = Places(range(1))

    def step(model):
        return loss_of(model, BATCH + places.pop())

    with pytest.raises(StepError, match=r"ran once, and then raised IndexError: pop from an empty deque"):
        CALLS[call](net(), step)


@pytest.mark.parametrize("call", CALLS)
def test_a_key_that_was_never_there_is_the_users_own_error(call):
    with pytest.raises(KeyError, match="labels"):
        CALLS[call](net(), lambda model: loss_of(model, {}["labels"]))


def test_what_a_step_takes_numbers_from_is_given_back():
    places = deque(range(1))

    def step(model):
        return loss_of(model, BATCH + places.pop())

    measure(net(), step)

    assert [*places] == [0]


class Held:
    def __init__(self):
        self.batch, self.calls, self.seen = BATCH, 0, set()


STEPS = 0


def test_what_a_step_counts_and_collects_is_as_before():
    # A container that had only grown was left alone; of an object with a tensor, only the tensor was restored.
    held, losses, last = Held(), [torch.zeros(())], {}
    inside = dict(vars(held))

    def step(model):
        global STEPS
        STEPS += 1
        held.calls += 1
        held.seen.add(held.calls)
        held.batch, held.more = held.batch + 1, True
        losses.append(loss_of(model, held.batch))
        last["loss"] = losses[-1]
        return losses[-1]

    measure(net(), step)

    assert all(value is inside[name] for name, value in vars(held).items())
    assert not held.seen
    assert len(losses) == 1
    assert last == {}
    assert STEPS == 0


def test_in_place_of_a_loss_that_a_step_has_let_go_a_later_one_stays():
    # Its graph is freed as in the plain step, so nobody can give it back.
    model = net()
    last, losses = {"loss": loss_of(model)}, [loss_of(model)]

    def step(model):
        last["loss"] = losses[0] = loss_of(model)
        return last["loss"]

    measure(model, step)

    assert last["loss"].shape == losses[0].shape == ()
