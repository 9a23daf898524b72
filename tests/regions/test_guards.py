"""Objects among the arguments: the recompute sees what they held, and leaves them as they were."""

import copy
import random
from abc import ABCMeta
from array import array
from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from logs import Log
from regions.comparing import leaf, live_regions
from torchremat import MutationError, UnsupportedError, checkpoint, checkpointed, wrap
from torchremat.state import world
from torchremat.state.reach import tensors_inside


class Cache:
    """What every model library has in one form or another."""

    def __init__(self):
        self.layers = []
        self.names = {"count": 0}
        self.last = None

    def update(self, x):
        self.layers.append(x)
        self.names["count"] += 1
        self.last = x
        return torch.stack(self.layers).sum(0)


class Slotted:
    __slots__ = ("count", "items")

    def __init__(self):
        self.items = []

    def update(self, x):
        self.items = [*self.items, x]
        self.count = len(self.items)
        return torch.stack(self.items).sum(0)


class Items(list):
    def append(self, item):
        super().append(item)

    def update(self, x):
        self.append(x)
        return torch.stack([*self]).sum(0)


class Named(OrderedDict):
    def update_with(self, x):
        self[len(self)] = x
        self.move_to_end(0, last=False)
        return torch.stack(list(self.values())).sum(0)


@dataclass
class Held:
    cache: object

    def update(self, x):
        return self.cache.update(x)


class Ring:
    def __init__(self):
        self.ring = deque(maxlen=2)
        self.seen = set()
        self.bytes = bytearray()

    def update(self, x):
        self.ring.append(x)
        self.seen.add(len(self.seen))
        self.bytes.append(len(self.bytes))
        return torch.stack(list(self.ring)).sum(0) * len(self.seen) * len(self.bytes)


KINDS = {
    "attributes": Cache,
    "slots": Slotted,
    "list": Items,
    "dataclass": lambda: Held(Cache()),
    "deque, set, bytes": Ring,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_cache_that_grows(make):
    def run(call):
        x = torch.arange(3.0, requires_grad=True)
        cache = make()
        h = x
        for _ in range(3):
            h = call(lambda h, cache: cache.update(h.sin()).exp(), h, cache=cache)
        h.sum().backward()
        return x.grad, cache

    (ours, cache), (plain, _) = run(checkpoint), run(lambda f, *args, **kwargs: f(*args, **kwargs))

    assert torch.equal(ours, plain)
    grown = {
        Cache: lambda: (len(cache.layers), cache.names["count"], cache.last is cache.layers[-1]),
        Slotted: lambda: (len(cache.items), cache.count, True),
        Items: lambda: (len(cache), 3, True),
        Held: lambda: (len(cache.cache.layers), cache.cache.names["count"], True),
        Ring: lambda: (len(cache.seen), len(cache.bytes), len(cache.ring) == 2),
    }[type(cache)]()
    assert grown == (3, 3, True)


def test_an_ordered_dict_keeps_its_order():
    x = leaf(3)
    cache = Named()
    cache.update_with(x.detach())
    y = checkpoint(lambda x, cache: cache.update_with(x.sin()).exp(), x, cache)
    y.sum().backward()

    assert list(cache) == [0, 1] and len(list(reversed(cache))) == 2


def test_a_list_and_a_dict_as_arguments():
    x = leaf(3)

    def body(items, names):
        items.append(items[0].sin())
        names["b"] = names["a"].exp()
        return items[1] * names["b"]

    def run(call):
        items, names = [x * 2], {"a": x * 3}
        y = call(body, items, names)
        assert len(items) == len(names) == 2
        y.sum().backward()
        assert len(items) == len(names) == 2
        return x.grad

    ours = run(checkpoint)
    x.grad = None

    assert torch.equal(ours, run(lambda f, *args: f(*args)))


def adds_in_place(x, cache):
    cache.layers[0].add_(x.detach())
    return (x * cache.layers[0].clone()).exp()


def test_a_small_cache_that_is_written_in_place():
    def run(call):
        cache, x = Cache(), torch.arange(3.0, requires_grad=True)
        cache.layers.append(torch.zeros(3))
        first, second = (call(adds_in_place, x, cache).sum() for _ in range(2))
        (first + second).backward()
        return x.grad, cache.layers[0]

    assert all(map(torch.equal, run(checkpoint), run(lambda f, *args: f(*args))))


def test_a_large_cache_that_is_written_in_place_is_an_error_that_names_it():
    cache = Cache()
    cache.layers.append(torch.zeros(100_000))

    y = checkpoint(adds_in_place, leaf(100_000), cache).sum()

    with pytest.raises(MutationError, match=r"its forward wrote `args\[1\]\.layers\[0\]` in place"):
        y.backward()


def test_a_tensor_in_an_object_that_is_written_after_the_forward():
    cache = Cache()
    cache.last = torch.ones(3)
    y = checkpoint(lambda x, cache: (x * cache.last).exp(), leaf(3), cache).sum()
    cache.last.add_(1)

    with pytest.raises(MutationError, match=r"its tensor `args\[1\]\.last` was changed in place between"):
        y.backward()


def test_too_many_objects_are_an_error(monkeypatch):
    monkeypatch.setattr(world, "_MOST_ITEMS", 10)
    cache = Cache()
    cache.layers = [Slotted() for _ in range(20)]

    with pytest.raises(UnsupportedError, match="more than 10 objects are reachable from a region's arguments"):
        checkpoint(lambda x, cache: x.exp(), leaf(3), cache)


def test_tensors_inside_are_found():
    cache, tensors = Cache(), [torch.ones(1) for _ in range(4)]
    cache.layers = [tensors[0], {"k": (tensors[1],)}]
    cache.itself = cache
    slotted = Slotted()
    slotted.items = [tensors[2]]
    cache.last = slotted
    cache.names["t"] = tensors[3]

    assert {id(tensor) for tensor in tensors_inside([cache])} == set(map(id, tensors))


# ----------------------------------------------------------------------------------------------- objects that are named


class Static:
    """A cache of one tensor per layer that is written in place."""

    def __init__(self, layers=1, *, views=False):
        flat = torch.zeros(layers, 4, 3)
        self.keys = [flat[i] if views else flat[i].clone() for i in range(layers)]

    def update(self, layer, position, x):
        self.keys[layer][position] = x
        return self.keys[layer]


def guarded(*guard):
    return lambda function, *args: checkpointed(function, guard=list(guard))(*args)


def plainly(function, *args):
    return function(*args)


@pytest.mark.parametrize("grads", [False, True], ids=["detached", "part of the graph"])
@pytest.mark.parametrize("views", [False, True], ids=["tensors", "views of one"])
@pytest.mark.parametrize("is_argument", [False, True], ids=["hidden", "argument"])
def test_a_static_cache(grads, views, is_argument):
    def run(call_with):
        x = torch.arange(3.0, requires_grad=True)
        cache = Static(2, views=views)
        seen = Log()

        def body(h, layer, position, cache=None):
            seen.append(1)
            mine = hidden[0] if cache is None else cache
            written = mine.update(layer, position, h.sin() if grads else h.detach().sin())
            return (written.clone().sum(0) * h.exp()).sin()

        hidden = [cache]
        call, h = call_with(cache), x
        for position in range(3):
            for layer in range(2):
                h = call(body, h, layer, position, *([cache] if is_argument else []))
        h.sum().backward()
        return x.grad, [key.detach().clone() for key in cache.keys], len(seen)

    ours, cache, calls = run(guarded)
    plain, expected, _ = run(lambda _: plainly)

    assert torch.equal(ours, plain)
    assert all(map(torch.equal, cache, expected))
    assert calls == 12


def test_only_what_is_written_in_a_named_object_is_kept():
    cache = Static()
    cache.large = torch.zeros(1 << 16)
    x = leaf(3)

    y = checkpointed(lambda x: (cache.update(0, 0, x.detach()).clone() * x.exp()).sin(), guard=[cache])(x)
    (region,) = [one for one in live_regions() if one.settings.guard == (cache,)]
    backups = region.calls[0].world.backups

    assert [one.before.nbytes for one in backups.written.values()] == [4 * 4 * 3]
    assert not backups._all and not backups._left
    del y


def test_a_named_tensor_that_somebody_else_writes_is_an_error_if_it_is_used():
    cache = Static(2)

    def body(x, layer):
        return (cache.keys[layer].clone() * x.exp() + len(cache.keys)).sin()

    x = leaf(3)
    unused, used = (checkpointed(body, guard=[cache])(x, layer).sum() for layer in range(2))
    cache.keys[1].add_(1)

    unused.backward()
    with pytest.raises(MutationError, match=r"`cache\.keys\[1\]` inside a guarded object was written in place after"):
        used.backward()
    assert cache.keys[1].tolist() == [[1.0] * 3] * 4


def test_a_tensor_that_was_written_is_not_swallowed():
    cache = Static()

    def body(x, cache):
        try:
            return (x * cache.keys[0][0]).exp().sin()
        except Exception:  # noqa: BLE001
            return x.exp().sin().cos()

    y = checkpoint(body, leaf(3), cache).sum()
    cache.keys[0].add_(1)

    with pytest.raises(MutationError, match=r"`args\[1\]\.keys\[0\]` was changed in place"):
        y.backward()


def test_an_attribute_that_is_set_between_forward_and_backward():
    class Options:
        scale = 1.0

    options, x = Options(), leaf(3)
    options.scale = 2.0
    seen = Log()

    def body(x, options):
        seen.append(options.scale)
        return (x.exp() * options.scale).sin()

    y = checkpoint(body, x, options).sum()
    options.scale = 3.0
    y.backward()

    assert seen == [2.0, 2.0]
    assert options.scale == 3.0


class Mangled:
    __slots__ = ("__count",)

    def __init__(self):
        self.__count = 0

    def count(self):
        self.__count += 1
        return self.__count


class Counter:
    """Keeps its state where Python does not see it."""

    def __init__(self):
        self.snapshots = 0
        state = [0]
        self.count = lambda: state.__setitem__(0, state[0] + 1) or state[0]
        self.take, self.give = lambda: state[0], lambda value: state.__setitem__(0, value)

    def snapshot(self):
        self.snapshots += 1
        return self.take()

    def restore(self, state):
        self.give(state)


def numbers(make):
    """Return an object with a method that counts, or draws."""
    item = make()
    draw = {
        list: lambda: item.append(1) or len(item),
        dict: lambda: item.update({len(item): 1}) or len(item),
        Mangled: lambda: item.count(),
        Counter: lambda: item.count(),
        np.ndarray: lambda: item.__iadd__(1) is item and float(item[0]),
        random.Random: lambda: item.random(),
        np.random.Generator: lambda: float(item.random()),
        np.random.RandomState: lambda: float(item.rand()),
        CountsCalls: lambda: item.count(),
    }[type(item)]
    return item, draw


class CountsCalls(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def count(self):
        self.calls += 1
        return self.calls


MAKERS = [
    list,
    dict,
    Mangled,
    Counter,
    lambda: np.zeros(2),
    lambda: random.Random(0),
    np.random.default_rng,
    lambda: np.random.RandomState(0),
    CountsCalls,
]


# An object with a snapshot is named itself.
NAMED = [(make, inside) for make in MAKERS for inside in (False, True) if not (inside and type(make()) is Counter)]


@pytest.mark.parametrize(("make", "inside"), NAMED, ids=[f"{type(make()).__name__}-{inside}" for make, inside in NAMED])
def test_whatever_is_named_is_seen_as_the_forward_saw_it(make, inside):
    item, draw = numbers(make)
    seen = Log()

    def body(x):
        seen.append(draw())
        return (x.exp() * seen[-1]).sin()

    y = checkpointed(body, guard=[[item]] if inside else [item])(leaf(3)).sum()
    between = draw()
    y.backward(retain_graph=True)
    y.backward()
    after = draw()

    assert seen == [seen[0]] * 3
    assert len({seen[0], between, after}) == 3


def test_an_object_with_a_snapshot_is_asked_and_not_looked_into():
    counter = Counter()
    y = checkpointed(lambda x, counter: (x.exp() * counter.count()).sin(), guard=[counter])(leaf(3), counter).sum()
    assert counter.snapshots == 1
    y.backward()

    # Once for the forward, once to put back what the recompute found.
    assert counter.snapshots == 2
    assert counter.count() == 2


@pytest.mark.parametrize("is_argument", [False, True])
def test_a_cache_of_tuples(is_argument):
    # As models had them before they had classes: a new tuple replaces the old one.
    def run(call_with):
        past = [()]
        x = torch.arange(1.0, 4.0, requires_grad=True)

        def body(h, past):
            past[0] = (*past[0], (h.sin(), h.cos()))
            return sum(key * value for key, value in past[0]).exp().sin()

        call, h = call_with(past), x
        for _ in range(3):
            h = call(body, h, past) if is_argument else call(lambda h: body(h, past), h)
        h.sum().backward()
        return x.grad, len(past[0])

    (ours, length), (plain, _) = run(guarded), run(lambda _: plainly)

    assert torch.equal(ours, plain)
    assert length == 3


def test_caches_of_transformers():
    cache_utils = pytest.importorskip("transformers.cache_utils")
    config = pytest.importorskip("transformers").LlamaConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=8, vocab_size=5, intermediate_size=8
    )

    def run(make, call_with):
        torch.manual_seed(0)
        cache, calls = make(), Log()
        x = torch.randn(1, 2, 3, 4, requires_grad=True)

        def body(h, cache, layer, position):
            calls.append(1)
            keys, values = cache.update(h.sin(), h.cos(), layer, {"cache_position": position})
            return (keys.clone().mean(2, keepdim=True) * values.clone().mean(2, keepdim=True) * h).exp().sin()

        call, h = call_with(cache), x
        for step in range(2):
            for layer in range(2):
                h = call(body, h, cache, layer, torch.arange(3) + 3 * step)
        h.sum().backward()
        return x.grad, cache.layers[1].keys.detach().clone(), calls

    makers = {
        "dynamic": cache_utils.DynamicCache,
        "static": lambda: cache_utils.StaticCache(config=config, max_cache_len=8),
    }
    calls = {"dynamic": (guarded, lambda _: checkpoint), "static": (guarded,)}
    for kind, make in makers.items():
        plain, expected, _ = run(make, lambda _: plainly)
        for call_with in calls[kind]:
            ours, keys, seen = run(make, call_with)
            assert torch.equal(ours, plain) and torch.equal(keys, expected), kind
            assert len(seen) == 8


def test_a_module_that_is_reached_in_hidden_ways():
    def run(call_with):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4)
        norm.momentum = None
        hidden = {"norm": norm}
        x = torch.randn(8, 4, requires_grad=True)
        call_with(norm)(lambda x: hidden["norm"](x).exp().sin(), x).sum().backward()
        return x.grad, norm.running_mean, norm.num_batches_tracked

    plain = run(lambda _: plainly)

    # Once it had to be named.
    for call_with in (guarded, lambda _: checkpoint):
        assert all(map(torch.equal, run(call_with), plain))


def test_attributes_of_a_named_module_and_of_those_inside():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = CountsCalls()
            self.seen = []

        def forward(self, x):
            self.seen.append(self.inner.count())
            return (x.exp() * self.seen[-1] * len(self.seen)).sin()

    block, x = Block(), leaf(3)
    outputs = [checkpointed(block, guard=[block])(x).sum() for _ in range(2)]
    for output in outputs:
        output.backward()

    assert block.seen == [1, 2] and block.inner.calls == 2
    plain = sum((x.exp() * n * n).sin().sum() for n in (1, 2))
    assert torch.allclose(x.grad, torch.autograd.grad(plain, x)[0])  # sums in another order


def test_copies_of_a_wrapped_model_guard_their_own():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = Static()
            self.position = 0

        def forward(self, x):
            return (self.cache.update(0, 0, x.detach().sin()).clone().sum(0) * x.exp()).sin()

    model = nn.Sequential(Block())
    wrap(model, "0", guard=[model[0].cache])
    other = copy.deepcopy(model)
    x = leaf(3)

    first, second = other(x).sum(), other(x * 2).sum()
    (first + second).backward()

    assert torch.equal(other[0].cache.keys[0][0], (x * 2).sin())
    assert model[0].cache.keys[0].tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize(
    ("guard", "kind"),
    [
        (torch.ones(1), "Tensor"),
        (3, "int"),
        ("cache", "str"),
        (None, "NoneType"),
        ((1, 2), "tuple"),
        (len, "builtin_function_or_method"),
        (Static, "type"),
        (ABCMeta("Abstract", (), {}), "ABCMeta"),
        (object(), "object"),
        (memoryview(b"a"), "memoryview"),
        (array("d", [1.0]), "array"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_given_back_is_refused(guard, kind):
    with pytest.raises(UnsupportedError, match=f"guard: the contents of {kind} cannot be restored"):
        checkpointed(torch.sin, guard=[guard])


def test_a_guard_is_a_list():
    with pytest.raises(UnsupportedError, match="guard: expected a list of objects, got Static"):
        checkpointed(torch.sin, guard=Static())


def test_what_was_changed_is_put_back_when_a_recompute_raises():
    cache = Static()
    cache.count = 0
    turns = Log()

    def body(x):
        turns.append(1)
        cache.count += 1
        cache.update(0, cache.count, x.detach())
        if len(turns) > 1:
            raise ValueError
        return x.exp().sin()

    y = checkpointed(body, guard=[cache])(leaf(3)).sum()
    keys, value = cache.keys[0], cache.keys[0].clone()
    with pytest.raises(ValueError):  # noqa: PT011
        y.backward()

    assert cache.count == 1 and cache.keys[0] is keys and torch.equal(keys, value)


def test_what_was_emptied_since_the_forward_stays_empty():
    # What was as the forward had found it was not put back after the recompute, which fills it again.
    cache = Cache()

    def body(x):
        return cache.update(x).exp()

    y = checkpointed(body, guard=[cache])(leaf(3)).sum()
    cache.layers.clear()
    y.backward()

    assert cache.layers == [] and cache.names == {"count": 1}


def test_an_object_of_torch_is_followed_if_it_is_named():
    # Those of libraries are not looked into by themselves, and `guard=[...]` left this one alone without a word.
    normal, x = torch.distributions.Normal(torch.zeros(4), torch.ones(4)), leaf(3, 4)

    def body(x):
        return torch.tanh(x * normal.loc + normal.scale * x) * x

    expected = torch.autograd.grad(body(x).sum(), x)[0]
    loss = checkpointed(body, guard=[normal])(x).sum()
    normal.loc = later = torch.full((4,), 9.0)

    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
    assert normal.loc is later
