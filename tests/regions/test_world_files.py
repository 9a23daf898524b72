"""What a recompute sees of Python modules: of the user's files, of packages, and of the libraries' random numbers."""

import contextlib
import random
import sys
import threading
import types
from importlib import import_module

import numpy as np
import pytest
import torch
from torch import nn

from probes.regions import Reaching, reach
from regions.comparing import leaf, same
from torchremat import checkpoint

SETTINGS = """
import threading

gain, items, local = 1.0, [1.0], threading.local()

class Box:
    gain = 1.0

def scaled(x):
    return (x * gain * items[-1]).exp()
"""
PACKAGE = {
    "__init__": "from . import handlers\nfrom .api import apply",
    "api": "from .handlers import stacked\n\ndef apply(x):\n    return (x * stacked()).exp()",
    "layers": """
from torch import nn
from .api import apply
from .hub import upload

def sizes(model):
    return [one.shape for one in model.parameters()]

class Layer(nn.Linear):
    def forward(self, x):
        return apply(super().forward(x))

    def push(self):
        return upload(self, sizes(self))
""",
    "hub": "def upload(model, sizes):\n    return [one.data.numpy() for one in model.parameters()], sizes",
    "handlers": """
STACK, gain = [], 1.0

class Options:
    gain = 1.0

def stacked():
    found = gain * Options.gain
    for one in STACK:
        found = found * one
    return found

class scaled:
    def __init__(self, by):
        self.by = by

    def __enter__(self):
        STACK.append(self.by)

    def __exit__(self, *_):
        STACK.pop()
""",
}


def file_of(source, name):
    module = types.ModuleType(name)
    exec(source, module.__dict__)
    return module


@pytest.fixture
def settings(monkeypatch):
    module = file_of(SETTINGS, "settings_of_a_user")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(globals(), "settings", module)
    return module


@pytest.fixture
def package(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages" / "package_of_handlers"
    folder.mkdir(parents=True)
    for name, source in PACKAGE.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(folder.parent)
    found = import_module("package_of_handlers")
    yield found
    for name in [name for name in sys.modules if name.startswith("package_of_handlers")]:
        del sys.modules[name]


@contextlib.contextmanager
def attribute(owner, name, value):
    had = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, had)


def left_before_backward(body, around):
    """Return whether a region agrees with a plain run, where a block around both forwards is left before backward."""
    x = leaf(4)

    def run(call):
        with around():
            return call(body, x)

    return same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x])


def by_global(x):
    return (x * settings.gain * settings.items[-1] * settings.Box.gain).exp()


def by_import(x):
    import settings_of_a_user as ours

    return (x * ours.gain * ours.items[-1] * ours.Box.gain).exp()


def by_import_of_names(x):
    from settings_of_a_user import Box, gain, items

    return (x * gain * items[-1] * Box.gain).exp()


def by_string(x):
    named = {name: getattr(settings, name) for name in ("gain", "items", "Box")}
    return (x * named["gain"] * named["items"][-1] * named["Box"].gain).exp()


HOLDER = types.SimpleNamespace(files=[])


def by_attribute(x):
    file = HOLDER.files[0]
    return (x * file.gain * file.items[-1] * file.Box.gain).exp()


@pytest.mark.parametrize("body", [by_global, by_import, by_import_of_names, by_string, by_attribute])
@pytest.mark.parametrize("changed", ["gain", "items", "Box"])
def test_names_of_a_python_module(body, changed, settings):
    HOLDER.files = [settings]
    owner = settings.Box if changed == "Box" else settings
    value = [3.0] if changed == "items" else 3.0

    assert left_before_backward(body, lambda: attribute(owner, "gain" if changed == "Box" else changed, value))


def test_a_function_of_a_python_module_is_followed(settings):
    def body(x):
        return settings.scaled(x)

    assert left_before_backward(body, lambda: attribute(settings, "gain", 3.0))
    settings.items.append(2.0)
    y = checkpoint(body, leaf(4)).sum()
    settings.items.pop()
    y.backward()
    assert settings.items == [1.0]


@pytest.mark.parametrize("where", ["stack", "global name", "class"])
def test_another_file_of_a_package(where, package):
    handlers = package.handlers
    around = {
        "stack": lambda: handlers.scaled(3.0),
        "global name": lambda: attribute(handlers, "gain", 3.0),
        "class": lambda: attribute(handlers.Options, "gain", 3.0),
    }[where]
    apply = package.apply

    assert left_before_backward(lambda x: package.apply(x), around)
    assert left_before_backward(lambda x: apply(x), around)


def test_a_method_of_a_package_that_need_not_run_leads_through_its_own_file_alone(package):
    # `x.to` means the `to` of every model, which led through half of what is installed, and to code that names `data`.
    layer, world = import_module("package_of_handlers.layers").Layer(4, 4), Reaching()

    reach(world, [layer])

    followed = {one.__name__ for one in world.bindings.functions}
    assert {"forward", "apply", "stacked", "push", "sizes"} <= followed
    assert "upload" not in followed
    assert not world.passes_versions


def test_attributes_of_a_thread(settings):
    settings.local.gain = 1.0

    assert left_before_backward(
        lambda x: (x * settings.local.gain).exp(), lambda: attribute(settings.local, "gain", 3.0)
    )


def test_attributes_of_a_thread_in_a_recompute_elsewhere(settings):
    settings.local.gain, x = 3.0, leaf(4)
    y = checkpoint(lambda x: (x * settings.local.gain).exp(), x)
    left = []

    def backward():
        y.sum().backward()
        left.append(vars(settings.local).copy())

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()

    assert torch.equal(x.grad, y.detach() * 3.0)
    assert left == [{}]


draw = random.random


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x * random.random()).exp(),
        lambda x: (x * draw()).exp(),
        lambda x: (x * random.uniform(0.5, 1.5)).exp(),
        lambda x: (x * float(np.random.rand())).exp(),
        lambda x: (x * float(np.random.default_rng(3).random()) * float(np.random.normal())).exp(),
    ],
    ids=["module", "function", "method", "numpy", "numpy, twice"],
)
def test_global_random_numbers_that_code_names(body):
    x = leaf(4)

    def run(call):
        random.seed(0)
        np.random.seed(0)
        return call(body, x)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x])
    ours = (random.random(), np.random.rand())
    run(lambda f, x: f(x))
    assert ours == (random.random(), np.random.rand())  # a recompute has advanced neither


def test_a_module_that_skips_its_layers_at_random():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh() if random.random() < 0.5 else x * random.random()
            return x

    model, x = Skips(), leaf(4)

    def run(call):
        random.seed(2)
        return call(model, x)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [x], [model])
