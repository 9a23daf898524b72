"""Programs that communicate by their own collectives: in modules, in functions, in the loss, in hooks of gradients."""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn
from torch.distributed.nn.functional import all_gather as gathered_with_gradients
from torch.nn import functional

from distributed.communicating.functions import (
    Attended,
    Averaged,
    Copied,
    Exchanged,
    Gathered,
    Received,
    Rotated,
    Scaled,
    Scattered,
    Sent,
    Spread,
    Summed,
    gather,
)
from distributed.communicating.parts import (
    BLOCKS,
    WIDTH,
    Block,
    Program,
    Working,
    mean_square,
    pairs,
    reduced_by_hooks,
    stack,
    two_dimensions,
)
from torchremat import RepeatWarning, ShapeWarning


def world():
    return dist.group.WORLD


class Attention(Block):
    """A block that attends to the sequence of a group, and the parameters of attention beside the usual ones."""

    def __init__(self, group=None):
        super().__init__()
        self.inputs, self.group = nn.Linear(WIDTH, 3 * WIDTH), group or world()

    def mixed(self, x):
        return super().mixed(self.attended(*(0.3 * self.inputs(x)).chunk(3, -1)))

    def attended(self, queries, keys, values):
        return Attended.apply(queries, keys, values, self.group)


def ring_attention():
    return Program(model=reduced_by_hooks(stack(Attention), world()), loss=mean_square)


class TurningAttention(Attention):
    """The same, with autograd's own backward of all but the exchange."""

    def attended(self, queries, keys, values):
        above = below = 0
        for turn in range(dist.get_world_size(self.group)):
            if turn:
                keys, values = Rotated.apply(self.group, keys, values)
            weights = (queries @ keys.mT).exp()
            above, below = above + weights @ values, below + weights.sum(-1, keepdim=True)
        return above / below


def ring_exchange():
    return Program(model=reduced_by_hooks(stack(TurningAttention), world()), loss=mean_square)


def ring_in_each_replica():
    """The sequence is spread over the inner dimension, and gradients are averaged over the outer one as well."""
    on = two_dimensions()
    model = stack(lambda: Attention(on.get_group("inner")))
    return Program(
        model=reduced_by_hooks(reduced_by_hooks(model, on.get_group("inner")), on.get_group("outer")), loss=mean_square
    )


class Split(Block):
    """Half of the usual layer in each of two processes."""

    def __init__(self, group):
        super().__init__(4 * WIDTH // dist.get_world_size(group))
        self.group, self.down.bias = group, None
        self.drop = nn.Dropout(0.1)

    def mixed(self, x):
        return self.drop(Summed.apply(super().mixed(Copied.apply(x, self.group)), self.group))


def layers_split_by_hand():
    return Program(model=stack(lambda: Split(world())), loss=mean_square, stream=0)


class SplitSequence(Split):
    """The same between parts of the sequence."""

    def mixed(self, x):
        return self.drop(Scattered.apply(Block.mixed(self, Gathered.apply(x, self.group)), self.group))


def sequence_split_by_hand():
    def loss(model, x):
        part = x.chunk(dist.get_world_size(), 1)[dist.get_rank()]
        return model(part).square().mean()

    return Program(model=stack(lambda: SplitSequence(world())), loss=loss, stream=0)


class Experts(Block):
    """Each process has one, and sends each row of its own to the one whose router's output is the highest."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())

    def mixed(self, x):
        rows = x.flatten(0, 1)
        chances, choice = self.router(rows).softmax(-1).max(-1)
        order = choice.argsort(stable=True)
        sent = choice.bincount(minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent, received = sent.tolist(), received.tolist()
        found = self.exchanged(super().mixed(self.exchanged(rows[order], sent, received)), received, sent)
        return (found[order.argsort()] * chances[:, None]).view_as(x)

    def exchanged(self, rows, sent, received):
        return Exchanged.apply(rows, sent, received, world())


def experts():
    return Program(model=stack(Experts, Block), loss=mean_square, known_for=(ShapeWarning,))


class FunctionalExperts(Experts):
    def exchanged(self, rows, sent, received):
        return functional_collectives.all_to_all_single_autograd(rows.contiguous(), received, sent, world())


def experts_by_functional_collectives():
    return Program(model=stack(FunctionalExperts, Block), loss=mean_square, known_for=(ShapeWarning,))


def alike(ours, theirs):
    """The loss of pairs, given those of all processes."""
    first = ours.shape[0] * dist.get_rank()
    return functional.cross_entropy(4 * ours @ theirs.T, first + torch.arange(ours.shape[0]))


def embedded(model, x):
    return functional.normalize(model(x).mean(1), dim=-1)


def contrastive():
    def loss(model, x):
        ours, others = embedded(model, x), embedded(model, x.flip(1).sin())
        return alike(ours, torch.cat(gathered_with_gradients(others)))

    return Program(model=reduced_by_hooks(stack(), world()), loss=loss)


def contrastive_without_gradients_of_others():
    def loss(model, x):
        ours, others = embedded(model, x), embedded(model, x.flip(1).sin())
        theirs = [torch.empty_like(others) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, others.detach())
        theirs[dist.get_rank()] = others
        return alike(ours, torch.cat(theirs))

    return Program(model=reduced_by_hooks(stack(), world()), loss=loss)


def averaged_by_hooks():
    return Program(model=reduced_by_hooks(stack(), world()), loss=mean_square)


class Slowed(Block):
    """Gradients of all processes are made smaller by how large they are together."""

    def mixed(self, x):
        return super().mixed(Scaled.apply(x, world()))


def communicating_in_the_backward_alone():
    return Program(model=stack(Slowed, Block), loss=mean_square)


class Normed(Block):
    """Normed by the statistics of all processes, which it keeps in a buffer as well."""

    def __init__(self):
        super().__init__()
        self.register_buffer("past", torch.zeros(WIDTH))

    def mixed(self, x):
        mean = Averaged.apply(x.mean((0, 1)), world())
        variance = Averaged.apply((x - mean).square().mean((0, 1)), world())
        with torch.no_grad():
            self.past.lerp_(mean, 0.1)
        return super().mixed((x - mean) * (variance + 1e-5).rsqrt())


def statistics_of_all():
    return Program(model=reduced_by_hooks(stack(Normed, Block), world()), loss=mean_square)


class Neighbouring(Block):
    """Averages with the neighbour on each side: no group has all processes, and who plans together are all of them."""

    def __init__(self):
        super().__init__()
        self.pairs = pairs()

    def mixed(self, x):
        for pair in self.pairs:
            x = Averaged.apply(x, pair)
        return super().mixed(x)


def overlapping_groups():
    # Who is in two groups runs more operators than others.
    return Program(model=stack(Neighbouring, Block), loss=mean_square, known_for=(RepeatWarning,))


class Waiting(Block):
    """A sum that is on its way while the block computes."""

    def mixed(self, x):
        total = x.detach().mean((0, 1))
        work = dist.all_reduce(total, async_op=True)
        x = super().mixed(x)
        work.wait()
        return x - 0.1 * total


def waited_for_later():
    return Program(model=stack(Waiting, Block), loss=mean_square)


class Handed(nn.Module):
    """A block that waits for the sum of the one before, and begins one for the next.

    What it returns has other values when it is done, so it is not recomputed as a whole.
    """

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, given):
        x, total, work = given
        x = self.block(x)
        if work is not None:
            work.wait()
            x = x - 0.1 * total
        total = x.detach().mean((0, 1))
        return x, total, dist.all_reduce(total, async_op=True)


def waited_for_in_the_next_module():
    def loss(model, x):
        x, total, work = model((x, None, None))
        work.wait()
        return (x - total).square().mean()

    return Program(model=nn.Sequential(*(Handed() for _ in range(BLOCKS))), loss=loss, known_for=(RepeatWarning,))


class Prompted(Block):
    """A parameter of the first process is used by all."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(WIDTH))

    def mixed(self, x):
        return super().mixed(x + Spread.apply(self.prompt, world()))


def broadcast():
    return Program(model=stack(Prompted, Block), loss=mean_square)


class Together(Block):
    """Several sums in one call."""

    def mixed(self, x):
        size = dist.get_world_size()
        first, second = functional_collectives.all_reduce_coalesced([x.mean(0), x.mean(1)], "sum", world())
        return super().mixed(x + first / size + second[:, None] / size)


def coalesced():
    return Program(model=stack(Together, Block), loss=mean_square)


class Managed(Block):
    """The same by a context, without gradients."""

    def mixed(self, x):
        first, second = x.detach().mean(0), x.detach().mean(1)
        with dist._coalescing_manager(async_ops=True) as begun:
            dist.all_reduce(first)
            dist.all_reduce(second)
        x = super().mixed(x)
        begun.wait()
        return x + first + second[:, None]


def coalesced_in_a_context():
    return Program(model=stack(Managed, Block), loss=mean_square)


def objects():
    """The loss is divided by a number that is known after all have told theirs."""

    def loss(model, x):
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, {"rows": x.shape[0], "rank": dist.get_rank()})
        return model(x).square().sum() / sum(one["rows"] for one in told)

    return Program(model=reduced_by_hooks(stack(), world()), loss=loss)


class OnMesh(Block):
    """Functional collectives along a dimension of a mesh."""

    def __init__(self):
        super().__init__()
        self.mesh = two_dimensions()

    def mixed(self, x):
        whole = functional_collectives.all_gather_tensor_autograd(x.contiguous(), 1, self.mesh["inner"])
        part = functional_collectives.reduce_scatter_tensor_autograd(super().mixed(whole), "sum", 1, self.mesh["inner"])
        return part / 2


def mesh_by_hand():
    return Program(model=reduced_by_hooks(stack(OnMesh, Block), two_dimensions().get_group("outer")), loss=mean_square)


class Entry(Working):
    """Takes the output of the process before."""

    def forward(self, x):
        self.work()
        rank = dist.get_rank()
        return x if rank == 0 else Received.apply(x.clone().requires_grad_(), rank - 1)


class Exit(Working):
    """Gives the output to the process after."""

    def forward(self, x):
        self.work()
        rank = dist.get_rank()
        return x.square().mean() if rank + 1 == dist.get_world_size() else Sent.apply(x, rank + 1)


def stages_by_hand():
    def loss(model, x):
        return model(x)

    return Program(model=nn.Sequential(Entry(), *stack(), Exit()), loss=loss)


class Passing(Block):
    """The first process gives something to the second between two layers, and goes on without it.

    What the layers need is there before it sends, and after it has received.
    """

    def mixed(self, x):
        x = functional.gelu(self.up(x))
        given, rank = x.detach().mean((0, 1)), dist.get_rank()
        if rank == 0:
            dist.send(given, 1)
        elif rank == 1:
            dist.recv(given, 0)
            x = x + given
        return self.down(x)


def passed_on():
    model = reduced_by_hooks(stack(Passing, Block), world())
    return Program(model=model, loss=mean_square, known_for=(RepeatWarning,))


def collectives_of_the_step():
    """Its own code gathers the batch, and sums the loss."""

    def loss(model, x):
        whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
        gather(whole, x)
        return Averaged.apply(model(x + whole.mean(0)).square().mean(), world())

    return Program(model=stack(), loss=loss)


PROGRAMS = {
    one.__name__: one
    for one in (
        ring_attention,
        ring_exchange,
        ring_in_each_replica,
        layers_split_by_hand,
        sequence_split_by_hand,
        experts,
        experts_by_functional_collectives,
        contrastive,
        contrastive_without_gradients_of_others,
        averaged_by_hooks,
        communicating_in_the_backward_alone,
        statistics_of_all,
        overlapping_groups,
        waited_for_later,
        waited_for_in_the_next_module,
        broadcast,
        coalesced,
        coalesced_in_a_context,
        objects,
        mesh_by_hand,
        stages_by_hand,
        passed_on,
        collectives_of_the_step,
    )
}

# Their processes do not run the same, so that there may be no plan for all of them.
MAY_BE_REFUSED = ("stages_by_hand",)
