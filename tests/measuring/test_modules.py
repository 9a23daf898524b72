from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from probes.memory import StorageNumbers, module_stack
from torchremat.measuring.modules import module_calls, names_of


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x):
        return x + self.b(self.a(x).sin())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(2, 1)

    def forward(self, x):
        return self.head(self.block(x))


def tables(model: nn.Module) -> list[object]:
    """Every dictionary of hooks that a module has."""
    return [
        {key: dict(value) for key, value in vars(module).items() if "hook" in key and isinstance(value, dict)}
        for module in model.modules()
    ]


def test_the_order_of_forward_and_backward():
    model, log = Net(), []
    x = torch.ones(1, 2)

    with module_stack(model, log.append) as stack:
        assert stack.current == ""
        loss = model(x).sum()
        assert stack.current == ""
        forward = " ".join(name or "-" for name in log)
        log.clear()
        loss.backward()

    # Each name is what runs from then on; "-" is outside.
    assert forward == "Net block block.a block block.b block Net head Net -"
    # The root's output is the head's: the innermost has it.
    assert log == ["head", "block", "block.b", "block.a"]


def test_hooks_are_gone_afterwards_and_those_of_others_stay():
    model = Net()
    model.head.register_forward_hook(lambda module, args, output: None)
    before = tables(model)

    with module_stack(model):
        assert tables(model) != before

    assert tables(model) == before


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_module_unwinds(error: type[BaseException]):
    class Raises(nn.Module):
        def forward(self, x):
            raise error

    model = nn.Sequential(nn.Linear(2, 2), Raises())
    before = tables(model)

    with pytest.raises(error), module_stack(model) as stack:
        model(torch.ones(1, 2))

    assert tables(model) == before
    if error is ValueError:
        assert stack.current == ""


def test_a_module_left_by_a_base_exception_does_not_stay():
    # torch runs no hooks then, and early stop of a recompute may leave modules in this way.
    class Stop(BaseException): ...

    class Stops(nn.Module):
        def forward(self, x):
            raise Stop

    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stops()

        def forward(self, x):
            try:
                return self.inner(x)
            except Stop:
                return x * 2

    model, log = Catches(), []

    with module_stack(model, log.append) as stack:
        model(torch.ones(1, requires_grad=True)).sum().backward()
        assert stack.current == "Catches"

    assert log == ["Catches", "inner", "", "Catches"]


@pytest.mark.parametrize(
    ("use_reentrant", "order"),
    [
        # The gradient arrives at the checkpoint's output, which is the head's input; the block runs again as a whole,
        # and then backward goes through it.
        (True, "head block block.a block block.b block head block block.b block.a"),
        # The block is hooked on its own first graph. Backward reaches b and unpacks its input: the block runs again up
        # to there, and the early stop leaves b, then the block.
        (False, "head block block.b block block.a block block.b block block.b block.a"),
    ],
)
def test_a_recompute_is_seen(use_reentrant: bool, order: str):
    model, log = Net(), []
    x = torch.ones(1, 2, requires_grad=True)

    with module_stack(model, log.append):
        loss = model.head(checkpoint(model.block, x, use_reentrant=use_reentrant)).sum()
        log.clear()
        loss.backward()

    assert " ".join(log) == order


def test_a_shared_module_has_its_first_name():
    layer, log = nn.Linear(2, 2), []

    with module_stack(nn.Sequential(layer, layer), log.append):
        pass
    model = nn.Sequential(layer, layer)
    with module_stack([model, layer], log.append):
        model(torch.ones(1, 2))

    assert log == ["Sequential", "0", "Sequential", "0", "Sequential", ""]


def test_each_thread_has_its_own_stack():
    model, seen = Net(), []

    with module_stack(model) as stack:
        handle = model.head.register_forward_pre_hook(
            lambda module, args: run_in_thread(lambda: seen.append(stack.current))
        )
        model(torch.ones(1, 2))
        handle.remove()

    assert seen == [""]


def run_in_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_gradients_are_those_of_the_plain_run():
    model = Net()
    other = copy.deepcopy(model)
    x = torch.randn(3, 2)

    model(x).sum().backward()
    with module_stack(other):
        other(x).sum().backward()

    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


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
