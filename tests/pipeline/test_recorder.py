"""The recorder: what it takes down, from several threads, and on which clock."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from pipeline.making import event
from torchremat._compat import accelerators
from torchremat.pipeline import event_recorder as recorder_module
from torchremat.pipeline.event_recorder import Recorder
from torchremat.pipeline.timeline import Timeline


def test_a_recorder_takes_down_what_happens_inside():
    recorder = Recorder()
    before = time.perf_counter()
    recorder.start()
    with recorder.event(1, 2, "backward"):
        time.sleep(0.002)
        with recorder.event(1, 2, "recompute"):
            pass
    after = time.perf_counter()

    own = Timeline(events=recorder.events(), stages=2)
    assert own.order() == "B1.2 R1.2"
    assert own.events_of(1)[0].start_s >= 0
    assert 0.002 <= own.step_s <= after - before


def test_a_recorder_that_is_off_takes_down_nothing():
    recorder = Recorder(on=False)

    assert recorder.event(0, 0, "forward") is recorder.event(1, 1, "backward")
    with recorder.event(0, 0, "forward"):
        recorder.on = True
    assert recorder.events() == ()


def test_an_event_that_raises_is_taken_down():
    recorder = Recorder()
    with pytest.raises(KeyboardInterrupt), recorder.event(0, 0, "forward"):
        raise KeyboardInterrupt

    assert Timeline(events=recorder.events(), stages=1).order() == "F0.0"


def test_a_start_forgets_what_has_begun():
    recorder = Recorder()
    with recorder.event(0, 0, "forward"):
        recorder.start()
    with recorder.event(0, 1, "forward"):
        pass

    assert Timeline(events=recorder.events(), stages=1).order() == "F0.1"


def test_threads_record_into_one_timeline():
    recorder, barrier = Recorder(), threading.Barrier(8)

    def work(stage):
        barrier.wait()
        for microbatch in range(200):
            with recorder.event(stage, microbatch, "forward"), recorder.event(stage, microbatch, "wait"):
                pass

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    own = Timeline(events=recorder.events(), stages=8)
    assert len(own.events) == 8 * 200 * 2
    assert own.order(7) == " ".join(f"F7.{microbatch}" for microbatch in range(200))


class FakeDevice:
    """A CUDA device whose clock stands 1000 ms ahead and moves when it is told to."""

    def __init__(self):
        self.now_ms = 1000.0
        self.waited = []

    def marks(self):
        fake = self

        class Mark:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self, stream):
                self.at_ms = fake.now_ms

            def synchronize(self):
                fake.waited.append(self.at_ms)

            def elapsed_time(self, later):
                return later.at_ms - self.at_ms

        return Mark


def test_events_on_a_stream_are_on_the_clock_of_the_others(monkeypatch):
    fake, seconds, synchronized = FakeDevice(), [50.0], []
    device = torch.device("cuda", 0)
    stream = type("Stream", (), {"device": device})()
    monkeypatch.setattr(recorder_module, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(accelerators, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    monkeypatch.setattr(torch.cuda, "Event", fake.marks())
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    recorder = Recorder()
    recorder.start()
    seconds[0] = 52.0
    # The device is waited for here, 2 s after the start; its events count from then.
    with recorder.event(0, 0, "forward", stream=stream):
        fake.now_ms += 500
    fake.now_ms += 250
    with recorder.event(0, 0, "backward", stream=stream):
        fake.now_ms += 125
    with recorder.event(0, 1, "copy"):
        seconds[0] = 53.0

    assert recorder.events() == (
        event("F0.0", 2.0, 2.5),
        event("B0.0", 2.75, 2.875),
        event("C0.1", 2.0, 3.0),
    )
    assert synchronized == [device]
    assert fake.waited == [1500.0, 1875.0]


def test_a_start_makes_devices_ready(monkeypatch):
    fake, synchronized = FakeDevice(), []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "Event", fake.marks())
    monkeypatch.setattr(torch.cuda, "synchronize", synchronized.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)

    recorder = Recorder()
    recorder.start([torch.device("cpu"), device])
    with recorder.event(0, 0, "forward", stream=type("Stream", (), {"device": device})()):
        pass

    assert synchronized == [device]
    assert Timeline(events=recorder.events(), stages=1).order() == "F0.0"


@pytest.mark.gpu
def test_events_on_two_streams_of_a_device():
    device = torch.device("cuda", 0)
    compute, copies = torch.cuda.Stream(device), torch.cuda.Stream(device)
    there = torch.empty(2**26, device=device)
    recorder = Recorder()
    recorder.start([device])
    with torch.cuda.stream(compute), recorder.event(0, 0, "forward", stream=compute):
        for _ in range(100):
            there.mul_(1.0)
    copies.wait_stream(compute)
    with torch.cuda.stream(copies), recorder.event(0, 0, "copy", stream=copies):
        there.clone()
    with recorder.event(0, 0, "wait"):
        torch.cuda.synchronize(device)

    events = {one.kind: one for one in recorder.events()}
    # The mark before the copy lies behind the wait for the other stream, so it is not taken before that is through.
    assert events["copy"].start_s >= events["forward"].end_s
    assert events["wait"].end_s >= events["copy"].end_s - 1e-3
    assert events["forward"].start_s >= -1e-3
