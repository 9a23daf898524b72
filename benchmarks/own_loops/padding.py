"""transformers' Trainer with batches padded to their longest row; run as a program, prints what one training takes."""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
import transformers
from counted import live_and_peak, reset_peak
from torch import Tensor

from torchremat.interop.transformers import MemoryBudget

STEPS, BATCH = 50, 4
SHORTEST, LONGEST = 16, 160


def rows(number: int) -> list[dict[str, list[int]]]:
    """Rows of random lengths, in a log-uniform distribution as those of sentences."""
    random = torch.Generator().manual_seed(0)
    low, high = (torch.tensor(float(one)).log() for one in (SHORTEST, LONGEST))
    lengths = (low + (high - low) * torch.rand(number, generator=random)).exp().int().tolist()
    return [{"input_ids": torch.randint(1, 256, (length,), generator=random).tolist()} for length in lengths]


def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in batch])
    return {"input_ids": ids, "attention_mask": (ids != 0).int(), "labels": ids.masked_fill(ids == 0, -100)}


def trained(way: str, steps: int) -> dict[str, object]:
    """Train plainly, with `gradient_checkpointing`, or within a budget of as many bytes.

    Returns:
        The highest number of live bytes of the whole training and of each step, over what lived before except the
        parameters; the seconds of the training; a sum of the parameters after it.
    """
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    parameter_bytes = sum(one.nbytes for one in model.parameters())
    budgets = [MemoryBudget(int(way))] if way.isdecimal() else []
    peaks: list[int] = []

    class Counting(transformers.TrainerCallback):
        def on_step_begin(self, *_: object, **__: object) -> None:
            whole.append(live_and_peak()[1])
            reset_peak()

        def on_step_end(self, *_: object, **__: object) -> None:
            peaks.append(live_and_peak()[1])

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, per_device_train_batch_size=BATCH, max_steps=steps, use_cpu=True, report_to=[],
            gradient_checkpointing=way == "checkpointing", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, arguments, data_collator=padded, train_dataset=rows(BATCH * steps), callbacks=[Counting(), *budgets]
        )
        reset_peak()
        before = live_and_peak()[0] - parameter_bytes
        whole: list[int] = []
        start_s = time.perf_counter()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer.train()
        seconds = time.perf_counter() - start_s
    return {
        "way": way,
        "seconds": seconds,
        "peaks": [one - before for one in peaks],
        "highest": max(*whole, *peaks, live_and_peak()[1]) - before,
        "result": sum(one.double().sum().item() for one in model.parameters()),
        "warnings": [str(one.message)[:200] for one in said],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(trained(sys.argv[1], int(sys.argv[2]))))
