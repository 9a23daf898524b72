"""Programs that torch parallelises: tensor parallelism, FSDP2, DistributedDataParallel, and these with collectives."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from distributed.communicating.functions import Averaged
from distributed.communicating.parts import (
    WIDTH,
    Block,
    Program,
    group_of,
    mean_square,
    mesh,
    stack,
    two_dimensions,
)
from distributed.communicating.programs import Attention, Split, alike, embedded, gathered_with_gradients
from torchremat import BudgetWarning

VOCABULARY = 32
PLAIN = {"up": ColwiseParallel(), "down": RowwiseParallel()}
OF_PARTS = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
}


def split(model, on, layout=None):
    """Let torch split the layers of each block along a dimension of a mesh."""
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, on, dict(layout or PLAIN))
    return model


def whole_world():
    return mesh(1, dist.get_world_size())["inner"]


def tensor_parallel():
    return Program(model=split(stack(), whole_world()), loss=mean_square, stream=0, optimizer=_plain)


def sequence_parallel():
    def loss(model, x):
        part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        return model(part).square().mean()

    return Program(model=split(stack(), whole_world(), OF_PARTS), loss=loss, stream=0, optimizer=_plain)


def _sharded(model, on):
    for block in model:
        fully_shard(block, mesh=on)
    return fully_shard(model, mesh=on)


def _split_and_sharded(outer):
    on = mesh(outer, dist.get_world_size() // outer)
    model = _sharded(split(stack(), on["inner"]), on["outer"])
    return Program(model=model, loss=mean_square, stream=on.get_local_rank("outer"), optimizer=_plain)


def tensor_parallel_and_sharded():
    return _split_and_sharded(dist.get_world_size() // 2)


def tensor_parallel_of_one_and_sharded():
    return _split_and_sharded(dist.get_world_size())


class Language(nn.Module):
    """Blocks between an embedding and a head whose output is split over the vocabulary."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(VOCABULARY, WIDTH), stack(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def _language():
    model, on = split(Language(), whole_world()), whole_world()
    last = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    return parallelize_module(model, on, {"head": last})


def _next_token(model, x):
    tokens = (x[..., 0] * 100).long().remainder(VOCABULARY)
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def loss_parallel_around():
    return Program(model=_language(), loss=_next_token, stream=0, within=loss_parallel, optimizer=_plain)


def replicated(model, group=None, **options):
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.02, **options)


def _of_replicas(model, **options):
    return Program(model=model, **{"warmed": int(dist.get_world_size() > 2), **options})


def halves():
    model = replicated(stack())
    model.register_comm_hook(None, fp16_compress_hook)
    return _of_replicas(model, loss=mean_square)


def low_ranks():
    """Gradients that are compressed already when the model is planned."""
    return _of_replicas(_compressed(), loss=mean_square, warmed=3)


def low_ranks_later():
    """Those that are compressed in the middle of the training: its steps need more then than the planned one."""
    return _of_replicas(_compressed(), loss=mean_square, known_for=(BudgetWarning,))


def _compressed():
    # In one bucket: with several, the hook itself sends in another order in each process.
    model = DistributedDataParallel(stack())
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=2)
    model.register_comm_hook(state, powerSGD_hook)
    return model


def local_gradients():
    """After the first step, gradients are averaged in half of the processes."""
    group, *_ = [one for one in _sides() if dist.get_rank(one) >= 0]
    model = replicated(stack())
    model.register_comm_hook(PostLocalSGDState(None, group, start_localSGD_iter=1), post_localSGD_hook)
    return _of_replicas(model, loss=mean_square)


def _sides():
    half = dist.get_world_size() // 2
    return [group_of(*range(half)), group_of(*range(half, 2 * half))]


def replicas_of_split_layers():
    """Replicas along the outer dimension, and layers split by hand along the inner one."""
    on = two_dimensions()
    model = replicated(stack(lambda: Split(on.get_group("inner"))), on.get_group("outer"))
    return _of_replicas(model, loss=mean_square, stream=on.get_local_rank("outer"))


def shards_of_rings():
    """FSDP2 along the outer dimension, and rings along the inner one."""
    on = two_dimensions()
    return Program(model=_sharded(stack(lambda: Attention(on.get_group("inner"))), on["outer"]), loss=mean_square)


def shards_and_a_contrastive_loss():
    def loss(model, x):
        ours, others = embedded(model, x), embedded(model, x.flip(1).sin())
        return alike(ours, torch.cat(gathered_with_gradients(others)))

    return Program(model=_sharded(stack(), whole_world()), loss=loss)


def replicas_and_a_reduced_loss():
    def loss(model, x):
        return Averaged.apply(model(x).square().mean(), dist.group.WORLD)

    return _of_replicas(replicated(stack()), loss=loss)


def replicas_with_synced_statistics():
    model = nn.Sequential(*(nn.Sequential(Block(), _Turned(WIDTH)) for _ in range(4)))
    return _of_replicas(replicated(model), loss=mean_square)


class _Turned(nn.Module):
    """Batch normalisation by the statistics of all, by hand: torch's own layer needs GPUs."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        mean, square = Averaged.apply(torch.stack([x.mean((0, 1)), x.square().mean((0, 1))]), dist.group.WORLD)
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt() * self.weight


def _plain(parameters):
    """One parameter at a time, as some are DTensors and some are not."""
    return torch.optim.AdamW(parameters, foreach=False)


PROGRAMS = {
    one.__name__: one
    for one in (
        tensor_parallel,
        sequence_parallel,
        tensor_parallel_and_sharded,
        tensor_parallel_of_one_and_sharded,
        loss_parallel_around,
        halves,
        low_ranks,
        low_ranks_later,
        local_gradients,
        replicas_of_split_layers,
        shards_of_rings,
        shards_and_a_contrastive_loss,
        replicas_and_a_reduced_loss,
        replicas_with_synced_statistics,
    )
}
