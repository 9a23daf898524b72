"""Threads that run, read and train a model whose parameters are in a store, and interrupts."""

import itertools
import linecache
import sys
import threading

import pytest
import torch
from torch import nn, optim

from optimizing.chains import LAYERS, chain, forward, stored, train, values
from optimizing.loops import equal
from torchremat import Host, offload_parameters
from torchremat.stores import stored_parameters

X = torch.ones(4, 256)


def in_threads(functions):
    errors = []

    def guarded(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001  reported below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(one,)) for one in functions]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == []


def test_threads_run_one_model():
    (model, _), (plain, _) = chain(Host()), chain()
    expected = [plain(X + number).detach() for number in range(3)]
    wrong = []

    @torch.no_grad()
    def run(number):
        for _ in range(50):
            if not torch.equal(model(X + number), expected[number]):
                wrong.append(number)

    in_threads([lambda number=number: run(number) for number in range(3)])

    assert wrong == []
    forward(model)
    assert len(stored(model)) == LAYERS


def test_what_one_thread_uses_no_other_puts_away():
    (model, _), during = chain(Host()), []
    layer = model[3][0]

    @torch.no_grad()
    def run_and_read():
        layer(X)
        for p in model.parameters():
            p.detach()

    def look(*_):  # while this thread runs the layer, another one runs it from its begin to its end
        hook.remove()
        in_threads([run_and_read])
        during.append(type(layer.weight))

    hook = layer.register_forward_pre_hook(look)
    with torch.no_grad():
        forward(model)

    assert during == [nn.Parameter]
    assert len(stored(model)) == LAYERS


def test_a_thread_that_reads_changes_no_training():
    (model, _), (plain, _) = chain(), chain()
    optimizers = [optim.SGD(one.parameters(), 0.1) for one in (model, plain)]
    offload_parameters(model, optimizers[0], Host())
    is_over, found = threading.Event(), []

    def read():
        while not is_over.is_set():
            for p in model.parameters():
                p.detach().norm()

    def run():
        found.extend(train(model, optimizers[0], 20))
        is_over.set()

    in_threads([run, read])

    assert equal(found, train(plain, optimizers[1], 20))


def test_a_backward_that_ends_leaves_the_step_of_another_thread_alone():
    # It put away what was in the middle of its part of the step, whose writes went to memory that was given up.
    (model, _), (plain, _), during = chain(), chain(), []

    class Slow(optim.SGD):
        def step(self, closure=None):
            some = self.param_groups[0]["params"]
            if some[0].shape == (256, 256):  # not a small twin, which is tried first
                in_threads([lambda: torch.autograd.grad(forward(model), some)])
                during.extend(type(one) for one in some)
            super().step(closure)

    optimizers = [Slow(model.parameters(), 0.1), optim.SGD(plain.parameters(), 0.1)]
    offload_parameters(model, optimizers[0], Host())

    for one, optimizer in zip((model, plain), optimizers, strict=True):
        forward(one).backward()
        optimizer.step()

    assert set(during) == {nn.Parameter}
    assert equal(values(model), values(plain))


# ------------------------------------------------------------------------------------------------- at every line


class AtLine:
    """Runs `act` once in a block, before the given line in their order of the module that moves values."""

    def __init__(self, number, act):
        self.number, self.act, self.seen = number, act, {}

    def __enter__(self):
        self.outer = sys.gettrace()
        sys.settrace(self._called)

    def __exit__(self, *_):
        sys.settrace(self.outer)

    def _called(self, frame, *_):
        is_ours = frame.f_code.co_filename == stored_parameters.__file__
        return self._line if is_ours and frame.f_code.co_name != "_plainly" else None

    def _line(self, frame, event, _):
        text = linecache.getline(stored_parameters.__file__, frame.f_lineno)
        # No signal arrives before the end of a `with` or a `try` alone, which a trace sees.
        if event == "line" and not text.lstrip().startswith(("with ", "try:")):
            is_new = self.seen.setdefault(frame.f_lineno, len(self.seen)) == len(self.seen) - 1
            if is_new and len(self.seen) - 1 == self.number and self.act is not None:
                act, self.act = self.act, None
                act()
        return self._line


def small_chain(store=None):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    optimizer = optim.SGD(model.parameters(), 0.1)
    if store is not None:
        offload_parameters(model, optimizer, store, min_bytes=0)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()


def read(model, _=None):
    return [p.sum().item() for p in model.parameters()]


RUNS = {"step": step, "read": read, "copy": lambda model, _: nn.Parameter.__deepcopy__(model[0].weight, {})}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_a_thread_that_reads_at_any_line_finds_the_values(run):
    plain, plain_optimizer = small_chain()
    before = read(plain)
    run(plain, plain_optimizer)
    after = read(plain)

    for number in itertools.count():
        (model, optimizer), found, threads = small_chain(Host()), [], []

        def act(model=model, found=found, threads=threads):
            threads.append(threading.Thread(target=lambda: found.append(read(model))))
            threads[0].start()
            threads[0].join(0.02)  # it may wait for this one

        line = AtLine(number, act)
        with line:
            run(model, optimizer)
        for one in threads:
            one.join()

        if line.act is not None:
            break
        assert len(found) == 1
        assert all(value in pair for value, *pair in zip(found[0], before, after, strict=True))
        assert read(model) == after
    assert number > 15


def test_an_interrupt_at_any_line_loses_no_values():
    plain, plain_optimizer = small_chain()
    before = read(plain)
    step(plain, plain_optimizer)
    after = read(plain)

    def interrupt():
        raise KeyboardInterrupt

    for number in itertools.count():
        model, optimizer = small_chain(Host())
        line = AtLine(number, interrupt)
        try:
            with line:
                step(model, optimizer)
        except KeyboardInterrupt:
            pass

        if line.act is not None:
            break
        assert all(value in pair for value, *pair in zip(read(model), before, after, strict=True))
        step(model, optimizer)
    assert number > 15
