"""Calls of modules, one inside another."""

import pytest
import torch
from torch import nn

from torchremat.measuring.calls import module_calls, names_of
from torchremat.measuring.storages import StorageNumbers


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *, mask=None):
        with torch.no_grad():
            self.inner(x)
        return self.inner(x) * mask


def test_calls_know_who_made_them_and_with_what():
    model, numbers = Twice(), StorageNumbers()
    x, mask = torch.randn(1, 2), torch.ones(2)
    storages = numbers.of([x, mask])

    with module_calls([model], numbers) as found:
        model(x, mask=mask)

    assert [(one.name, one.parent, one.has_grad) for one in found.calls] == [
        ("Twice", None, True),
        ("inner", 0, False),
        ("inner", 0, True),
    ]
    assert [one.inputs for one in found.calls] == [storages, storages[:1], storages[:1]]
    assert found.current is None


def test_a_call_that_raises_is_left():
    model, numbers = nn.Sequential(nn.Linear(2, 2)), StorageNumbers()

    with module_calls([model], numbers) as found:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 3))
        assert found.current is None
        model(torch.randn(1, 2))

    assert [one.name for one in found.calls] == ["Sequential", "0"] * 2
    assert [one.parent for one in found.calls] == [None, 0, None, 2]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_module_has_its_first_name():
    inner = nn.Linear(2, 2)
    model = nn.Sequential(inner, inner)

    assert list(names_of([model, inner]).values()) == ["Sequential", "0"]
