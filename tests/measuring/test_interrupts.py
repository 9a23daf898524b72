"""Signals that come at a bad time: what their handlers do waits for a good one."""

import signal
import textwrap
import threading

import pytest

from forked import run_main
from torchremat.measuring.interrupts import uninterrupted


class Boom(Exception):
    pass


@pytest.fixture
def handled():
    """The signals whose handlers have run; that of SIGUSR1 raises."""
    seen = []

    def note(number, frame):
        seen.append(number)
        if number == signal.SIGUSR1:
            raise Boom

    before = {number: signal.signal(number, note) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_of_all_signals_wait_for_the_end_of_the_block(handled):
    @uninterrupted()
    def both():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)
        assert handled == []

    usual = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Boom):
        both()

    assert handled == [signal.SIGUSR1, signal.SIGUSR2]
    assert signal.getsignal(signal.SIGUSR1) is usual


def test_they_run_before_where_the_block_lets_them_but_not_inside_of_another(handled):
    with uninterrupted() as deliver:
        signal.raise_signal(signal.SIGUSR2)
        with uninterrupted():
            deliver()
            assert handled == []
        deliver()
        assert handled == [signal.SIGUSR2]
        signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(Boom):
            deliver()

    assert handled == [signal.SIGUSR2, signal.SIGUSR1]


def test_another_thread_leaves_the_handlers_alone(handled):
    found = []

    def ask():
        with uninterrupted() as deliver:
            found.append(signal.getsignal(signal.SIGUSR1))
            deliver()

    usual = signal.getsignal(signal.SIGUSR1)
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()

    assert found == [usual]


def test_a_signal_amid_an_operator_of_a_plan_on_meta_does_not_end_the_process(tmp_path):
    # torch looks for a mode's kernel in Python, from C++ that passes no exception on: it called `std::terminate`.
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import signal

        import torch
        from torch import nn
        from torch._library import simple_registry

        import torchremat


        def boom(number, frame):
            raise KeyError("mine")


        signal.signal(signal.SIGUSR1, boom)
        find = simple_registry.find_torch_dispatch_rule
        left = 0


        def found(*arguments):
            global left
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGUSR1)
            return find(*arguments)


        simple_registry.find_torch_dispatch_rule = found
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3)))
        x = torch.randn(4, 8)
        for left in (1, 5, 40, 200, 10**9):
            try:
                torchremat.plan(model, lambda model: model(x).sum(), budget="100%", on="meta", device="h100")
            except KeyError:
                print("raised", torch.utils._python_dispatch._get_current_dispatch_mode())
        print(10**9 - left > 1000)
        """)
    )

    ended = run_main(program, folder=tmp_path, timeout=120)

    assert ended.code == 0, ended.err
    assert ended.out.split("\n")[:-1] == ["raised None"] * 4 + ["True"]
