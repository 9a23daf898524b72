"""The options of plans: checked, listed by every function that takes them, and typed as they are kept."""

import inspect
from dataclasses import fields, replace
from typing import get_type_hints

import pytest
from torch import nn

import torchremat
from torchremat import Disk, UnsupportedError
from torchremat.interop.training_budget import MemoryBudget
from torchremat.planning.plan_options import PlanKeywords, PlanOptions

TRAINING = {"cost", "operators", "release_gradients", "optimizer_store", "parameter_store"}
NAMES = {one.name for one in fields(PlanOptions)}


def listed(function):
    """The options in the signature of a function, with their defaults."""
    return {name: one.default for name, one in inspect.signature(function).parameters.items() if name in NAMES}


def test_the_keywords_are_the_options():
    assert get_type_hints(PlanKeywords) == get_type_hints(PlanOptions)


def test_options_are_keywords_and_back():
    options = PlanOptions(cost="flops", stores=[Disk()], accumulates=True, progress=False)

    assert PlanOptions(**options.keywords) == options
    assert type(options.stores) is tuple


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (torchremat.plan, NAMES),
        (torchremat.frontier, NAMES),
        (torchremat.Planner, NAMES),
        (torchremat.fit, NAMES - {"on"}),
        (
            torchremat.Adaptive,
            {"cost", "operators", "optimizer", "device", "group", "release_gradients", "accumulates"},
        ),
        (MemoryBudget, TRAINING),
    ],
)
def test_every_function_lists_the_options_that_it_takes(function, names):
    own, found = {one.name: one.default for one in fields(PlanOptions)}, listed(function)

    assert found == {name: own[name] for name in names}
    assert not any(one.kind is one.VAR_KEYWORD for one in inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: torchremat.plan(nn.Identity(), id, budget=1, cots="flops"), r"plan\(\) got .* argument 'cots'"),
        (lambda: torchremat.fit(nn.Identity(), id, budget=1, on="meta"), r"fit\(\) got .* argument 'on'"),
        (lambda: torchremat.Planner(nn.Identity(), id, margin=1), r"Planner.__init__\(\) got .* argument 'margin'"),
        (lambda: torchremat.Adaptive(nn.Identity(), id, budget=1, stores=()), r"__init__\(\) got .* argument 'stores'"),
        (lambda: MemoryBudget(1, on=None), r"__init__\(\) got .* argument 'on'"),
    ],
)
def test_no_function_takes_other_options(call, said):
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"cost": "bytes"}, "cost='bytes': allowed are 'seconds' and 'flops'"),
        ({"operators": 1}, "operators=1: expected True or False"),
        ({"allow_lossy": "no"}, "allow_lossy='no': expected True or False"),
        ({"progress": True}, "progress=True: expected a function"),
        ({"stores": "disk"}, "stores='disk': expected a list of stores"),
        ({"stores": [Disk()], "on": "meta"}, "leave out stores or on='meta'"),
        ({"clip_value": 1.0}, "clip_value= says how gradients are released"),
        ({"clip_value": 1.0, "accumulates": True}, "clip_value= says how gradients are released"),
        ({"accumulates": 1}, "accumulates=1: expected True or False"),
        ({"accumulates": 1, "release_gradients": True}, "accumulates=1: expected True or False"),
    ],
)
def test_options_are_checked_when_they_are_made(options, said):
    with pytest.raises(UnsupportedError, match=said):
        PlanOptions(**options)
    with pytest.raises(UnsupportedError, match=said):
        replace(PlanOptions(), **options)
