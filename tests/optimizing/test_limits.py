"""Plans in a process whose address space is too small for a step that does not release its gradients."""

import json
import sys

import pytest

from forked import run_main

PROGRAM = """
import ctypes, json, os, resource, sys
import torch
from torch import nn
import torchremat
from torchremat.errors import TorchrematError

torch.set_num_threads(1)
# Each tensor in pages of its own, so that what is freed leaves the address space: M_MMAP_THRESHOLD of glibc.
assert ctypes.CDLL(None).mallopt(-3, 65536)

# Each case is a process of its own, forked before autograd has run.
for budget, releases in json.loads(sys.argv[1]):
    if os.fork() == 0:
        break
    assert os.wait()[1] == 0
else:
    sys.exit()

def made(blocks, width):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)))
    return model, torch.optim.SGD(model.parameters(), 1e-3)

def train(model, optimizer, step, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        step(model).backward()
        optimizer.step()

def planned(model, optimizer, step, budget):
    options = {"release_gradients": "auto"} if releases == "auto" else {}
    plan = torchremat.plan(model, step, budget=budget, optimizer=optimizer, cost="flops", **options)
    plan.apply(model)
    return plan

x, y = torch.randn(64, 512), torch.randn(4, 32)
step = lambda model: model(x).square().mean()
model, optimizer = made(16, 512)  # 16 MiB of parameters, 1 MiB each
train(model, optimizer, step, 3)
expected = [one.detach().clone() for one in model.parameters()]
model, optimizer = made(2, 32)
few = lambda model: model(y).square().mean()
planned(model, optimizer, few, "min")  # all that is loaded and started lies there from now on
train(model, optimizer, few, 1)
model, optimizer = made(16, 512)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + 24 * 2**20, -1))
try:
    plan = planned(model, optimizer, step, budget)
    train(model, optimizer, step, 3)
    said = str(plan.stepping)
except (RuntimeError, MemoryError, TorchrematError) as error:
    said = f"{type(error).__name__}: {error}"
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
equal = all(map(torch.equal, model.parameters(), expected))
print(json.dumps({"said": said, "equal": equal}))
"""


BUDGETS = ["min", "100%", 24 * 2**20]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the address space is read from /proc")
def test_where_not_even_a_profile_of_the_plain_step_fits_gradients_are_released(tmp_path):
    cases = [*((budget, "auto") for budget in BUDGETS), ("min", "no")]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = run_main(program, json.dumps(cases), folder=tmp_path, timeout=300)

    assert done.code == 0, done.err
    *released, without_leave = map(json.loads, done.out.splitlines())
    assert released == [{"said": "gradients released", "equal": True}] * len(BUDGETS)
    assert "can't allocate memory" in without_leave["said"]
