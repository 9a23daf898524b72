"""Warnings of planned models: at which line of the user's they are told, and how often."""

import warnings
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from inspect import currentframe

import torch
from torch import nn

from planning.kinds import block, inputs, square
from planning.steps import each
from torchremat import OrderWarning, Planner, ShapeWarning


class Ordered(nn.Module):
    """Calls its layers in an order that may change."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.order = range(4)

    def forward(self, x):
        for index in self.order:
            x = self.layers[index](x)  # here
        return x


@cache
def ordered_plan():
    torch.manual_seed(0)
    x = inputs()
    made = Planner(Ordered(), lambda m: square(m(x)), cost="flops").plan("100%")
    return replace(made, tree=each(4))


def planned():
    model = Ordered()
    ordered_plan().apply(model)
    return model


def larger():
    return torch.cat([inputs()] * 2)


@contextmanager
def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def places(caught):
    return [(one.category, one.filename, one.lineno) for one in caught]


def test_a_larger_input_is_told_at_the_call_of_the_model():
    # The line was one of whoever called the step: the number of calls between depends on what the model is.
    model = planned()

    with told() as caught:
        model(larger())
        line = currentframe().f_lineno - 1

    assert places(caught) == [(ShapeWarning, __file__, line)]


def test_another_order_is_told_at_the_call_of_the_module():
    # The line was one of this library's.
    model = planned()
    model.order = (0, 1, 2, 3, 2)
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if text.endswith("# here\n"))

    with told() as caught:
        model(inputs())

    assert places(caught) == [(OrderWarning, __file__, line)]


def test_a_larger_input_is_told_once_for_each_time_that_a_plan_is_applied():
    # It was told once for each plan object: the second model that a plan was put on said nothing.
    first, second = planned(), planned()

    with told() as caught:
        first(larger())
        first(larger())
        second(larger())
        ordered_plan().remove(second)
        ordered_plan().apply(second)
        second(larger())

    assert [one.category for one in caught] == [ShapeWarning] * 3
