"""A recompute in parts: which saves each recompute fills, what it runs for them, and what else stays as it was.

The steps save nine tensors, the letters are logged where each step begins:

    a    0, 1: the factors of a product    2: the input of a sine
    b    3: the result of an exponential   4: the mask of a dropout
    c    5, 6: the factors of a product    7: the result of a tanh
    d    8: the result of a sigmoid
"""

import gc
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchremat
from logs import Log
from probes.memory import record_allocations
from probes.regions import Observer, Region, Settings
from torchremat import CheckpointError, MutationError, Session, session
from torchremat.extend import only_watches


class Steps(nn.Module):
    """Steps of which each logs its letter."""

    def __init__(self, width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, width))
        self.log = Log()

    def forward(self, x):
        self.log.append("a")
        x = (x * self.weight).sin()
        self.log.append("b")
        x = F.dropout(x.exp(), 0.3)
        self.log.append("c")
        x = (x * self.weight).tanh()
        self.log.append("d")
        return x.sigmoid()

    @property
    def ran(self):
        """What has run since it was asked for last."""
        found = "".join(self.log)
        self.log.clear()
        return found


def in_parts(module, cuts, x, **settings):
    """Call a module as a region with cuts."""
    return Region(Settings(cuts=cuts, **settings)).call(module, (x,), {}, [module])


def gradients(call, module, *, backwards=1):
    """Gradients of an input and of the parameters after some backwards through one graph."""
    module.zero_grad()
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    loss = call(x).square().sum()
    for left in reversed(range(backwards)):
        loss.backward(retain_graph=left > 0)
    return [x.grad, *(parameter.grad for parameter in module.parameters()), torch.get_rng_state()]


class Filled(Observer):
    """Notes which waiting slots each recompute fills."""

    def __init__(self):
        self.found = []

    def recomputing(self, region):
        self.found.append([])

    def recomputed(self, region):
        self.found[-1] = [index for index, slot in enumerate(region.slots) if slot() and slot().task is not None]


EXPECTED = {
    (): ("abcd", [[0, 1, 2, 3, 4, 5, 6, 7, 8]]),
    (4,): ("abcdab", [[4, 5, 6, 7, 8], [0, 1, 2, 3]]),
    (4, 7): ("abcdabcab", [[7, 8], [4, 5, 6], [0, 1, 2, 3]]),
    (3,): ("abcda", [[3, 4, 5, 6, 7, 8], [0, 1, 2]]),
}


@pytest.mark.parametrize(("cuts", "expected"), EXPECTED.items())
def test_each_recompute_fills_its_part_and_ends_with_it(cuts, expected):
    module = Steps()
    plain = gradients(module, module)
    filled = Filled()
    assert module.ran == "abcd"

    found = gradients(partial(in_parts, module, cuts, observer=filled), module)

    assert all(map(torch.equal, found, plain))
    assert (module.ran[4:], filled.found) == expected


@pytest.mark.parametrize("check", ["metadata", "values", "none"])
@pytest.mark.parametrize("cuts", [(4,), (2, 4, 6), (1, 2, 3, 4, 5, 6, 7)])
def test_each_backward_through_a_retained_graph_has_its_parts(cuts, check):
    module = Steps()
    plain = gradients(module, module, backwards=3)
    _ = gradients(partial(in_parts, module, cuts), module), module.ran
    once = gradients(partial(in_parts, module, cuts), module) and module.ran[4:]

    found = gradients(partial(in_parts, module, cuts, check=check), module, backwards=3)

    assert all(map(torch.equal, found, plain))
    assert module.ran == "abcd" + 3 * once


def test_inside_another_region_the_inputs_stay_until_the_last_part():
    outer, inner = Steps(), Steps()
    both = nn.ModuleList([outer, inner])

    def around(x):
        return in_parts(inner, (4,), outer(x))

    plain = gradients(lambda x: inner(outer(x)), both)
    _ = outer.ran, inner.ran

    found = gradients(lambda x: Region(Settings()).call(around, (x,), {}, [around]), both)

    assert all(map(torch.equal, found, plain))
    # The outer one runs once more: up to the input of the inner one, which both parts of that have.
    assert (outer.ran, inner.ran) == ("abcdabcd", "abcdabcdab")


def test_a_region_in_parts_may_be_anywhere_in_nested_ones():
    first, second, third = modules = nn.ModuleList([Steps(), Steps(), Steps()])
    plain = gradients(lambda x: third(second(first(x))), modules)
    _ = [one.ran for one in modules]

    def within(x):
        return in_parts(third, (4, 7), in_parts(second, (4,), x))

    def around(x):
        return Region(Settings()).call(within, (in_parts(first, (4,), x),), {}, [within])

    found = gradients(lambda x: Region(Settings()).call(around, (x,), {}, [around]), modules)

    assert all(map(torch.equal, found, plain))
    # `around`, `within`, then the parts of each; `third` is not run for itself by the regions around it.
    assert [one.ran for one in modules] == ["abcdabcdabcdab", "abcdabcdabcdab", "abcdabcdabcab"]


def test_a_part_is_in_memory_when_it_is_asked_for_and_no_longer():
    x = torch.linspace(-1, 1, 1024, requires_grad=True, device="cpu")

    def chain(t):
        for _ in range(8):
            t = t.tanh()
        return t

    def peak(cuts):
        output = Region(Settings(cuts=cuts)).call(chain, (x,), {}, [chain])
        gradient = torch.ones_like(output)
        with record_allocations(torch.device("cpu")) as recorder:
            torch.autograd.grad(output, x, gradient)
        return recorder.trace.peak_bytes // x.nbytes

    # All eight saves and a gradient. In two parts: four, the gradient that has come to the cut, and the tanh that the
    # second recompute has run on. In four: two saves, likewise.
    assert [peak(cuts) for cuts in ((), (4,), (2, 4, 6))] == [9, 6, 4]


def test_gradients_of_gradients():
    module = Steps()

    def second(call):
        torch.manual_seed(0)
        x = torch.linspace(-1, 1, 4, requires_grad=True)
        (first,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [x, module.weight])

    assert all(map(torch.equal, second(partial(in_parts, module, (2, 4, 6))), second(module)))


def test_an_earlier_save_that_is_asked_for_first_brings_all_later_ones():
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    ran = Log()

    def function(t):
        ran.append("f")
        return t.exp(), t.sin()

    one, other = Region(Settings(cuts=(1,))).call(function, (x,), {}, [function])
    (early,) = torch.autograd.grad(one.sum(), x, retain_graph=True)
    assert len(ran) == 2
    late = torch.autograd.grad(other.sum(), x)

    assert torch.equal(early, x.detach().exp())
    assert torch.equal(late[0], x.detach().cos())


@pytest.mark.parametrize(
    ("passes", "backwards", "ran"),
    [(None, 1, "abcdab"), (None, 2, "abcd"), (1, 1, "abcdab"), (2, 2, "abcd")],
)
def test_a_session_recomputes_all_parts_at_once_where_they_would_stay(passes, backwards, ran):
    module = Steps()
    plain = gradients(module, module, backwards=backwards)
    _ = module.ran
    torch.manual_seed(1)
    module.zero_grad()
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    with session(passes):
        region = Region(Settings(cuts=(4,)))
        loss = region.call(module, (x,), {}, [module]).square().sum()
        for left in reversed(range(backwards)):
            loss.backward(retain_graph=left > 0)

    assert module.ran == "abcd" + ran
    assert all(map(torch.equal, [x.grad, module.weight.grad], plain))
    assert region.owners == {}


def test_a_session_has_a_part_in_memory_at_a_time_unless_it_retains_the_graph():
    x = torch.linspace(-1, 1, 1024, requires_grad=True, device="cpu")

    def chain(t):
        for _ in range(8):
            t = t.tanh()
        return t

    def peak(passes, *, retains):
        with session(passes):
            output = Region(Settings(cuts=(4,))).call(chain, (x,), {}, [chain])
            gradient = torch.ones_like(output)
            with record_allocations(torch.device("cpu")) as recorder:
                torch.autograd.grad(output, x, gradient, retain_graph=retains)
        return recorder.trace.peak_bytes // x.nbytes

    assert [peak(None, retains=True), peak(None, retains=False), peak(1, retains=True)] == [10, 6, 6]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_a_session_recomputes_ahead_is_whole(ahead):
    modules = nn.ModuleList([Steps(), Steps()])
    plain = gradients(lambda x: modules[1](modules[0](x)), modules)
    _ = [one.ran for one in modules]
    torch.manual_seed(1)
    modules.zero_grad()
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    with session(1) as own:
        loss = in_parts(modules[1], (4,), in_parts(modules[0], (4,), x)).square().sum()
        assert own.recompute(ahead) == ahead
        loss.backward()

    found = [x.grad, *(one.weight.grad for one in modules)]
    assert all(map(torch.equal, found, plain))
    assert [one.ran for one in modules] == ["abcd" + ("abcd" if ahead > place else "abcdab") for place in (1, 0)]


class Told:
    """Notes which recomputes are of whole regions."""

    def __init__(self):
        self.whole = []

    def recomputing(self, number):
        pass

    def recomputed(self, number, region, *, is_whole):
        self.whole.append(is_whole)

    def dropped_too_early(self):
        pass


@pytest.mark.parametrize(("cuts", "ahead", "whole"), [((), 0, [True]), ((4, 7), 0, [False] * 3), ((4, 7), 1, [True])])
def test_a_session_tells_whether_a_recompute_was_of_the_whole_region(cuts, ahead, whole):
    module, told = Steps(), Told()
    own = Session(watch=told)
    with own.active():
        loss = in_parts(module, cuts, torch.linspace(-1, 1, 4, requires_grad=True)).sum()
        own.recompute(ahead)
        loss.backward()
    own.close()

    assert told.whole == whole


def test_what_fails_in_a_later_part_leaves_nothing_behind():
    class Failing(Steps):
        fails = False

        def forward(self, x):
            if len(self.log) >= 8:  # the forward and the first part
                raise ValueError("not again")
            return super().forward(x)

    module = Failing()
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    region = Region(Settings(cuts=(4,)))
    loss = region.call(module, (x,), {}, [module]).sum()

    with pytest.raises(ValueError, match="not again"):
        loss.backward()

    assert region.owners == {}
    assert all(slot() is None or slot().task is None for slot in region.slots)
    dead = ref(region)
    del region, loss
    gc.collect()
    assert dead() is None


def test_a_weight_that_is_written_between_two_parts_is_an_error():
    module = Steps()
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.clone()

        @staticmethod
        def backward(ctx, grad):
            with torch.no_grad():
                module.weight.add_(1)
            return grad

    def function(t):
        return Writes.apply((t * module.weight).sin()).exp()

    loss = Region(Settings(cuts=(3,))).call(function, (x,), {}, [function]).sum()

    with pytest.raises(MutationError, match="weight"):
        loss.backward()


def test_a_recompute_that_differs_in_a_later_part_says_so():
    class Growing(Steps):
        def forward(self, t):
            self.log.append("a")
            return (t.sin() if len(self.log) < 3 else t.double().sin().float()).exp().exp()

    module = Growing()
    x = torch.linspace(-1, 1, 4, requires_grad=True)

    with pytest.raises(CheckpointError, match="float64"):
        in_parts(module, (2,), x).sum().backward()


def test_it_agrees_with_what_a_policy_holds():
    module = Steps()
    plain = gradients(module, module)
    _ = module.ran
    policy = torchremat.policies.save_operators("aten.exp.default")

    found = gradients(partial(in_parts, module, (4,), policy=policy), module)

    assert all(map(torch.equal, found, plain))
    # The result of the exponential is there, so the second part ends before it.
    assert module.ran == "abcdabcda"


class Norms(nn.Module):
    """Has what a recompute restores, buffers, draws and casts under autocast, and a backward of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(4)])
        self.log = Log()

    def forward(self, x):
        self.log.append("a")
        x = self.norms[0](self.first(x)).tanh()
        slope = torch.autograd.grad(x.sum(), x, create_graph=True)[0]
        self.log.append("b")
        return self.norms[1](self.second(F.dropout(x * slope, 0.3))).sigmoid()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("cuts", [(5,), (2, 5, 8), tuple(range(1, 12))], ids=["one", "three", "all"])
def test_each_part_has_the_world_of_the_forward(cuts, autocast):
    module = Norms()
    twin, x = deepcopy(module), torch.linspace(-1, 1, 32).view(8, 4)

    def trained(call, module):
        torch.manual_seed(1)
        found = []
        for left in (1, 0, 1, 0):
            if left:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = call(x.requires_grad_()).square().sum()
            loss.backward(retain_graph=bool(left))
            found += [parameter.grad.clone() for parameter in module.parameters()]
            found += [x.grad.clone(), torch.get_rng_state(), *(buffer.clone() for buffer in module.buffers())]
        x.grad = None
        return found

    plain = trained(twin, twin)
    found = trained(partial(in_parts, module, cuts), module)

    assert all(map(torch.equal, found, plain))
    assert module.log.count("a") > 2 + 4  # two forwards, and more than one recompute in each of four backwards


def test_leaves_in_turn_and_threads_at_once_have_their_own_parts():
    module = Steps()
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    leaves = [x, module.weight]

    def graph(call):
        torch.manual_seed(1)
        return call(x).sum()

    loss = graph(module)
    plain = [torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in leaves]
    _ = module.ran
    region = Region(Settings(cuts=(2, 4, 7)))
    loss = graph(lambda x: region.call(module, (x,), {}, [module]))

    def gradient(leaf):
        return torch.autograd.grad(loss, leaf, retain_graph=True)[0]

    in_turn = [gradient(leaf) for leaf in leaves]
    once = module.ran[4:]
    with ThreadPoolExecutor(4) as threads:
        at_once = list(threads.map(gradient, leaves * 8))

    assert all(map(torch.equal, in_turn, plain))
    assert all(map(torch.equal, at_once, plain * 8))
    assert once == 2 * "abcdabcaba"
    assert len(module.ran) == 8 * len(once)
    assert region.owners == {}


@only_watches
class Trap(Log):
    """A log that raises once, at the entry of a number."""

    at = 0

    def append(self, entry):
        super().append(entry)
        if len(self) == self.at:
            raise ValueError("not now")


@pytest.mark.parametrize("at", range(5, 14))
def test_a_backward_after_one_that_failed_anywhere_is_exact(at):
    module = Steps()
    plain = gradients(module, module)
    module.log = Trap()
    module.zero_grad()
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 4, requires_grad=True)
    loss = in_parts(module, (4, 7), x).square().sum()
    module.log.at = at

    with pytest.raises(ValueError, match="not now"):
        loss.backward(retain_graph=True)
    module.zero_grad()
    x.grad = None
    loss.backward()

    assert all(map(torch.equal, [x.grad, module.weight.grad], plain))
    assert module.ran[at:] == "abcdabcab"
