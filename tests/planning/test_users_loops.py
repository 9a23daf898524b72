"""Budgets are those of the user's own loop: peaks of whole loops, by the allocator's events, against predictions."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from probes.memory import record_allocations
from torchremat import plan

X = torch.randn(256, 128)


@dataclass(frozen=True)
class Looped:
    """A loop: its optimizer, how it drops gradients, and what its plan is told."""

    optimizer: type = AdamW
    lr: float = 1e-3
    backwards: int = 1
    set_to_none: bool = True
    drops_late: bool = False
    clips: bool = False
    autocast: bool = False
    options: tuple[tuple[str, object], ...] = ()

    @property
    def accumulates(self):
        return self.backwards > 1 or not self.set_to_none or self.drops_late

    def step(self, model):
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext():
            return model(X).square().mean()

    def train(self, model, optimizer, steps):
        for _ in range(steps):
            if not self.drops_late:
                optimizer.zero_grad(set_to_none=self.set_to_none)
            for _ in range(self.backwards):
                loss = self.step(model)
                if self.drops_late:
                    optimizer.zero_grad(set_to_none=self.set_to_none)
                loss.backward()
                del loss
            if self.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


LOOPS = {
    "SGD": Looped(optimizer=SGD),
    "AdamW": Looped(),
    "accumulating": Looped(backwards=4),
    "set to zero": Looped(set_to_none=False),
    "dropped after the forward": Looped(drops_late=True),
    "clipping": Looped(clips=True),
    "autocast": Looped(autocast=True),
    "released": Looped(options=(("release_gradients", True),)),
}


def made(loop):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())))
    return model, loop.optimizer(model.parameters(), lr=loop.lr)


def peak_of(loop, model, optimizer):
    """The peak of three steps of a loop, after one that makes the optimizer's state."""
    loop.train(model, optimizer, 1)
    state = (one for own in optimizer.state.values() for one in own.values())
    held = [X, *model.parameters(), *(one for one in state if isinstance(one, torch.Tensor))]
    if loop.set_to_none:  # else what is freed in the first step is no event of it
        optimizer.zero_grad()
    else:
        held += [one.grad for one in model.parameters()]
    before_bytes = sum(one.nbytes for one in held)
    del held
    with record_allocations(torch.device("cpu")) as recorder:
        loop.train(model, optimizer, 3)
    return before_bytes + recorder.trace.peak_bytes


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_peaks_where_its_plan_says(name):
    loop = LOOPS[name]
    plain = peak_of(Looped(**{**vars(loop), "options": ()}), *made(loop))

    # What is dropped between forward and backward counts as if it stayed.
    for budget in ("min",) if loop.drops_late else (int(1.01 * plain), "min"):
        model, optimizer = made(loop)
        options = {"optimizer": optimizer, "accumulates": loop.accumulates, **dict(loop.options)}
        found = plan(model, loop.step, budget=budget, cost="flops", **options)
        found.apply(model)
        try:
            peak = peak_of(loop, model, optimizer)
        finally:
            found.remove(model)

        assert peak <= found.peak_bytes
        assert loop.drops_late or peak >= 0.999 * found.peak_bytes
        assert (found.recomputed_calls > 0) == (budget == "min")
        # A planner that knows only the step with gradients released has a bound on the plain one.
        assert plain <= found.plain_peak_bytes
        assert loop.drops_late or loop.options or found.plain_peak_bytes <= 1.001 * plain
