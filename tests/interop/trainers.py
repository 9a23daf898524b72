"""Small trainings of each framework, and what is held of them."""

from dataclasses import dataclass, field

import torch
from lightning import pytorch as pl
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from logs import Count
from probes.regions import forward_under, is_rehearsing
from torchremat import is_recomputing

LOGGED = {"memory_budget_bytes", "memory_predicted_bytes", "memory_measured_bytes", "memory_slowdown"}


@dataclass
class Trained:
    """What came out of a training: parameters, the state of torch's generator, what was logged, and the rest.

    `recomputed` are the calls of innermost modules in a recompute, without those of planning.
    """

    model: nn.Module
    random: torch.Tensor
    recomputed: int
    logged: list = field(default_factory=list)
    others: list = field(default_factory=list)
    trainer: object = None

    def __eq__(self, other):
        mine, theirs = self.model.state_dict(), other.model.state_dict()
        return (
            mine.keys() == theirs.keys()
            and all(torch.equal(whole(one), whole(theirs[name])) for name, one in mine.items())
            and torch.equal(self.random, other.random)
            and self.others == other.others
        )

    @property
    def is_bare(self):
        return not any(forward_under(module) for module in self.model.modules())


def whole(tensor):
    """A tensor that may be sharded, from all processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def recomputes_of(model):
    """Count the calls of a model's innermost modules in a recompute from now on, but for those of planning."""
    count = Count()

    def noting(kind):
        def forward(self, *args, **kwargs):
            if is_recomputing() and not is_rehearsing():
                count.up()
            return kind.forward(self, *args, **kwargs)

        return type(kind.__name__, (kind,), {"forward": forward})

    for module in model.modules():
        if not list(module.children()):
            module.__class__ = noting(type(module))  # no hook, which would run before the region of a module
    return count


def split(rows):
    """The rows that are the budget's, and the others without what depends on the clock."""
    ours = [row for row in rows if row.keys() >= LOGGED]
    others = [
        {name: value for name, value in row.items() if not name.endswith(("runtime", "per_second"))}
        for row in rows
        if not row.keys() >= LOGGED
    ]
    return ours, others


class Tokens(Dataset):
    def __init__(self, *lengths, count=16):
        generator = torch.Generator().manual_seed(0)
        self.rows = [
            torch.randint(0, 64, (lengths[number * len(lengths) // count],), generator=generator)
            for number in range(count)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attention_dropout=0.1,
        )
    )


def loss_of(model, batch):
    return model(batch).square().mean()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), *(block() for _ in range(3)), nn.Linear(32, 1))


def block():
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))


class Small(nn.Module):
    """What a trainer of transformers takes as well, and is quick to plan."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.net = layers()
        self.head = nn.Linear(1, 64)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.net(self.embed(input_ids)))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Unshuffled(Trainer):
    """Rows as they come, the short ones first."""

    def _get_train_sampler(self, *_):
        return None


def train(folder, callbacks=(), *, model=None, data=None, kind=Trainer, resume=None, collator=None, **options):
    """Train by a trainer of transformers: three steps of four rows, if not said otherwise."""
    options = {"max_steps": 3, "save_strategy": "no", "logging_steps": 1, **options}
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    model = Small() if model is None else model
    recomputed = recomputes_of(model)
    trainer = kind(
        model,
        arguments,
        train_dataset=data or Tokens(64),
        eval_dataset=Tokens(96, count=8),
        callbacks=list(callbacks),
        data_collator=collator,
    )
    trainer.train(resume_from_checkpoint=resume)
    ours, others = split(trainer.state.log_history)
    return Trained(trainer.model, torch.get_rng_state(), recomputed.value, ours, others, trainer)


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = layers()
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        self.seen.append(batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", self.net(batch).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Rows(pl.loggers.logger.DummyLogger):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append({**metrics, "step": step})


def fit(folder, callbacks=(), *, module=None, sizes=(64,), checkpoint=None, **options):
    """Train by Lightning: four steps of four rows, with a validation of larger ones after two."""
    torch.manual_seed(1)
    logger = Rows()
    trainer = pl.Trainer(
        logger=logger,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        log_every_n_steps=1,
        accelerator="cpu",
        **{"max_steps": 4, "val_check_interval": 2, **options},
    )
    module = Lit() if module is None else module
    recomputed = recomputes_of(module)
    trained = [torch.randn(4, size, 16) for size in sizes for _ in range(8 // len(sizes))]
    loaders = (DataLoader(rows, batch_size=None) for rows in (trained, [torch.randn(8, 96, 16)]))
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    ours, others = split(logger.rows)
    return Trained(module, torch.get_rng_state(), recomputed.value, ours, others, trainer)
