"""A process that dies in the middle of a step."""

import datetime
import os
import warnings

import pytest
import torch
import torch.distributed as dist

from forked import CONTEXT
from pipeline.attaching.cases import wrapped
from pipeline.attaching.models import Program
from torchremat.pipeline import attach

DIES = 7


def _work(rank, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )
    program = Program("Schedule1F1B", wrapped)
    with attach(program.schedule) as attached:
        program.step()
        if rank == 1:
            program.modules[0].layers[0].register_full_backward_hook(lambda *_: os._exit(DIES))
        with pytest.raises(RuntimeError) as caught:
            program.step()
        assert attached.open_sessions == 0
    (folder / "error").write_text(str(caught.value))
    os._exit(0)  # torch waits for the other one otherwise


def test_the_others_end_with_an_error_and_without_sessions(tmp_path):
    processes = [CONTEXT.Process(target=_work, args=(rank, tmp_path)) for rank in range(2)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(120)

    assert [one.exitcode for one in processes] == [0, DIES]
    assert (tmp_path / "error").read_text()  # the words of the transfer that failed
