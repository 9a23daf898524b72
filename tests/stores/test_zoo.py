"""Every kind of store under every kind of operation and backward: gradients bit for bit, and nothing left behind."""

import functools
from contextlib import nullcontext

import pytest
import torch

from stores.memory import Memory
from stores.operations import ALIASES, OPERATIONS
from torchremat import Compressed, Disk, Host, Keep, Tiers, offload
from turns import in_turn

ALL = OPERATIONS | ALIASES


def backward(run, a):
    return torch.autograd.grad(run(a).sum(), a)


def twice(run, a):
    y = run(a).sum()
    return torch.autograd.grad(y, a, retain_graph=True) + torch.autograd.grad(y, a)


def double(run, a):
    (first,) = torch.autograd.grad(run(a).sum(), a, create_graph=True)
    if not first.requires_grad:
        return (first,)
    second = torch.autograd.grad(first.square().sum(), a, allow_unused=True)
    return (first.detach(), *second)


def batched(run, a):
    return torch.autograd.grad(run(a).sum(), a, torch.tensor([1.0, -2.0, 0.5]), is_grads_batched=True)


def gradients(way, run, context=None):
    torch.manual_seed(0)
    a = torch.randn(32, 32, requires_grad=True)
    with context or nullcontext():
        try:
            return way(run, a)
        except RuntimeError as error:  # some have no second derivative, and some no batched one
            return [type(error)]


def same(found, plain):
    pairs = zip(found, plain, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b for a, b in pairs)


WAYS = [backward, twice, double, batched]
STORES = {
    "memory": Memory,
    "keep": Keep,
    "host": Host,
    "disk": Disk,
    "compressed": lambda: Compressed(Host()),
    "tiers": lambda: Tiers(Host(6000), Disk(limit=20000)),
}


@functools.cache
def plain_gradients(way, name):
    return gradients(way, ALL[name])


@pytest.fixture(scope="module", params=STORES)
def store(request):
    return STORES[request.param]()


@pytest.mark.filterwarnings("ignore::torchremat.StoreWarning")  # the tiers are small, so that all of them are used
@in_turn("name", ALL)
def test_gradients_are_those_of_the_plain_run(name, store):
    for way in WAYS:
        found = gradients(way, ALL[name], offload(store, min_bytes=0))

        assert same(found, plain_gradients(way, name)), way.__name__
        assert held_by(store) == 0


def held_by(store):
    return len(store.live) if isinstance(store, Memory) else store.statistics.stored_bytes


# Bytes by hand: rows of 32 numbers have 128 bytes, the whole has 4096; `a` is a leaf and stays where it is.
STORED = {
    "transpose": 4096,
    "whole, then slice": 4096,
    "slices that meet": 29 * 128,
    "expand": 2 * 128,
    "expand and whole": 4096,
    "halves of columns": 4096,
    "two versions": 2 * 4096,
    "written in between": 2 * 4096,
}


@pytest.mark.parametrize("name", STORED)
def test_a_byte_that_is_saved_several_times_is_stored_once_and_loaded_once(name):
    store = Memory()

    gradients(backward, ALIASES[name], offload(store, min_bytes=0))

    assert store.bytes("put") == STORED[name]
    assert store.bytes("get") == STORED[name]


@pytest.mark.parametrize("name", ALIASES)
def test_what_is_stored_comes_back_once(name):
    store = Memory()

    gradients(backward, ALIASES[name], offload(store, min_bytes=0))

    assert store.bytes("get") == store.bytes("put") > 0
