"""Limits that are real: of a process's address space, and of CUDA's allocator."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch

from planning.guarding.faults import differing, normed, state
from torchremat import guard

PROGRAM = """
import json, resource, sys
import torch
from planning.guarding.faults import differing, normed, state
from torchremat import guard, plan

torch.set_num_threads(1)

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
def test_a_process_without_address_space():
    # Each tensor in pages of its own, so that what is freed leaves the address space.
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
    program = [sys.executable, "-c", PROGRAM, "60"]

    done = subprocess.run(program, capture_output=True, text=True, timeout=100, env=settings)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
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
