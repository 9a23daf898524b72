"""Namespaces: equal to their copies, in an order, with None before all of them."""

import copy
import pickle

import pytest

from torchremat.pipeline.skip import Namespace
from torchremat.pipeline.skip.layouts import order_of


def test_two_are_different():
    assert Namespace() != Namespace()
    assert len({Namespace(), Namespace(), None}) == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_equal(copied):
    namespace = Namespace()
    other = copied(namespace)

    assert other == namespace and other is not namespace
    assert hash(other) == hash(namespace)


def test_they_have_an_order_and_none_is_first():
    one, two = sorted([Namespace(), Namespace()], key=lambda namespace: namespace.id)

    assert one < two and two > one and one <= one and two >= one
    assert one > None and not one < None
    assert one.__eq__(None) is NotImplemented
    assert sorted([two, None, one]) == [None, one, two]
    keys = [(two, "a"), (None, "b"), (one, "b"), (one, "a"), (None, "a")]
    assert sorted(keys, key=order_of) == [(None, "a"), (None, "b"), (one, "a"), (one, "b"), (two, "a")]
    with pytest.raises(TypeError):
        sorted([one, "a"])


def test_what_it_looks_like():
    namespace = Namespace()
    assert repr(namespace) == f"<Namespace '{namespace.id}'>"
