"""What a tree needs, predicted and measured: bytes to the byte, flops exactly, and every run equal to the plain one."""

import math
import random

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

import models
import zoo
from planning.kinds import KINDS, block, inputs, square
from planning.steps import (
    Measured,
    blocks,
    differences,
    each,
    keep_all,
    mixtures,
    outcome,
    random_tree,
    recomputed_flops,
    text,
    under,
)
from planning.steps import profile as profile_of
from probes.planning import KeepNode, RegionNode, divisible, every_unit, flow_of, halves, mix, predict, profiling
from torchremat.errors import UnsupportedError


def off(model, step, profile, trees, expected, *, flops=True):
    """For each tree: measured over predicted bytes, and the flops; asserts that all else is equal."""
    result, own = {}, Measured(model, step)
    for tree in trees:
        predicted = predict(profile, tree)
        with under(model, profile, tree):
            measured = own.peak()
            found = outcome(model, step)
            counted = own.recomputed_flops() if flops else predicted.flops
        assert differences(found, expected) == [], text(tree)
        assert counted == predicted.flops, text(tree)
        result[text(tree)] = (measured, predicted.peak_bytes)
    return result


def trees_over(profile, seed, count):
    units, rng = profile.units, random.Random(seed)
    total = len(units.units)
    return [keep_all(total), each(total), *(random_tree(units, rng) for _ in range(count))]


# Attention without dropout is another kernel, and draws nothing.
MODELS = {
    "gpt": lambda: models.gpt_step(blocks=4, width=64, context=64, batch=2),
    "gpt dropout": lambda: models.gpt_step(blocks=4, width=64, context=64, batch=2, dropout=0.1),
    "unet": lambda: models.unet_step(batch=1, size=32),
    "resnet": lambda: models.resnet_step(batch=8, size=16, width=8),
    "vit": lambda: zoo.vit(blocks=2, width=64),
    "gpt2 with a cache": lambda: zoo.gpt2(blocks=2, width=64, use_cache=True),
    "llama dropout": lambda: zoo.llama(blocks=2, width=64, dropout=0.1),
    "t5 dropout": lambda: zoo.t5(blocks=2, width=64, dropout=0.1),
    "bert": lambda: zoo.bert(blocks=2, width=64),
    "gpt2 dropout": lambda: zoo.gpt2(blocks=2, width=64, use_cache=False, dropout=0.1),
}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_measured_to_the_byte(name):
    model, step = MODELS[name]()
    profile = blocks(model, step)
    plain = outcome(model, step)

    found = off(model, step, profile, trees_over(profile, 0, 2), plain)

    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == dict.fromkeys(found, 0)


def normed():
    """A block whose weights are attributes that a hook before its forward sets."""
    return nn.Sequential(spectral_norm(nn.Linear(64, 128)), nn.GELU(), spectral_norm(nn.Linear(128, 64)))


def test_weights_that_a_hook_sets_are_predicted():
    # A recompute sets them anew, and gives the forward's back when it has ended: these stay until the next forward.
    torch.manual_seed(0)
    model, x = nn.Sequential(*(normed() for _ in range(5))), inputs(64, 64)

    def step(model):
        return square(model(x))

    profile = blocks(model, step)
    found = off(model, step, profile, trees_over(profile, 0, 8), outcome(model, step))

    assert all(size.left for size in profile.sizes)
    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == dict.fromkeys(found, 0)


class EachTwice(nn.Module):
    """Calls each block twice: the second call finds the weights that a hook has set in the first."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(normed() for _ in range(3))

    def forward(self, x):
        for one in self.blocks:
            x = x + one(x)
            x = x + one(x)
        return x


def sets_weights():
    torch.manual_seed(0)
    model, x = EachTwice(), inputs()

    def step(model):
        return square(model(x))

    k = [*map(KeepNode, range(6))]
    inner = RegionNode((RegionNode((k[2], k[3])), RegionNode((k[4],)), k[5]))
    return model, step, [(RegionNode((k[0], k[1])), inner)]


class Computed(nn.Module):
    """Blocks that run with weights that the model computes."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(64, 64, bias=False)) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, x):
        x = x * self.scale
        for one in self.blocks:
            x = x + torch.func.functional_call(one, {"1.weight": one[1].weight * self.scale}, (x,))
        return x


def computes_weights():
    torch.manual_seed(0)
    model, x = Computed(), inputs(64, 64)

    def step(model):
        return square(model(x))

    k = [*map(KeepNode, range(4))]
    return model, step, [keep_all(4), (k[0], RegionNode((k[1], k[2], RegionNode((k[3],)))))]


@pytest.mark.parametrize("made", [sets_weights, computes_weights])
def test_weights_of_the_step_itself_are_held_by_regions_for_their_state(made):
    # They count where a region is whose calls see them, until it goes. They were taken to be there in any case until
    # the region of one unit goes: predictions were up to 10% too low where it is a larger one, and too high without.
    model, step, trees = made()

    profile = blocks(model, step)
    found = off(model, step, profile, trees, outcome(model, step))

    assert any(size.captured for size in profile.sizes)
    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == dict.fromkeys(found, 0)


class Rounded(nn.Module):
    """Computes with rounded weights, and hands gradients straight through: the graph of the rounding is dropped."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x):
        largest = self.weight.abs().max()
        rounded = (self.weight / largest * 127).round() / 127 * largest
        return torch.tanh(x @ (self.weight + (rounded - self.weight).detach()))


def test_what_is_saved_for_a_graph_that_is_dropped_is_not_counted():
    # Kept units were taken to hold what the rounding saves: predictions were up to 43% too high, and lower bounds too.
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Rounded() for _ in range(6))), inputs()

    def step(model):
        return square(model(x))

    profile = blocks(model, step)
    found = off(model, step, profile, trees_over(profile, 0, 6), outcome(model, step))
    plain, flat = found[text(keep_all(6))], found[text(each(6))]

    assert all(profile.units.dropped(unit) for unit in range(6))
    assert plain[0] == plain[1] and flat[0] == flat[1]
    # In a recompute of several units it goes at once, and in the forward with the variable that has its graph.
    assert [both for both in found.values() if not 0 <= both[1] - both[0] <= 3 * 64 * 64 * 4] == []
    flow = flow_of(profile, 2)
    made = {value for operator in flow.operators for value in operator.outputs}
    needed_bytes = sum(flow.values[value].size_bytes for value in made if flow.values[value].needed)
    assert needed_bytes == profile.sizes[2].inside_bytes == 64 * 64 * 4


class Leaves(nn.Module):
    """Leaves a tensor that autograd saves in it for the code behind it."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        self.left = self.wide(x).tanh()
        return self.narrow(self.left)


class TakesWhatIsLeft(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Leaves() for _ in range(3))

    def forward(self, x):
        for one in self.blocks:
            x = one(x)
            left = one.left.detach()
            one.left = None
            x = x + torch.cat([left * 2] * 8, 1).mean()  # the peak, while `left` is there
            del left
        return x


def test_what_code_behind_a_unit_takes_and_lets_go_counts_once():
    # It went before the next call, so it was taken to end with the unit, and counted twice where the unit is kept.
    torch.manual_seed(0)
    model, x = TakesWhatIsLeft(), inputs()

    def step(model):
        return square(model(x))

    profile = blocks(model, step)
    found = off(model, step, profile, trees_over(profile, 0, 3), outcome(model, step))

    assert [both for both in found.values() if both[0] != both[1]] == []


class Parts(nn.Module):
    """Two stacks of blocks, used as `use` says."""

    def __init__(self, use):
        super().__init__()
        self.first, self.second = (nn.Sequential(*(block() for _ in range(3))) for _ in range(2))
        self.use = use

    def forward(self, x):
        return self.use(self.first, self.second, x)


def drops_a_result(first, second, x):
    first(x)
    return second(x)


# How the parts are used, what the loss is, and how many bytes predictions may be too high: where the forward ends with
# the part that is lost, a variable that goes before the loss is computed counts beside what that makes.
LOSING = {
    "detached": (lambda first, second, x: second(first(x).detach()), square, 0),
    "detached and added": (lambda first, second, x: second(x + first(x).detach()), square, 0),
    "dropped": (drops_a_result, square, 0),
    "returned and not used": (
        lambda first, second, x: (second(x), first(x)),
        lambda both: square(both[0]),
        inputs().nbytes,
    ),
}


@pytest.mark.parametrize("name", LOSING)
def test_graphs_that_no_backward_comes_to_hold_until_they_go(name):
    # Regions in them were taken to hold nothing, and what is kept in them to be held for ever. A plan of the step of a
    # GAN's discriminator, which detaches what is generated, was 11% above its budget.
    use, loss, slack = LOSING[name]
    torch.manual_seed(0)
    model, x = Parts(use), inputs()

    def step(model):
        return loss(model(x))

    found = {}
    for number, profile in enumerate(mixtures(model, step, random.Random(0), 2)):
        trees = trees_over(profile, number, 4)
        for tree, both in off(model, step, profile, trees, outcome(model, step)).items():
            found[f"{number}: {tree}"] = both
        assert not all(size.has_backward for size in profile.sizes)

    assert {tree: both for tree, both in found.items() if not 0 <= both[1] - both[0] <= slack} == {}


MIXED = {
    "gpt": MODELS["gpt"],
    "gpt dropout": MODELS["gpt dropout"],
    "unet": MODELS["unet"],
    "resnet": MODELS["resnet"],
    "bert": MODELS["bert"],
    "t5 dropout": MODELS["t5 dropout"],
    # A variable that takes a module's result has its old value until then, which the region of another one holds:
    # `x = self.norm2(x + ...)`. It was counted for whole units that lie beside split ones.
    "encoder layers": KINDS["encoder layers"],
    "encoder and decoder": KINDS["encoder and decoder"],
}


@pytest.mark.parametrize("name", MIXED)
def test_units_split_and_whole_are_predicted_to_a_thousandth(name):
    model, step = MIXED[name]()
    plain = outcome(model, step)

    found = {}
    for number, profile in enumerate(mixtures(model, step, random.Random(1), 1)[1:]):
        for tree, both in off(model, step, profile, trees_over(profile, 0, 1)[2:], plain, flops=False).items():
            found[f"{number}: {tree}"] = both

    # A split unit's own code is seen in one step, whatever the mixture is; fit and verify measure the plan.
    assert {tree: both for tree, both in found.items() if abs(both[0] - both[1]) > 0.001 * both[1]} == {}


@pytest.mark.parametrize(
    ("name", "split"),
    # Its own code saves keys and values, which the next layer's arguments hold too; its result is a variable between.
    [("gpt2 with a cache", "transformer.h.0.attn"), ("unet", "middle.1"), ("unet", "up2.1")],
)
def test_one_split_unit_is_predicted_to_the_byte(name, split):
    model, step = MODELS[name]()
    pair = profile_of(model, step)
    calls = pair.blocks.units.trace.calls
    profile = mix(pair, frozenset(call for call in divisible(pair) if calls[call].name == split))

    found = off(model, step, profile, trees_over(profile, 0, 2), outcome(model, step))

    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == dict.fromkeys(found, 0)


class CalledTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = block()

    def forward(self, x):
        x = x + self.block(x)
        return x + self.block(x)


def test_of_two_calls_of_a_module_one_is_kept_and_the_other_split():
    # The split call was not counted, since nothing but the kept call needed a count: it was recomputed as a whole.
    torch.manual_seed(0)
    model, x = CalledTwice(), inputs()

    def step(model):
        return square(model(x))

    pair = profile_of(model, step)
    _, second = sorted(divisible(pair))
    profile = mix(pair, frozenset([second]))
    count = len(profile.units.units)
    tree = (KeepNode(0), *each(count)[1:])

    found = off(model, step, profile, [tree], outcome(model, step))

    assert profile.units.units[0].name == "block" and count > 2
    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == {text(tree): 0}


def kept_by_links():
    return [
        # A nested region that stops at once, at the input of one nested in it, has taken its own input nevertheless.
        ("attention", (KeepNode(0), RegionNode((KeepNode(1), RegionNode((RegionNode((KeepNode(2),)),)))))),
        (
            "encoder and decoder",
            (RegionNode((KeepNode(0), RegionNode((RegionNode((KeepNode(1),)),)))), KeepNode(2), KeepNode(3)),
        ),
        # The result of 16 is a link to 17, and its graph has the nested region's input as a leaf.
        ("encoder layers", nest(24, (13, 18), (16, 18))),
        # What 14 returns is no link: glue follows. Its graph goes, and with it the nested region with its states.
        ("encoder layers", nest(24, (10, 19), (12, 15))),
    ]


def nest(count, outer, inner):
    """All kept but a region of the units in the range `outer`, with one of those in `inner` inside."""
    parts = tuple(map(KeepNode, range(count)))
    inside = (*parts[outer[0] : inner[0]], RegionNode(parts[slice(*inner)]), *parts[inner[1] : outer[1]])
    return (*parts[: outer[0]], RegionNode(inside), *parts[outer[1] :])


@pytest.mark.parametrize(("name", "tree"), kept_by_links())
def test_what_a_nested_recompute_holds_is_predicted_to_the_byte(name, tree):
    model, step = KINDS[name]()
    pair = profile_of(model, step)
    profile = pair.blocks if name != "encoder layers" else mix(pair, divisible(pair))

    found = off(model, step, profile, [tree], outcome(model, step))

    assert {tree: measured - predicted for tree, (measured, predicted) in found.items()} == {text(tree): 0}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_model_is_predicted_and_exact(name):
    model, step = KINDS[name]()
    profile = blocks(model, step)
    plain = outcome(model, step)

    found = off(model, step, profile, trees_over(profile, 0, 3), plain, flops=False)

    # One boundary of these small models is 10% of the whole, and one that goes early is not always foreseen: only above
    # the prediction there is no room.
    assert {tree: both for tree, both in found.items() if not 0.9 * both[1] < both[0] < 1.001 * both[1]} == {}


def test_flops_of_nested_regions_are_counted_by_hand():
    model, step = KINDS["loop"]()
    profile = blocks(model, step)
    one = 2 * 256 * 64 * 64  # flops of one linear; a block has two, and its last save comes before the second

    def flops(*tree):
        return predict(profile, tree).flops // one

    k0, k1, k2, k3 = map(KeepNode, range(4))
    assert flops(k0, k1, k2, k3) == 0
    assert flops(RegionNode((k0,)), k1, k2, k3) == 1
    assert flops(RegionNode((k0, k1)), k2, k3) == 2 + 1
    assert flops(RegionNode((k0, k1, k2, k3))) == 6 + 1
    # The outer region runs 0 and 1 to get the input of the inner one, which then runs 2 and 3.
    assert flops(k0, RegionNode((k1, RegionNode((k2, k3))))) == 2 + 3
    assert flops(RegionNode((k0, RegionNode((k1, RegionNode((k2, RegionNode((k3,))))))))) == (2) + (2) + (2) + 1


def test_bytes_of_a_loop_are_counted_by_hand():
    model, step = KINDS["loop"]()
    profile = blocks(model, step)
    boundary = 65536

    plain = predict(profile, keep_all(4))
    every = predict(profile, each(4))

    # Kept by each block: its input, what the GELU and the second linear save; beside them the result, saved by `y ** 2`
    # and by nobody else, and the loss. The first block's input is the step's own.
    assert plain.kept_bytes == 4 * 2 * boundary + 3 * boundary + boundary + 4
    assert every.kept_bytes == 3 * boundary + boundary + 4
    assert plain.calls == 0
    assert every.calls == 4


def test_the_peak_names_the_module():
    model, step = KINDS["loop"]()
    profile = blocks(model, step)
    deep = RegionNode((KeepNode(0), KeepNode(1), KeepNode(2), KeepNode(3)))

    assert predict(profile, keep_all(4)).where == "loss, between forward and backward"
    assert predict(profile, (deep,)).where == "backward of layers.3"


def test_an_outer_region_stops_at_the_input_of_its_last_inner_one():
    model, step = KINDS["loop"]()
    profile = blocks(model, step)
    tree = (RegionNode((RegionNode((KeepNode(0),)), RegionNode((KeepNode(1),)))), KeepNode(2), KeepNode(3))

    with under(model, profile, tree):
        flops = recomputed_flops(model, step)

    # Both linears of block 0, then the first linear of block 1 and of block 0.
    assert flops == predict(profile, tree).flops == (2 + 1 + 1) * 2 * 256 * 64 * 64


def test_autocast_to_bfloat16_is_predicted_to_the_byte():
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(4)))
    x = inputs(1024, 64)

    def step(m):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return square(m(x).float())

    profile = blocks(model, step)
    plain = outcome(model, step)

    found = off(model, step, profile, trees_over(profile, 0, 2), plain)

    assert {tree: both for tree, both in found.items() if abs(both[0] - both[1]) > 0.01 * both[1]} == {}


def test_user_checkpoints_inside_are_refused():
    torch.manual_seed(0)
    model, step = zoo.gpt2(blocks=2, width=64, use_cache=False)
    model.activation_checkpointing_enable({"use_reentrant": False})

    with pytest.raises(UnsupportedError, match="gradient_checkpointing_disable"):
        blocks(model, step)


def test_random_trees_differ_and_nest():
    model, step = KINDS["sequential"]()
    profile = blocks(model, step)
    rng = random.Random(0)

    found = {text(random_tree(profile.units, rng)) for _ in range(20)}

    assert len(found) > 15
    assert any("((" in tree or "(0 (" in tree for tree in found)


IN_PIECES = ["loop", "tied", "encoder and decoder", "transformer", "siamese"]


def watched_trees(monkeypatch, failing=0):
    """The trees that steps are watched under from now on, of which the first ones fail for want of memory."""
    trees, watch = [], profiling.watch

    def noted(model, subject, units, tree, machine, **options):
        trees.append(tree)
        if len(trees) <= failing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return watch(model, subject, units, tree, machine, **options)

    monkeypatch.setattr(profiling, "watch", noted)
    return trees


@pytest.mark.parametrize("name", IN_PIECES)
def test_a_step_that_is_watched_in_pieces_tells_the_same(name, monkeypatch):
    model, step = KINDS[name]()
    whole = profile_of(model, step).blocks
    monkeypatch.setattr(profiling._Profiling, "fits", lambda *_: False)
    trees = watched_trees(monkeypatch)

    pair = profile_of(model, step)

    assert trees == [every_unit(whole.units, max(2, math.isqrt(len(whole.units.units))))]
    assert any(isinstance(inner, RegionNode) for node in trees[0] for inner in node.children)
    assert pair.leaves is None
    assert pair.blocks.sizes == whole.sizes
    assert pair.blocks.order == whole.order
    for tree in trees_over(whole, 0, 3):
        assert predict(pair.blocks, tree).peak_bytes == predict(whole, tree).peak_bytes, text(tree)


@pytest.mark.parametrize("name", IN_PIECES)
def test_a_step_that_is_watched_in_halves_tells_the_same(name, monkeypatch):
    model, step = KINDS[name]()
    pair = profile_of(model, step)
    finest = pair.leaves or pair.blocks
    trees = watched_trees(monkeypatch, failing=3)  # also where recomputes are compared, which is tried first

    found = profile_of(model, step)

    assert len(trees) == 4
    assert trees[3] == halves(finest.units)
    assert found.leaves is None
    assert found.blocks.units.units == finest.units.units
    assert found.blocks.order == finest.order
    for tree in trees_over(finest, 0, 3):
        assert predict(found.blocks, tree).peak_bytes == predict(finest, tree).peak_bytes, text(tree)


class Cache:
    def __init__(self):
        self.keys = []


class Caches(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.rest = nn.Linear(64, 64), block()

    def forward(self, x, cache):
        cache.keys.append(self.key(x))
        return x + self.rest(cache.keys[-1] * 2)  # autograd saves no key


class ReturnsCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Caches() for _ in range(4))

    def forward(self, x):
        cache = Cache()
        for layer in self.layers:
            x = layer(x, cache)
        return {"loss": square(x), "cache": cache, "hidden": x * 2}


def test_what_a_step_returns_beside_its_loss_is_gone_before_backward():
    # Models of transformers return their cache. All of it seemed to be held by the caller until the end of the step, so
    # that plans which kept something left as much of the budget unused: the keys and values of all layers.
    torch.manual_seed(0)
    model = ReturnsCache()

    def step(model):
        return model(inputs())

    profile = blocks(model, step)
    found = off(model, step, profile, trees_over(profile, 0, 6), outcome(model, step))

    assert {tree: measured - predicted for tree, (measured, predicted) in found.items() if measured != predicted} == {}
