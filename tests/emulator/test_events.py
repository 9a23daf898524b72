import threading

import pytest
import torch

import emulator


@pytest.mark.parametrize("lag", [0, 3])
def test_an_event_fires_after_some_polls(configured, lag):
    configured(lag=lag)
    event = torch.cuda.Event()
    event.record()

    assert [event.query() for _ in range(5)] == [False] * lag + [True] * (5 - lag)


def test_an_event_may_never_fire_by_itself(configured):
    configured(lag=emulator.NEVER)
    event, later = torch.cuda.Event(), torch.cuda.Event()
    event.record()
    later.record()

    assert not any(event.query() for _ in range(100))
    event.synchronize()
    assert event.query() and not later.query()
    torch.cuda.synchronize()
    assert later.query()


def test_one_that_was_not_recorded_has_fired():
    assert torch.cuda.Event().query()


def test_time_between_events(configured):
    configured(lag=emulator.NEVER)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.rand(1000, 1000, device="cuda").sort()
    end.record()

    with pytest.raises(RuntimeError, match="device not ready"):
        start.elapsed_time(end)
    end.synchronize()
    assert 0.1 < start.elapsed_time(end) < 60_000
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


def test_a_thread_has_its_own_device_and_streams():
    side, found = torch.cuda.Stream(), []

    def look():
        found.append((torch.cuda.current_device(), torch.cuda.current_stream() == torch.cuda.default_stream()))
        torch.cuda.set_device(1)
        found.append(torch.ones(1, device="cuda").device.index)

    with torch.cuda.stream(side):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert torch.cuda.current_stream() == side

    assert found == [(0, True), 1]
    assert torch.cuda.current_device() == 0
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_backward_runs_on_the_streams_of_the_forward_and_in_a_thread_of_the_device():
    side, seen = torch.cuda.Stream(), []
    x = torch.ones(3, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    y.register_hook(lambda gradient: seen.append((torch.cuda.current_stream() == side, threading.get_ident())))
    torch.cuda.current_stream().wait_stream(side)

    y.sum().backward()

    assert seen[0][1] != threading.get_ident()
    assert x.grad.tolist() == [2, 2, 2]


def test_streams_come_from_a_pool_of_32():
    streams = [torch.cuda.Stream() for _ in range(33)]

    assert len(set(streams)) == 32 and streams[0] == streams[32]
    assert torch.cuda.Stream(priority=-1) not in streams


def test_a_device_that_is_not_there():
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:7")


def test_graphs_are_refused():
    with pytest.raises(NotImplementedError, match="captures no CUDA graphs"):
        torch.cuda.CUDAGraph()
