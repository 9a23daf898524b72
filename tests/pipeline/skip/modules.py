"""Modules with skips that the tests share."""

from torch import nn

from logs import Count
from torchremat.pipeline.skip import pop, skippable, stash


@skippable(stash=["a"])
class Stash(nn.Module):
    """Stashes what it computes."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.ran = Count()

    @property
    def calls(self):
        return self.ran.value

    def forward(self, x):
        self.ran.up()
        h = self.linear(x).sin()
        yield stash("a", h)
        return h.exp()


@skippable(pop=["a"])
class Pop(nn.Module):
    """Uses what was stashed."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.ran = Count()

    @property
    def calls(self):
        return self.ran.value

    def forward(self, x):
        self.ran.up()
        a = yield pop("a")
        return (self.linear(x) * a).tanh() * a.exp()


class Between(nn.Module):
    """Has nothing to do with skips."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return self.linear(x).sin()


@skippable(stash=["s"])
class StashValue(nn.Module):
    """Stashes what a function makes of its input."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        yield stash("s", self.function(x))
        return x.sin()


@skippable(pop=["s"])
class PopValue(nn.Module):
    """Uses what was stashed by a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        value = yield pop("s")
        return self.function(x, value)
