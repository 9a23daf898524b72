"""What users add to the things that a recompute must see again."""

import random
from importlib import import_module

import pytest
import torch

from logs import Log
from regions.comparing import Counted, leaf, same
from torchremat import UnsupportedError, checkpoint, extend


class Recipe:
    """A user's own entry, in less than ten lines."""

    name = "the scale"

    def __init__(self):
        self.scale = torch.ones(())
        self.events = Log()

    def capture(self):
        self.events.append("capture")
        return self.scale

    def restore(self, state):
        self.events.append("restore")
        self.scale = state


@pytest.mark.parametrize(
    ("entry", "draw"),
    [
        (extend.python_random, lambda: import_module("random").random()),
        (extend.numpy_random, lambda: float(import_module("numpy.random").rand())),
    ],
    ids=["python", "numpy"],
)
def test_random_numbers_of_python_and_numpy(entry, draw):
    drawn = Log()

    def body(x):
        drawn.append(draw())
        return (x.exp() * drawn[-1]).sin()

    x = leaf(4)
    with extend.registered(entry):
        y = checkpoint(body, x).sum()
        between = draw()
        y.backward()
        after = draw()

    assert drawn[0] == drawn[1]
    assert len({drawn[0], between, after}) == 3

    # Without the entry they are not the same again.
    drawn.clear()
    checkpoint(body, x).sum().backward()
    assert drawn[0] != drawn[1]


def test_the_next_number_is_that_of_a_run_without_a_recompute():
    with extend.registered(extend.python_random):
        random.seed(3)
        y = checkpoint(lambda x: (x.exp() * random.random()).sin(), leaf(4)).sum()
        y.backward()
    ours = random.random()
    random.seed(3)
    random.random()

    assert ours == random.random()


def test_an_entry_of_a_user():
    recipe = Recipe()
    x = leaf(4)

    def body(x):
        y = (x.exp() * recipe.scale).sin()
        recipe.scale = recipe.scale * 2  # as a recipe does that follows what it sees
        return y.cos()

    def run(call):
        recipe.scale = torch.ones(())
        return call(body, x) + call(body, x)

    with extend.registered(recipe):
        assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x])
    assert recipe.scale == 4


def test_when_an_entry_is_asked():
    recipe = Recipe()
    with extend.registered(recipe):
        y = checkpoint(lambda x: x.exp().sin(), leaf(4)).sum()
        assert recipe.events == ["capture"]
        y.backward()

    assert recipe.events == ["capture", "capture", "restore", "restore"]


def test_entries_work_without_grad():
    class Asks(Recipe):
        def capture(self):
            self.events.append(torch.is_grad_enabled())

        def restore(self, state):
            self.events.append(torch.is_grad_enabled())

    asks = Asks()
    with extend.registered(asks):
        checkpoint(lambda x: x.exp().sin(), leaf(4)).sum().backward()

    assert asks.events == [False] * 4
    assert torch.is_grad_enabled()


def test_entries_are_restored_in_their_order_and_put_back_in_the_opposite_one():
    events = Log()

    class Named(Recipe):
        def __init__(self, name):
            self.name = name

        def capture(self):
            events.append(f"c{self.name}")

        def restore(self, state):
            events.append(f"r{self.name}")

    with extend.registered(Named("a")), extend.registered(Named("b")):
        checkpoint(lambda x: x.exp().sin(), leaf(4)).sum().backward()

    assert " ".join(events) == "ca cb ca ra cb rb rb ra"


def test_entries_that_come_and_go_between_forward_and_backward():
    came, went = Recipe(), Recipe()
    with extend.registered(went):
        y = checkpoint(lambda x: x.exp().sin(), leaf(4)).sum()
    with extend.registered(came):
        y.backward()

    assert came.events == []
    assert went.events == ["capture", "capture", "restore", "restore"]


@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_an_entry_that_raises(when):
    class Raises(Recipe):
        def capture(self):
            self.events.append("capture")
            if len(self.events) == (1 if when == "forward" else 2):
                raise ValueError(when)
            return self.scale

    first, raises = Recipe(), Raises()
    body = Counted(lambda x: x.exp().sin())
    x = leaf(4)
    with extend.registered(first), extend.registered(raises), pytest.raises(ValueError, match=when):
        checkpoint(body, x).sum().backward()

    # Nothing has run that the state was not right for, and what was restored was put back.
    assert body.calls == (0 if when == "forward" else 1)
    assert first.events.count("restore") == (0 if when == "forward" else 2)
    y = x.exp()
    assert y.grad_fn._saved_result is not None  # no hook was left
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("missing", ["name", "capture", "restore"])
def test_what_is_no_entry_is_refused(missing):
    parts = {"name": "one", "capture": lambda self: None, "restore": lambda self, state: None}
    del parts[missing]

    with pytest.raises(UnsupportedError, match="an object with `name`, `capture"):
        extend.register(type("Half", (), parts)())


def test_registering_twice_and_what_is_not_registered():
    recipe = Recipe()
    with extend.registered(recipe), pytest.raises(UnsupportedError, match="the scale is registered already"):
        extend.register(recipe)
    with pytest.raises(UnsupportedError, match="the scale is not registered"):
        extend.unregister(recipe)


def test_nothing_is_captured_if_nothing_is_registered():
    from probes.regions import Region, Settings

    region = Region(Settings())
    region.call(torch.exp, (leaf(3),), {}, [])

    assert region.calls[0].captured is None
