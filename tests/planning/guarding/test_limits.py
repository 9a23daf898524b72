"""Limits that are real: of a process's address space, and of CUDA's allocator."""

import gc
import json
import sys

import pytest
import torch

from forked import run_main
from planning.guarding.faults import differing, normed, state
from torchremat import guard

PROGRAM = """
import ctypes, json, resource, sys
import torch
from planning.guarding.faults import differing, normed, state
from torchremat import guard, plan

torch.set_num_threads(1)
# Each tensor in pages of its own, so that what is freed leaves the address space: M_MMAP_THRESHOLD of glibc.
assert ctypes.CDLL(None).mallopt(-3, 65536)

def step(model, x):
    return model(x).square().mean()

x = torch.randn(24_000, 32)  # 2.93 MiB in each of some thirty tensors
model = normed(blocks=4)
torch.manual_seed(9)
loss = step(model, x)
loss.backward()
expected = state(model, loss)
del loss
plan(model, lambda model: step(model, x[:64]), budget="100%")  # all that is loaded and started lies there from now on
model = normed(blocks=4)
torch.manual_seed(9)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]) * 2**20, -1))
with guard(model, step) as run:
    loss = run(x)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(json.dumps({"differs": differing(state(model, loss), expected), "attempts": [str(one) for one in run.attempts]}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the address space is read from /proc")
def test_a_process_without_address_space(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = run_main(program, "60", folder=tmp_path, timeout=100)

    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["differs"] == []
    assert found["attempts"]
    assert "2.93 MiB asked for; then planned for" in found["attempts"][0]


@pytest.mark.gpu
def test_an_allocator_with_a_limit():
    def step(model, x):
        return model(x).square().mean()

    device = torch.device("cuda")
    gc.collect()
    other_bytes = torch.cuda.memory_allocated()  # of tests before
    x = torch.randn(400_000, 32, device=device)  # 49 MiB in each of some thirty tensors
    model = normed(blocks=4).to(device)
    torch.manual_seed(9)
    torch.cuda.reset_peak_memory_stats()
    loss = step(model, x)
    loss.backward()
    expected = state(model, loss)
    del loss
    peak_bytes = torch.cuda.max_memory_allocated()
    model = normed(blocks=4).to(device)
    torch.manual_seed(9)
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    limit_bytes = other_bytes + 0.6 * (peak_bytes - other_bytes)
    torch.cuda.set_per_process_memory_fraction(limit_bytes / total_bytes)
    try:
        with guard(model, step) as run:
            loss = run(x)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)

    assert differing(state(model, loss), expected) == []
    assert run.attempts[0].held_bytes is not None
    assert run.attempts[0].then.startswith("planned for")
