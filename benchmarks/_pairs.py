"""Two processes on one machine that run a schedule of torch.distributed.pipelining, over gloo."""

from __future__ import annotations

import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

WORLD = 2
_PATIENCE = datetime.timedelta(seconds=120)

Work = Callable[[bool], dict[str, object]]


def in_pair(work: Work, smoke: bool) -> list[dict[str, object]]:
    """Return what `work`, a function of a module, returns in each of the two processes."""
    # A process that has computed nothing yet can be forked, and need not import torch twice more: four seconds each.
    context = multiprocessing.get_context("fork" if smoke else "spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=_run, args=(work, smoke, rank, folder)) for rank in range(WORLD)]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        if any(one.exitcode for one in processes):
            raise RuntimeError(f"the processes ended with {[one.exitcode for one in processes]}")
        return [json.loads((Path(folder) / f"{rank}").read_text()) for rank in range(WORLD)]


def alone(work: Work) -> dict[str, object]:
    """Return what a smoke run of `work` returns in a group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        _join(folder, 0, 1)
        found = work(True)
        dist.destroy_process_group()
    return found


def _run(work: Work, smoke: bool, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    _join(folder, rank, WORLD)
    found = work(smoke)
    (Path(folder) / f"{rank}").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _join(folder: str, rank: int, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=_PATIENCE)


def seconds_in_turn(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Run each step once per round in both processes, and return how long it took from the start of both to the end."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            step()
            dist.barrier()
            if turn:  # the round before them is not counted
                seconds[name].append(time.perf_counter() - start_s)
    return seconds
