"""Collectives with gradients, as people write them by hand.

What a function sends forward, and what it sends backward:

    Copied      nothing                              a sum
    Summed      a sum                                nothing
    Averaged    a sum                                a sum
    Gathered    all parts of dimension 1             the sums of the parts
    Scattered   the sums of the parts                all parts
    Rotated     a tensor to the next process         its gradient to the one before
    Attended    keys and values around the ring      these, and their gradients
    Exchanged   rows to all, as many as each is due  their gradients back
    Spread      a tensor of the first process        the sum of its gradients
    Scaled      nothing                              the sum of the squares of a gradient
    Sent        a tensor to one process              its gradient back
    Received    the other end of `Sent`
"""

import torch
import torch.distributed as dist
from torch.autograd import Function

# What torch called them before 2.13.
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def summed(tensor, group):
    """A new tensor with the sum."""
    tensor = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(tensor, group=group)
    return tensor


def gathered(tensor, group):
    """All parts of dimension 1."""
    part = tensor.transpose(0, 1).contiguous()
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    gather(whole, part, group=group)
    return whole.transpose(0, 1)


def scattered(tensor, group):
    """The sum of the own part of dimension 1."""
    whole = tensor.transpose(0, 1).contiguous()
    part = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
    scatter(part, whole, group=group)
    return part.transpose(0, 1)


def rotated(tensors, group, by=1):
    """The tensors of the process that is `by` places before this one in a ring."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return list(tensors)
    after, before = (dist.get_global_rank(group, (place + shift) % size) for shift in (by, -by))
    sent = [one.contiguous() for one in tensors]
    received = [torch.empty_like(one) for one in sent]
    sends = [dist.P2POp(dist.isend, one, after, group) for one in sent]
    receives = [dist.P2POp(dist.irecv, one, before, group) for one in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


def exchanged(rows, sent, received, group):
    """Rows of all processes: `sent` of the own ones to each, and `received` from each."""
    found = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


class Copied(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group), None


class Summed(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        return summed(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Averaged(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return summed(tensor, group) / dist.get_world_size(group)

    @staticmethod
    def backward(ctx, gradient):
        return summed(gradient, ctx.group) / dist.get_world_size(ctx.group), None


class Gathered(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return gathered(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group), None


class Scattered(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return scattered(tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None


class Rotated(Function):
    @staticmethod
    def forward(ctx, group, *tensors):
        ctx.group = group
        return tuple(one.clone() if dist.get_world_size(group) == 1 else one for one in rotated(tensors, group))

    @staticmethod
    def backward(ctx, *gradients):
        return None, *rotated(gradients, ctx.group, -1)


class Attended(Function):
    """Attention to the keys of all processes, of which each has those of its part of the sequence."""

    @staticmethod
    def forward(ctx, queries, keys, values, group):
        ctx.group, own = group, (keys, values)
        above = below = 0
        for turn in range(dist.get_world_size(group)):
            if turn:
                keys, values = rotated((keys, values), group)
            weights = (queries @ keys.mT).exp()
            above, below = above + weights @ values, below + weights.sum(-1, keepdim=True)
        found = above / below
        ctx.save_for_backward(queries, *own, found, below)
        return found

    @staticmethod
    def backward(ctx, gradient):
        queries, keys, values, found, below = ctx.saved_tensors
        of_queries = torch.zeros_like(queries)
        going = (keys, values, torch.zeros_like(keys), torch.zeros_like(values))
        along = (gradient * found).sum(-1, keepdim=True)
        for _ in range(dist.get_world_size(ctx.group)):
            keys, values, of_keys, of_values = going
            weights = (queries @ keys.mT).exp() / below
            of_scores = weights * (gradient @ values.mT - along)
            of_queries = of_queries + of_scores @ keys
            going = (keys, values, of_keys + of_scores.mT @ queries, of_values + weights.mT @ gradient)
            going = rotated(going, ctx.group)  # the last turn brings the gradients home
        return of_queries, *going[2:], None


class Exchanged(Function):
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        ctx.splits, ctx.group = (received, sent), group
        return exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx, gradient):
        return exchanged(gradient, *ctx.splits, ctx.group), None, None, None


class Spread(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group, tensor = group, tensor.clone()
        dist.broadcast(tensor, dist.get_global_rank(group, 0), group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.reduce(gradient, dist.get_global_rank(ctx.group, 0), group=ctx.group)
        return gradient if dist.get_rank(ctx.group) == 0 else torch.zeros_like(gradient), None


class Scaled(Function):
    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (1 + summed(gradient.square().sum(), ctx.group)), None


class Sent(Function):
    """Sends a tensor; its value is nothing, through which the backward comes."""

    @staticmethod
    def forward(ctx, tensor, to):
        ctx.to, ctx.like = to, tensor.shape
        dist.send(tensor.detach().contiguous(), to)
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        found = gradient.new_empty(ctx.like)
        dist.recv(found, ctx.to)
        return found, None


class Received(Function):
    """Receives a tensor like a given one, whose gradient is nothing."""

    @staticmethod
    def forward(ctx, like, of):
        ctx.of = of
        found = torch.empty_like(like)
        dist.recv(found, of)
        return found

    @staticmethod
    def backward(ctx, gradient):
        dist.send(gradient.contiguous(), ctx.of)
        return torch.zeros_like(gradient), None
