"""Dicts that behave otherwise than a dict, among what a step reaches; each of them is the user's."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from probes.memory import untouched


class Frozen(OrderedDict):
    """As those of diffusers' configurations: filled once, and then refuses to change."""

    def __init__(self, *args):
        super().__init__(*args)
        self.frozen = True

    def __setitem__(self, key, value):
        if getattr(self, "frozen", False):
            raise TypeError("frozen")
        super().__setitem__(key, value)

    def update(self, *_):
        raise TypeError("frozen")

    __delitem__ = pop = setdefault = clear = update


class Lazy(OrderedDict):
    """As those of transformers' mappings: shows more than it holds, and makes it when it is asked."""

    def __len__(self):
        return super().__len__() + 2

    def __iter__(self):
        raise AssertionError("was asked")

    keys = values = items = __iter__


class Empty(dict):
    """Says that it is empty."""

    def __len__(self):
        return 0


def moved():
    own = OrderedDict(a=1, b=2, c=3)
    own.move_to_end("a")
    return own


MAKES = {
    "frozen": lambda: Frozen({"a": 1, "b": 2}),
    "lazy": lambda: Lazy({"a": 1, "b": 2}),
    "empty": lambda: Empty({"a": 1, "b": 2}),
    "moved": moved,
}


class Net(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.config = own
        self.inner = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.calls = 0


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("writes", [False, True])
def test_it_is_left_as_it_was_and_so_is_all_beside_it(kind, writes):
    own = MAKES[kind]()
    model = Net(own)
    ordered = OrderedDict if isinstance(own, OrderedDict) else dict
    before = [*ordered.items(own)]
    tables = {name: dict(vars(one)) for name, one in model.named_modules()}

    with untouched(model):
        model.calls += 1
        model.other = 1
        if writes:
            dict.__setitem__(own, "b", 5)

    assert [*ordered.items(own)] == before
    assert {name: dict(vars(one)) for name, one in model.named_modules()} == tables
