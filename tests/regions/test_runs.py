"""Runs of calls as one region, and regions in regions, over a parent whose code stays as it is."""

import gc
import random
import warnings
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from logs import Count, Hidden
from probes.regions import CallDecision, RegionPlace, Scope, Settings, set_forward
from regions.comparing import equal, live_regions, result
from torchremat import CheckpointError, MutationError, OrderWarning, checkpoint, wrap


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.calls = Count()

    def forward(self, x, *others, scale=1.0, **more):
        self.calls.up()
        for other in (*others, *more.values()):
            x = x + other
        return F.dropout(self.norm(self.linear(x)).tanh(), 0.2).exp() * scale


class Quiet(Block):
    """No statistics: torch's own checkpoints update them twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)


class Net(nn.Module):
    """Blocks and a parent whose forward is given."""

    def __init__(self, forward, blocks=4, kind=Block):
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(blocks))
        self.run = forward

    def forward(self, x):
        return self.run(self.layers, x)


def loop(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def net(forward=loop, blocks=4, kind=Block):
    torch.manual_seed(0)
    return Net(forward, blocks, kind)


def planned(model, *spans, settings=None, counts=None):
    """Put runs on a model, each a (first, last) of its layers, outermost first; `counts` calls per layer."""
    places = [(first, last, RegionPlace(last - first + 1, f"{first}..{last}")) for first, last in spans]
    choices = {}
    for index in range(len(model.layers)):
        around = tuple(place for first, last, place in places if first <= index <= last)
        for number in range(counts or 1):
            choices[f"layers.{index}", number] = CallDecision(around if number == 0 else ())
    set_forward(model, "", None, Scope(choices, settings or Settings()))
    for index, layer in enumerate(model.layers):
        set_forward(layer, f"layers.{index}", None)
    return model


def calls(model):
    return [layer.calls.value for layer in model.layers]


def batch(rows=8):
    torch.manual_seed(7)
    return torch.randn(rows, 6)


def trains_as_plain(model, plain):
    x = batch()
    ours = result(lambda: model(x), [], [model])
    return equal(ours, result(lambda: plain(x), [], [plain]))


# --------------------------------------------------------------------------------------------------- linking


def glue_in_place(layers, x):
    x = layers[0](x)
    x.mul_(1.5)
    x = layers[1](x)
    x = layers[2](x) + 1
    return layers[3](x)


def glue(layers, x):
    x = layers[0](x) * 1.5
    x = layers[1](x).exp()
    return layers[3](layers[2](x) * 2 + x)


def shared_input(layers, x):
    h = layers[0](x)
    a = layers[1](h)
    b = layers[2](h, a, scale=0.5)
    return layers[3](b, h, other=a)


def keyword(layers, x):
    h = layers[0](x)
    return layers[3](layers[1](x, skip=h), skip=layers[2](h, more=x))


def in_another_order(layers, x):
    h = layers[2](x)
    h = layers[0](h)
    h = layers[3](h)
    return layers[1](h)


def some_missing(layers, x):
    return layers[2](layers[0](x))


def skip(layers, x):
    first = layers[0](x)
    return layers[3](layers[2](layers[1](first)) + first)


FORWARDS = [loop, glue, glue_in_place, shared_input, keyword, in_another_order, some_missing, skip]
TREES = [[(0, 3)], [(0, 1), (2, 3)], [(1, 2)], [(0, 3), (1, 2)], [(0, 3), (0, 2), (1, 2)], [(0, 0), (1, 3)]]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_gradients_are_those_of_the_plain_run(forward, tree):
    # Which calls can be linked, and in which order they come, decides what is kept; never what comes out.
    assert trains_as_plain(planned(net(forward), *tree), net(forward))


def test_a_run_keeps_only_what_it_cannot_link():
    kept = []

    def watched(layers, x):
        alive = []
        for number, layer in enumerate(layers):
            x = layer(x)
            alive.append(ref(x.untyped_storage()))
            if number == 1:
                x = x * 1.0
        x = x * 1.0
        kept.append([one() is not None for one in alive])
        return x

    model = planned(net(watched), (0, 3))
    y = model(batch())

    # 0, 2 and 3 are linked or read by nobody; 1 is read by glue that keeps nothing. What the glue made is held.
    assert kept == [[False, False, False, False]]
    y.sum().backward()


def test_recomputes_are_counted_exactly():
    def count(tree):
        model = planned(net(), *tree)
        model(batch()).sum().backward()
        return calls(model)

    assert count([(0, 3)]) == [2, 2, 2, 2]
    assert count([(0, 1), (2, 3)]) == [2, 2, 2, 2]
    # 3 is recomputed in the outer region alone. For 1 and 2 that recompute makes an inner region again: it runs them,
    # and what they save has to be recomputed once more.
    assert count([(0, 3), (1, 2)]) == [2, 3, 3, 2]
    # The outer region needs nothing after the input of a region that ends it.
    assert count([(0, 3), (2, 3)]) == [2, 2, 2, 2]
    assert count([(0, 3), (0, 2), (0, 1)]) == [4, 4, 3, 2]


def test_tuples_are_linked():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.calls = Count()

        def forward(self, pair):
            self.calls.up()
            a, b = pair["a"], pair["b"][0]
            return {"a": self.linear(b).exp(), "b": [a.sin()]}

    def forward(layers, x):
        pair = {"a": x, "b": [x]}
        for layer in layers:
            pair = layer(pair)
        return pair["a"] + pair["b"][0]

    model = planned(net(forward, kind=Pair), (0, 3), (1, 2))

    assert trains_as_plain(model, net(forward, kind=Pair))
    assert calls(model) == [2, 3, 3, 2]


def test_an_in_place_module_stays_attached_to_its_producer():
    class Activation(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = Count()
            self.linear = nn.Linear(1, 1)

        def forward(self, x):
            self.calls.up()
            return F.relu(x, inplace=True)

    def forward(layers, x):
        h = layers[0](x)
        h = activation(h)
        h = layers[1](h)
        return layers[2](activation2(h))

    activation, activation2 = Activation(), Activation()

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.calls = Count()

        def forward(self, x):
            self.calls.up()
            return self.linear(x) * 2

    plain = net(forward, 3, Conv)
    model = net(forward, 3, Conv)
    model.first, model.second = activation, activation2
    place = RegionPlace(5, "all")
    names = ["layers.0", "first", "layers.1", "second", "layers.2"]
    set_forward(model, "", None, Scope({(name, 0): CallDecision((place,)) for name in names}, Settings()))
    for name in names:
        set_forward(model.get_submodule(name), name, None)

    x = batch()
    ours = result(lambda: model(x), [], [model.layers])
    assert calls(model) == [2, 2, 2] and activation.calls.value == 2
    activation.__dict__.pop("forward")
    activation2.__dict__.pop("forward")
    assert equal(ours, result(lambda: plain(x), [], [plain.layers]))


def test_an_in_place_module_alone_is_an_error_that_says_so():
    def forward(layers, x):
        return layers[1](layers[0](x))

    class Relu(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return F.relu(x.mul_(2), inplace=True)

    model = net(forward, 2)
    model.layers[1] = Relu()
    planned(model, (1, 1))

    with pytest.raises(MutationError, match=r"region `1\.\.1`: its input args\[0\] was changed in place"):
        model(batch()).sum().backward()


# ------------------------------------------------------------------------------------------------ orders and counts


def test_calls_beyond_the_plan_are_recomputed_one_by_one():
    def forward(layers, x):
        return loop(layers, loop(layers, x))

    model = planned(net(forward), (0, 3))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trains_as_plain(model, net(forward))
    assert {warning.category for warning in caught} == {OrderWarning}
    assert "`layers.0` was called 2 times in one forward, more often than planned" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert calls(model) == [4] * 4


def test_calls_are_counted_anew_in_each_forward():
    model = planned(net(), (0, 3))

    for _ in range(3):
        model(batch()).sum().backward()
    assert calls(model) == [6] * 4


def test_a_module_may_be_called_often():
    def forward(layers, x):
        return loop(layers, loop(layers, x))

    assert trains_as_plain(planned(net(forward), (0, 3), (1, 2), counts=2), net(forward))


def test_two_forwards_before_one_backward():
    model, plain = planned(net(), (0, 3), (1, 2)), net()

    def twice(model):
        return model(batch()) + model(batch() * 2)

    ours = result(lambda: twice(model), [], [model])
    assert equal(ours, result(lambda: twice(plain), [], [plain]))


def test_random_trees_over_random_forwards():
    chance = random.Random(0)
    for _ in range(30):
        blocks = chance.randint(2, 6)
        order = [(chance.randrange(blocks), chance.random() < 0.3, chance.random() < 0.3) for _ in range(blocks)]
        seen = set()
        order = [one for one in order if one[0] not in seen and not seen.add(one[0])]

        def forward(layers, x, order=order):
            old = x
            for number, scaled, skipped in order:
                old, x = x, layers[number](x)
                if scaled:
                    x = x * 0.5
                if skipped:
                    x = x + old
            return x

        spans, inner = [], (0, blocks - 1)
        while chance.random() < 0.8:
            first = chance.randint(inner[0], inner[1])
            inner = (first, chance.randint(first, inner[1]))
            spans.append(inner)
        assert trains_as_plain(planned(net(forward, blocks), *spans), net(forward, blocks)), (order, spans)


def test_a_backward_in_the_middle_of_a_scope():
    # See Rule 3: the scope is open, and no business of the recompute.
    def forward(layers, x):
        h = layers[0](x)
        (grad,) = torch.autograd.grad(h.sum(), layers[0].linear.weight, retain_graph=True)
        return layers[3](layers[2](layers[1](h))) * grad.sum()

    model = planned(net(forward, kind=Quiet), (0, 3), (0, 2), (0, 1))

    assert trains_as_plain(model, net(forward, kind=Quiet))


# ---------------------------------------------------------------------------------------------------- errors


def test_a_call_that_saves_less_is_named_though_a_later_one_saves_more():
    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)
            self.hidden = Hidden(times=2)

        def forward(self, x):
            for _ in range(self.hidden["times"]):
                x = x.sin()
            return x

    model = planned(net(blocks=2, kind=Uneven), (0, 1))
    y = model(batch().requires_grad_()).sum()
    model.layers[0].hidden["times"], model.layers[1].hidden["times"] = 1, 3

    with pytest.raises(
        CheckpointError, match=r"region `0\.\.1`: .*\nNumber of .*forward: 2\nNumber of .*recomputation: 1"
    ):
        y.backward()


def test_an_error_in_the_middle_of_a_run_leaves_nothing_behind():
    class Fails(Block):
        fail = False

        def forward(self, x):
            if self.fail:
                raise KeyError("mine")
            return super().forward(x)

    gc.collect()
    before = len(live_regions())
    model = planned(net(kind=Fails), (0, 3), (1, 2))
    for number in range(4):
        model.layers[number].fail = True
        with pytest.raises(KeyError, match="mine"):
            model(batch())
        model.layers[number].fail = False
    gc.collect()
    assert len(live_regions()) == before

    model = planned(net(kind=Fails), (0, 3), (1, 2))
    assert trains_as_plain(model, net())


def test_a_forward_that_catches_the_error_of_a_call():
    def forward(layers, x):
        x = layers[0](x)
        try:
            x = layers[1](x)
        except KeyError:
            x = x * 2
        return layers[3](layers[2](x))

    class Fails(Block):
        def forward(self, x):
            if self is failing[0]:
                x.exp().sin()
                raise KeyError
            return super().forward(x)

    plain = net(forward, kind=Fails)
    failing = [plain.layers[1]]
    x = batch()
    expected = result(lambda: plain(x), [], [plain])
    model = planned(net(forward, kind=Fails), (0, 3), (1, 2))
    failing[0] = model.layers[1]

    assert equal(result(lambda: model(x), [], [model]), expected)


def test_no_region_outlives_a_planned_step():
    model = planned(net(), (0, 3), (1, 2))
    gc.collect()
    before = len(live_regions())
    gc.disable()
    try:
        for number in range(100):
            y = model(batch())
            if number % 2:
                y.sum().backward()
            del y
        assert len(live_regions()) == before
    finally:
        gc.enable()


# -------------------------------------------------------------------------------- checkpoints of the model's own


def ours(layers, x):
    x = layers[0](x)
    x = checkpoint(lambda x: layers[2](layers[1](x)) * 2, x)
    return layers[3](x)


def torchs(layers, x):
    x = layers[0](x)
    x = torch_checkpoint(lambda x: layers[2](layers[1](x)) * 2, x, use_reentrant=False)
    return layers[3](x)


def torchs_reentrant(layers, x):
    x = layers[0](x)
    x = torch_checkpoint(lambda x: layers[2](layers[1](x)) * 2, x, use_reentrant=True)
    return layers[3](x)


def ours_in_torchs(layers, x):
    x = layers[0](x)
    x = torch_checkpoint(lambda x: checkpoint(layers[2], layers[1](x)) * 2, x, use_reentrant=False)
    return layers[3](x)


def torchs_in_ours(layers, x):
    x = layers[0](x)
    x = checkpoint(lambda x: torch_checkpoint(layers[2], layers[1](x), use_reentrant=False) * 2, x)
    return layers[3](x)


def stateless(layers, x):
    return loop(layers, x)


@pytest.mark.parametrize(
    "forward", [ours, torchs, torchs_reentrant, ours_in_torchs, torchs_in_ours], ids=lambda forward: forward.__name__
)
@pytest.mark.parametrize("tree", TREES, ids=str)
def test_forward_and_recompute_make_the_same_choices(forward, tree):
    # A checkpoint that the model's own forward uses around planned calls is recomputed when their scope is long closed.
    assert trains_as_plain(planned(net(forward, kind=Quiet), *tree), net(stateless_of(forward), kind=Quiet))


def stateless_of(forward):
    """The same computation without any checkpoint."""

    def plain(layers, x):
        return layers[3](layers[2](layers[1](layers[0](x))) * 2)

    assert forward in (ours, torchs, torchs_reentrant, ours_in_torchs, torchs_in_ours)
    return plain


def test_a_checkpoint_around_the_whole_planned_model():
    x = batch().requires_grad_()
    plain = net(kind=Quiet)
    expected = result(lambda: plain(x), [x], [plain])
    for around in (checkpoint, lambda f, x: torch_checkpoint(f, x, use_reentrant=False)):
        model = planned(net(kind=Quiet), (0, 3), (1, 2))
        assert equal(result(lambda around=around, model=model: around(model, x), [x], [model]), expected)
        # The plan is in force inside: 1 and 2 once more than the others.
        assert calls(model)[1] > calls(model)[3]


def test_wrapped_modules_inside_planned_ones():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Quiet()
            self.calls = Count()

        def forward(self, x):
            self.calls.up()
            return self.inner(x).sin()

    model = planned(net(kind=Outer), (0, 3))
    wrap(model, "layers.*.inner")

    assert trains_as_plain(model, net(kind=Outer))


def test_scopes_inside_scopes():
    # A call that is split into its children has a scope of its own.
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Quiet(), Quiet()
            self.calls = Count()

        def forward(self, x):
            self.calls.up()
            return self.b(self.a(x)).sin()

    model = net(kind=Outer)
    inner = {}
    for index in range(4):
        place = RegionPlace(2, f"layers.{index}.a .. b")
        inner[index] = Scope(
            {(f"layers.{index}.a", 0): CallDecision((place,)), (f"layers.{index}.b", 0): CallDecision((place,))},
            Settings(),
        )
    whole = RegionPlace(2, "layers.2 .. 3")
    choices = {(f"layers.{index}", 0): CallDecision((whole,) if index > 1 else (), inner[index]) for index in range(4)}
    set_forward(model, "", None, Scope(choices, Settings()))
    for index in range(4):
        set_forward(model.layers[index], f"layers.{index}", None)
        for name in "ab":
            set_forward(getattr(model.layers[index], name), f"layers.{index}.{name}", None)

    assert trains_as_plain(model, net(kind=Outer))
    assert calls(model) == [1, 1, 2, 2]
    assert [layer.a.calls.value for layer in model.layers] == [2, 2, 3, 3]
