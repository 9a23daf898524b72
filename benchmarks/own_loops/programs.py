"""Trainings as people write them, each without a plan and within a budget; run as a program, prints what one takes."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from counted import Steps
from torch import Tensor, nn

import models
import torchremat

# The steps that are counted, after those that make the optimizer's state and what a plan looks at first.
COUNTED, BEFORE = 3, 2
# Budgets: what lives before a step and a share of the rest of the plain peak, and this much over all of it.
SHARE, PLAIN_AND = 0.7, 1.01
SMALL = False


@dataclass(frozen=True)
class Trained:
    """A training: its plan, if it has one, and its steps."""

    steps: Steps
    plan: torchremat.Plan | None = None

    @property
    def rises(self) -> list[int]:
        return self.steps.rises[BEFORE:]

    @property
    def planned(self) -> torchremat.Plan:
        assert self.plan is not None
        return self.plan


Budget = int | str | None
Train = Callable[[Budget], Trained]
Step = Callable[[nn.Module], Tensor]


def gpt() -> tuple[nn.Module, Step]:
    sizes = {"blocks": 2, "width": 32, "context": 32, "batch": 2} if SMALL else {}
    return models.gpt_step(**{"blocks": 6, "width": 128, "context": 128, "batch": 4, **sizes})


def own_loop(
    budget: Budget,
    optimizer_of: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    accumulate: int = 1,
    set_to_none: bool = True,
    clip: bool = False,
    amp: bool = False,
    **options: object,
) -> Trained:
    """A loop of one's own; `accumulate` backwards come before a step of the optimizer."""
    torch.manual_seed(0)
    model, plain_step = gpt()
    optimizer = optimizer_of(model.parameters(), lr=1e-3)

    def step(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return plain_step(model)

    accumulates = accumulate > 1 or not set_to_none
    plan = None
    if budget is not None:
        plan = torchremat.plan(model, step, budget=budget, optimizer=optimizer, accumulates=accumulates, **options)
        plan.apply(model)
    steps = Steps()
    for _ in range(BEFORE + COUNTED):
        with steps.one(model):
            for number in range(accumulate):
                if (
                    plan is not None
                    and accumulate > 1
                    and options.get("release_gradients")
                    and number == accumulate - 1
                ):
                    torchremat.last_microbatch(optimizer)
                step(model).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return Trained(steps, plan)


def trainer(budget: Budget) -> Trained:
    """transformers' Trainer, with a callback."""
    import transformers

    from torchremat.interop.transformers import MemoryBudget

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    width = 32 if SMALL else 128
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2 if SMALL else 6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (64, 16 if SMALL else 128))]
    steps, budgets = Steps(), [] if budget is None else [MemoryBudget(budget)]
    plans: list[torchremat.Plan | None] = []

    class Counting(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            steps.begin(model)

        def on_step_end(self, *_: object, **__: object) -> None:
            steps.end()
            plans.extend(one.plan for one in budgets)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=4, max_steps=BEFORE + COUNTED, use_cpu=True, report_to=[],
            save_strategy="no", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[Counting(), *budgets]).train()
    return Trained(steps, plans[-1] if plans else None)


def lightning(budget: Budget) -> Trained:
    """Lightning's Trainer, with a callback."""
    import lightning

    from torchremat.interop.lightning import MemoryBudget

    torch.manual_seed(0)
    net, step = gpt()
    steps, budgets = Steps(), [] if budget is None else [MemoryBudget(budget)]
    plans: list[torchremat.Plan | None] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return step(self.net)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Counting(lightning.Callback):
        def on_train_batch_start(self, *_: object) -> None:
            steps.begin(net)

        def on_train_batch_end(self, *_: object) -> None:
            steps.end()
            plans.extend(one.plan for one in budgets)

    trainer = lightning.Trainer(
        max_steps=BEFORE + COUNTED, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[Counting(), *budgets],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.zeros(64, 1), 4))
    return Trained(steps, plans[-1] if plans else None)


def accelerate(budget: Budget) -> Trained:
    """accelerate, with its `prepare`."""
    import accelerate

    from torchremat.interop import accelerate as ours

    torch.manual_seed(0)
    model, step = gpt()
    accelerator = accelerate.Accelerator(cpu=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    plans: list[torchremat.Plan] = []
    if budget is None:
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        # `prepare` logs what it has planned, and does not return it.
        fitted = ours.fitted

        def noted(*given: object) -> object:
            found = fitted(*given)
            plans.append(found.plan)
            return found

        with mock.patch.object(ours, "fitted", noted):
            model, optimizer = ours.prepare(accelerator, model, optimizer, step, budget=budget)
    steps = Steps()
    for _ in range(BEFORE + COUNTED):
        with steps.one(model):
            accelerator.backward(step(model))
            optimizer.step()
            optimizer.zero_grad()
    return Trained(steps, plans[0] if plans else None)


def data_parallel(budget: Budget) -> Trained:
    """DistributedDataParallel, in a group of one process."""
    torch.manual_seed(0)
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        net, step = gpt()
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(model.parameters())
        plan = None
        if budget is not None:
            plan = torchremat.plan(model, step, budget=budget, optimizer=optimizer)
            plan.apply(model)
        steps = Steps()
        for _ in range(BEFORE + COUNTED):
            with steps.one(model):
                step(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.distributed.destroy_process_group()
    return Trained(steps, plan)


PROGRAMS: dict[str, Train] = {
    "SGD": partial(own_loop, optimizer_of=torch.optim.SGD),
    "AdamW": own_loop,
    "accumulation of 4": partial(own_loop, accumulate=4),
    "gradients set to zero": partial(own_loop, set_to_none=False),
    "clipping": partial(own_loop, clip=True),
    "bfloat16 autocast": partial(own_loop, amp=True),
    "released gradients": partial(own_loop, release_gradients=True),
    "state on the disk": lambda budget: own_loop(budget, optimizer_store=torchremat.Disk()),
    "Trainer": trainer,
    "Lightning": lightning,
    "accelerate": accelerate,
    "DistributedDataParallel": data_parallel,
}


def row_of(name: str) -> dict[str, object]:
    """What a training takes plainly and within two budgets, in bytes over the same start: what lives before a step."""
    train = PROGRAMS[name]
    plain, whole = train(None), train("100%")
    rise = max(plain.rises)
    plain_bytes = _before_bytes(whole.planned, plain) + rise
    same, lower = train(int(PLAIN_AND * plain_bytes)), train(int(plain_bytes - (1 - SHARE) * rise))
    return {
        "name": name,
        "plain": plain_bytes,
        "plain_predicted": whole.planned.peak_bytes,
        "measured": _before_bytes(lower.planned, lower) + max(lower.rises),
        "predicted": lower.planned.peak_bytes,
        "recomputed": lower.planned.recomputed_calls,
        "recomputed_at_plain": same.planned.recomputed_calls,
    }


def _before_bytes(plan: torchremat.Plan, trained: Trained) -> int:
    """Bytes that live before a step: as a plan knows them, and with the gradients that were there."""
    known = sum(size for name, size in plan.before_bytes.items() if name != "gradients")
    return known + max(trained.steps.gradient_bytes[BEFORE:])


def main() -> None:
    global SMALL
    name, size = sys.argv[1:]
    SMALL = size == "small"
    torch.set_num_threads(1)
    print(json.dumps(row_of(name)))


if __name__ == "__main__":
    main()
