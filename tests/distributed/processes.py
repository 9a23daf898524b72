"""Cases that processes run side by side, over gloo on the CPU: two of them, if not said otherwise, for many cases.

A case is a function that all run. What it raises is gathered and told by name, so that one broken case does not hide
the others; when the processes no longer agree on what to do next, the rest is told as not run.
"""

import datetime
import faulthandler
import json
import os
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

from forked import CONTEXT
from probes.memory import heap_set_aside

WORLD = 2
_SKIPPED = "skipped: "
_PATIENCE = datetime.timedelta(seconds=180)


def case_tests(cases, world=WORLD):
    """Return a test for each case, to be named in a module; the first of them to run has processes run all cases."""
    told = {}

    @pytest.mark.parametrize("case", cases)
    def test(case, tmp_path_factory):
        if not told:
            told.update(dict.fromkeys(cases, "the processes were not run: see the first of these tests"))
            told.update(_run_all(cases, tmp_path_factory.mktemp("processes"), world))
        _judge(told[case])

    return test


def _run_all(cases, folder, world):
    """Return what each case raised, "" for those that passed, by name."""
    processes = [CONTEXT.Process(target=_work, args=(cases, rank, folder, world)) for rank in range(world)]
    for one in processes:
        one.start()
    for one in processes:
        one.join()
    told = {name: [] for name in cases}
    for rank in range(world):
        for line in (folder / f"{rank}").read_text().splitlines():
            name, words = json.loads(line)
            told[name].append(words if words.startswith(_SKIPPED) else words and f"process {rank}: {words}")
    ends = [one.exitcode for one in processes]
    crashes = [(folder / f"{rank}.crash").read_text() for rank in range(world)]
    return {
        name: "\n".join(filter(None, found)) if len(found) == world else _lost(found, ends, crashes)
        for name, found in told.items()
    }


def _judge(words):
    """Fail with what processes raised in a case, or skip it if they did."""
    if words and all(line.startswith(_SKIPPED) for line in words.splitlines()):
        pytest.skip(words.splitlines()[0].removeprefix(_SKIPPED))
    assert not words, words


def _lost(found, ends, crashes):
    return "\n".join([f"not run by all processes, which ended with {ends}", *filter(None, crashes), *found])


def _work(cases, rank, folder, world):
    crash = (folder / f"{rank}.crash").open("w")
    faulthandler.enable(crash)  # for one that dies in the middle of a case
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=_PATIENCE
    )
    # All that is imported stays out of collections, as in the tests' own processes.
    with heap_set_aside(), (folder / f"{rank}").open("w", buffering=1) as file:
        for name, case in cases.items():
            words = ""
            try:
                case()
            except pytest.skip.Exception as skipped:
                words = f"{_SKIPPED}{skipped}"
            except (Exception, pytest.fail.Exception):  # noqa: BLE001
                words = traceback.format_exc()
            file.write(json.dumps([name, words]) + "\n")
            agreed = [None] * world
            dist.all_gather_object(agreed, name)
            if agreed != [name] * world:
                raise RuntimeError(f"after {name} the processes do different things: {agreed}")
    dist.barrier()  # a process that ends while gloo lets go of a tensor is aborted
    dist.destroy_process_group()
