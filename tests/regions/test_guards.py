"""Objects among the arguments: the recompute sees what they held, and leaves them as they were."""

from collections import OrderedDict, deque
from dataclasses import dataclass

import pytest
import torch

from regions.comparing import leaf
from torchremat import MutationError, UnsupportedError, checkpoint
from torchremat.regions import guards
from torchremat.regions.guards import tensors_inside


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


def test_a_cache_that_is_written_in_place_is_an_error_that_names_it():
    cache = Cache()
    cache.layers.append(torch.zeros(3))

    def body(x, cache):
        cache.layers[0].add_(x.detach())
        return (x * cache.layers[0].clone()).exp()

    y = checkpoint(body, leaf(3), cache).sum()

    with pytest.raises(MutationError, match=r"the tensor `Cache\.layers\[0\]` inside an argument was written in place"):
        y.backward()


def test_a_tensor_in_an_object_that_is_written_after_the_forward():
    cache = Cache()
    cache.last = torch.ones(3)
    y = checkpoint(lambda x, cache: (x * cache.last).exp(), leaf(3), cache).sum()
    cache.last.add_(1)

    with pytest.raises(MutationError, match=r"`Cache\.last`"):
        y.backward()


def test_too_many_objects_are_an_error(monkeypatch):
    monkeypatch.setattr(guards, "_MOST_ITEMS", 10)
    cache = Cache()
    cache.layers = [object() for _ in range(20)]

    with pytest.raises(UnsupportedError, match="more than 10 objects hang on a region's argument of type Cache"):
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
