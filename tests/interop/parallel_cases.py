"""Trainings of two processes with a budget, beside the same without."""

import os
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard

import torchremat
from interop.trainers import Lit, Small, Tokens, Unshuffled, fit, layers, llama, train, whole
from torchremat.interop.training import BudgetRequest, Words
from torchremat.interop.training_budget import Budgeted, Training
from torchremat.planning.plan_options import PlanOptions

WORDS = Words(owner="", step="", taker="", smaller="")
QUICK = {"cost": "flops", "operators": False}


@contextmanager
def launched():
    """What a launcher says to each process, and no more warnings of others than it takes."""
    rank, world = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "TORCHELASTIC_RUN_ID": 1, "ACCELERATE_USE_CPU": "true"}
    os.environ.update({name: str(value) for name, value in told.items()})
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", category=torchremat.ShapeWarning)
        warnings.filterwarnings("error", category=torchremat.OrderWarning)
        yield Path(folder)
    for name in told:
        os.environ.pop(name, None)


@contextmanager
def with_accelerators():
    """Let accelerate believe that each process has a GPU: it shards there alone, and replicates on CPUs in silence."""
    prepare = PartialState._prepare_backend
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    try:
        yield
    finally:
        PartialState._prepare_backend = prepare
        del os.environ["ACCELERATE_TORCH_DEVICE"]


def check(ours, plain):
    assert ours == plain
    assert ours.is_bare
    assert plain.recomputed == 0 < ours.recomputed
    (row,) = ours.logged
    check_row(row)


def check_row(row):
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    assert row["memory_slowdown"] > 1


def transformers_trainer():
    options = {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False, "bf16": True}
    with launched() as folder:
        plain = train(folder, **options)
        ours = train(folder, [torchremat.interop.transformers.MemoryBudget("80%", **QUICK)], **options)

        assert type(ours.trainer.model_wrapped).__name__ == "DistributedDataParallel"
        check(ours, plain)


def lightning_trainer():
    options = {"accumulate_grad_batches": 2, "devices": 2}
    with launched() as folder:
        plain = fit(folder, strategy=DDPStrategy(process_group_backend="gloo"), **options)
        callback = torchremat.interop.lightning.MemoryBudget("80%", **QUICK)
        ours = fit(folder, [callback], strategy=DDPStrategy(process_group_backend="gloo"), **options)

        check(ours, plain)


def transformers_trainer_with_fsdp2():
    wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    sharding = {"fsdp": True, "fsdp_config": wrapped}
    with launched() as folder, with_accelerators():
        for number, options in enumerate(({}, {"gradient_accumulation_steps": 2, "bf16": True})):
            plain = train(folder / f"plain{number}", model=llama(), **sharding, **options)
            callback = torchremat.interop.transformers.MemoryBudget("80%", **QUICK)
            ours = train(folder / f"ours{number}", [callback], model=llama(), **sharding, **options)

            assert isinstance(ours.trainer.model_wrapped, FSDPModule)
            check(ours, plain)


class Sharded(Lit):
    def configure_model(self):
        for block in self.net:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def lightning_trainer_with_fsdp2():
    def strategy():
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")

    with launched() as folder:
        for options in ({"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}):
            plain = fit(folder, module=Sharded(), strategy=strategy(), devices=2, **options)
            callback = torchremat.interop.lightning.MemoryBudget("80%", **QUICK)
            ours = fit(folder, [callback], module=Sharded(), strategy=strategy(), devices=2, **options)

            assert isinstance(ours.model.net, FSDPModule)
            check(ours, plain)


def with_accelerate():
    def trained(size):
        accelerator = accelerate.Accelerator(cpu=True)
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(dist.get_rank())
        batches = [torch.randn(4, 64, 16) for _ in range(3)]
        if size is None:
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            model, optimizer = torchremat.interop.accelerate.prepare(
                accelerator, model, optimizer, lambda model: model(batches[0]).square().mean(), budget=size, **QUICK
            )
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
        return model

    with launched():
        plain, ours = trained(None), trained("80%")

        assert all(map(torch.equal, ours.parameters(), plain.parameters()))
        assert any("forward" in vars(module) for module in ours.modules())


def sharded_by_fsdp2():
    logged = []

    def trained(size):
        model = Small()
        for block in model.net:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(dist.get_rank())
        batches = [torch.randint(0, 64, (4, 64)) for _ in range(3)]
        budgeted = None
        if size is not None:
            training = Training(model=model, optimizer=optimizer, log=logged.append, words=WORDS)
            budgeted = Budgeted(BudgetRequest(budget=size, options=PlanOptions(**QUICK)), training)

        def loss_of(model, batch):
            return model(batch, batch)["loss"]

        for batch in batches:
            optimizer.zero_grad()
            if budgeted is None:
                loss_of(model, batch).backward()
            else:
                with budgeted.step(loss_of, batch):
                    loss_of(model, batch).backward()
            optimizer.step()
        return list(map(whole, model.parameters()))

    with launched():
        plain, ours = trained(None), trained("80%")

    assert all(map(torch.equal, ours, plain))
    (row,) = logged
    check_row(row)


def check_shapes(ours, plain):
    """One process decides for both, and logs."""
    assert ours == plain
    assert ours.is_bare
    assert plain.recomputed == 0 < ours.recomputed
    assert len(ours.logged) == (dist.get_rank() == 0)
    for row in ours.logged:
        check_row(row)


def transformers_trainer_with_shapes():
    # Of the other lengths that each process has, the longest counts.
    options = {"kind": Unshuffled, "max_steps": 3, "ddp_find_unused_parameters": False}
    with launched() as folder:
        data = Tokens(24, 64, 64, 40, 40, 64, count=24)
        plain = train(folder, data=data, **options)
        callback = torchremat.interop.transformers.MemoryBudget("1.2MB", shapes=True, **QUICK)
        ours = train(folder, [callback], data=data, **options)

        check_shapes(ours, plain)


def lightning_trainer_with_shapes():
    with launched() as folder:
        options = {"sizes": (32, 128, 64, 96), "devices": 2}
        plain = fit(folder, strategy=DDPStrategy(process_group_backend="gloo"), **options)
        # A hundred kilobytes more than needed: the recorder of the CPU does not see that the last gradients are freed.
        callback = torchremat.interop.lightning.MemoryBudget("1.6MB", shapes=True, **QUICK)
        ours = fit(folder, [callback], strategy=DDPStrategy(process_group_backend="gloo"), **options)

        check_shapes(ours, plain)


CASES = {
    "transformers": transformers_trainer,
    "lightning": lightning_trainer,
    "transformers with shapes": transformers_trainer_with_shapes,
    "lightning with shapes": lightning_trainer_with_shapes,
    "transformers with fsdp2": transformers_trainer_with_fsdp2,
    "lightning with fsdp2": lightning_trainer_with_fsdp2,
    "accelerate": with_accelerate,
    "fsdp2": sharded_by_fsdp2,
}
