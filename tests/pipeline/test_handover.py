"""What a thread hands to another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from logs import Log
from torchremat.pipeline.workers import Handover

WORD = ContextVar("WORD", default="none")


@pytest.fixture
def elsewhere():
    with ThreadPoolExecutor(max_workers=1) as executor:

        def run(work):
            return executor.submit(Handover().run, work).result()

        yield run


def test_autocast_is_handed_over(elsewhere):
    x = torch.rand(2, 2, device="cpu")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = elsewhere(lambda: (x @ x).dtype)

    assert found == torch.bfloat16
    assert elsewhere(lambda: (x @ x).dtype) == torch.float32


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_mode_is_handed_over(elsewhere, enabled):
    with torch.set_grad_enabled(enabled):
        assert elsewhere(torch.is_grad_enabled) is enabled


def test_inference_mode_is_handed_over(elsewhere):
    with torch.inference_mode():
        made = elsewhere(lambda: torch.rand(1))

    assert made.is_inference()
    assert not elsewhere(lambda: torch.rand(1)).is_inference()


def test_context_variables_are_handed_over_and_stay_there(elsewhere):
    WORD.set("here")

    assert elsewhere(WORD.get) == "here"
    elsewhere(lambda: WORD.set("there"))
    assert WORD.get() == "here"


def test_the_default_device_is_handed_over(elsewhere):
    with torch.device("meta"):
        assert elsewhere(lambda: torch.empty(1).device.type) == "meta"
    assert elsewhere(lambda: torch.empty(1).device.type) == torch.empty(1).device.type


def test_a_mode_that_watches_sees_the_work(elsewhere):
    with FlopCounterMode(display=False) as counter:
        elsewhere(lambda: torch.rand(2, 3) @ torch.rand(3, 4))

    assert counter.get_total_flops() == 2 * 2 * 3 * 4
    elsewhere(lambda: torch.rand(2, 3) @ torch.rand(3, 4))
    assert counter.get_total_flops() == 2 * 2 * 3 * 4


def test_hooks_for_saved_tensors_are_handed_over(elsewhere):
    x = torch.rand(3, requires_grad=True)
    packed = Log()

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(threading.current_thread()) or t, lambda t: t
    ):
        y = elsewhere(x.exp)
    elsewhere(x.exp)

    assert len(packed) == 1
    assert packed[0] is not threading.current_thread()
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


def test_a_thread_is_left_as_it_was(elsewhere):
    def fails():
        raise ValueError("no")

    before = elsewhere(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    with torch.no_grad(), torch.autocast("cpu"), pytest.raises(ValueError, match="no"):
        elsewhere(fails)

    assert elsewhere(lambda: (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))) == before == (True, False)
