"""A thread for each device."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import torchremat
from probes.pipelines import spawn_workers
from probes.regions import active_session

META = torch.device("meta")
CPU = torch.device("cpu")


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate() if "torchremat.Pipe" in thread.name}


def test_a_device_has_one_thread():
    with spawn_workers([CPU, META, torch.device("cpu:0")]) as workers:
        ran = [worker.submit(threading.get_ident).result() for worker in workers]

    assert ran[0] == ran[2] != ran[1]
    assert threading.get_ident() not in ran


def test_threads_of_several_devices_work_at_the_same_time():
    both = threading.Barrier(2, timeout=120)

    with spawn_workers([CPU, META]) as workers:
        running = [worker.submit(both.wait) for worker in workers]

        assert sorted(one.result() for one in running) == [0, 1]


def test_no_thread_is_left():
    with spawn_workers([CPU, META]) as workers:
        for worker in workers:
            worker.submit(int).result()
        assert len(names()) == 2

    assert names() == set()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_no_thread_is_left_when_the_block_raises(error):
    done = []

    def slowly() -> None:
        time.sleep(0.01)
        done.append(1)

    def run() -> None:
        with spawn_workers([CPU]) as workers:
            for _ in range(10):
                workers[0].submit(slowly)
            raise error

    with pytest.raises(error):
        run()

    assert names() == set()
    assert len(done) == 10


def test_an_error_reaches_whoever_asks_and_the_thread_goes_on():
    with spawn_workers([CPU]) as workers:
        failed = workers[0].submit(lambda: int("no number"))
        with pytest.raises(ValueError, match="no number"):
            failed.result()

        assert workers[0].submit(lambda: 3).result() == 3


def test_a_session_is_handed_over():
    with spawn_workers([CPU]) as workers:
        assert workers[0].submit(active_session).result() is None
    with torchremat.session() as session, spawn_workers([CPU]) as workers:
        assert workers[0].submit(active_session).result() is session
