"""Processes that run one program after another, and are replaced when one of them hangs or dies."""

import faulthandler
import os
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from forked import CONTEXT
from probes.memory import heap_set_aside

# When a process has failed, the others may wait for it; they have as long as this to fail as well.
_GRACE_S = 15


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a task ended in all processes.

    Attributes:
        how: "done" if all returned, "failed" if all of them ended and some raised, "hang", or "abort".
        told: What each returned; None where none did.
        words: What each raised, or where it waits.
    """

    how: str
    told: list[object]
    words: list[str]


class Crew:
    """`world` processes in one group over gloo.

    Args:
        world: How many.
        patience_s: How long a task may take.
    """

    def __init__(self, world, patience_s=60):
        self.world, self.patience_s, self._hands = world, patience_s, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self._hands:
            one.pipe.send(None)
        for one in self._hands:
            one.process.join(10)
        self._dismissed()

    def run(self, task):
        """Run `task(rank)` in all processes."""
        if not self._hands:
            folder = Path(tempfile.mkdtemp(prefix="crew"))
            self._hands = [_Hand(rank, self.world, folder) for rank in range(self.world)]
        for one in self._hands:
            one.pipe.send(task)
        answers, until = {}, time.monotonic() + self.patience_s
        while len(answers) < self.world and (left_s := until - time.monotonic()) > 0:
            for pipe in wait([one.pipe for one in self._hands if one.rank not in answers], left_s):
                (hand,) = (one for one in self._hands if one.pipe is pipe)
                answers[hand.rank] = hand.answer()
                if answers[hand.rank][0] != "done":
                    until = min(until, time.monotonic() + _GRACE_S)
        found = self._ended(answers)
        if found.how != "done":
            self._dismissed()
        return found

    def _ended(self, answers):
        hows = [answers[rank][0] if rank in answers else "hang" for rank in range(self.world)]
        # Of what is to see, what came first explains the rest: who waits for one that died hangs.
        how = next(one for one in ("abort", "hang", "failed", "done") if one in hows)
        told = [answers[rank][1] if hows[rank] == "done" else None for rank in range(self.world)]
        words = [
            one.stack() if hows[one.rank] == "hang" else "" if hows[one.rank] == "done" else answers[one.rank][1]
            for one in self._hands
        ]
        return Ended(how=how, told=told, words=words)

    def _dismissed(self):
        for one in self._hands:
            one.process.kill()
            one.process.join()
            one.pipe.close()
        self._hands = []


class _Hand:
    """One process, the pipe to it, and the file where it writes its stack when it is asked."""

    def __init__(self, rank, world, folder):
        self.rank, self._stack = rank, folder / f"stack{rank}"
        self.pipe, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_work, args=(other, rank, world, folder, self._stack), daemon=True)
        self.process.start()
        other.close()

    def answer(self):
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            return "abort", f"ended with {self.process.exitcode}\n{self._stack.read_text()}"

    def stack(self):
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return self._stack.read_text()


def _work(pipe, rank, world, folder, stack):
    with stack.open("w") as file:
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        with heap_set_aside():
            while (task := pipe.recv()) is not None:
                try:
                    answer = "done", task(rank)
                except Exception:  # noqa: BLE001
                    answer = "failed", traceback.format_exc()
                pipe.send(answer)
        dist.barrier()  # a process that ends while gloo lets go of a tensor is aborted
        dist.destroy_process_group()
