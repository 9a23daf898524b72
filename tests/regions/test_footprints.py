"""What a recompute adds to memory, by hand."""

import torch
from torch import nn

from torchremat import Session, checkpoint
from torchremat.regions.footprints import footprint_bytes


class Weighed:
    """Weighs each region when it has been recomputed."""

    def __init__(self):
        self.session = Session(watch=self)
        self.found = {}

    def recomputing(self, number):
        self.found[number] = None

    def recomputed(self, number, region, *, is_whole):
        assert is_whole
        self.found[number] = footprint_bytes(region, self.session)

    def dropped_too_early(self):
        raise AssertionError


def weigh(*functions, x):
    weighed = Weighed()
    with weighed.session.active():
        for function in functions:
            x = checkpoint(function, x)
        x.sum().backward()
    weighed.session.close()
    return weighed.found


def test_a_storage_counts_once_and_what_is_there_anyway_does_not():
    x = torch.randn(4, 8, requires_grad=True)
    linear = nn.Linear(8, 8, bias=False)

    # `sin` saves x, an input; `exp` its output; `tanh` its own; the product both of them, and the linear layer its
    # input, the product, and its weight.
    def body(x):
        a = x.sin().exp()
        return linear(a * a.tanh())

    # a and its tanh (one storage each, saved twice), and the product.
    assert weigh(body, x=x) == {0: 3 * 4 * 8 * 4}


def test_regions_are_counted_in_the_order_of_the_forward():
    x = torch.randn(4, 8, requires_grad=True)

    # `exp` saves its output, `sin` its input: of the second region, that is the output of the first, held anyway.
    assert weigh(lambda x: x.exp().sin(), lambda x: x.sin().sin().sin(), x=x) == {1: 2 * 4 * 8 * 4, 0: 4 * 8 * 4}


def test_a_session_tells_what_is_next():
    x = torch.randn(4, requires_grad=True)
    session = Session()
    with session.active():
        y = checkpoint(torch.exp, checkpoint(torch.exp, x))

    assert session.next_number() == 1
    assert session.recompute() == 1 and session.next_number() == 0
    assert session.recompute() == 1 and session.next_number() is None
    del y
    session.close()


def test_a_region_whose_graph_is_gone_is_not_next():
    x = torch.randn(4, requires_grad=True)
    session = Session()
    with session.active():
        y = checkpoint(torch.exp, x)
        checkpoint(torch.exp, x)

    assert session.next_number() == 0
    assert y.requires_grad and session.recompute(5) == 1
    session.close()
