"""DistributedDataParallel, with regions inside and around."""

from functools import partial

from torch.nn.parallel import DistributedDataParallel

from distributed.comparing import compare, held
from distributed.models import looped, net, partly_frozen, siamese, some, tied
from probes.regions import CallDecision, RegionPlace, Scope, Settings, set_forward
from torchremat import checkpoint, wrap

parallel = DistributedDataParallel


def wrapped(model):
    return wrap(model, "layers.*")


def wrapped_inside(model):
    wrap(model.module, "layers.*")
    return model


def nested(model):
    return wrap(wrapped(model), "layers.*.down")


def checkpoints(model):
    model.call = checkpoint
    return model


def run_of_calls(model):
    """The blocks as one region, with glue between them in the parent."""
    place = RegionPlace(3, "layers.0 .. layers.2")
    set_forward(model, "", None, Scope({(f"layers.{i}", 0): CallDecision((place,)) for i in range(3)}, Settings()))
    for i, layer in enumerate(model.layers):
        set_forward(layer, f"layers.{i}", None)
    return model


finds_unused = partial(DistributedDataParallel, find_unused_parameters=True)
static = partial(DistributedDataParallel, static_graph=True)

# Two rounds of a forward and a recompute each.
TWICE = [4, 4, 4]


def wrapped_before():
    compare(net, [parallel], [wrapped, parallel], calls=TWICE)


def wrapped_after():
    compare(net, [parallel], [parallel, wrapped_inside], calls=TWICE)


def root_wrapped():
    compare(net, [parallel], [lambda model: wrap(model, lambda name, _: name == ""), parallel], calls=TWICE)


def around_the_parallel_module():
    compare(net, [parallel], [parallel, lambda model: wrap(model, "module")], calls=TWICE)


def checkpoint_in_the_model():
    compare(net, [parallel], [checkpoints, parallel], calls=TWICE)


def nested_regions():
    compare(net, [parallel], [nested, parallel], calls=TWICE)


def run_of_sibling_calls():
    compare(net, [parallel], [run_of_calls, parallel], calls=TWICE)


def shared_parameters():
    compare(tied, [parallel], [wrapped, parallel], calls=TWICE)


def shared_parameters_in_a_static_graph():
    compare(tied, [static], [wrapped, static], calls=TWICE)


def block_called_three_times():
    compare(looped, [parallel], [lambda model: wrap(model, "layers.0"), parallel], calls=[12])


def unused_parameters():
    compare(some, [finds_unused], [wrapped, finds_unused], calls=[4, 4, 0])


def all_used_though_looked_for():
    compare(net, [finds_unused], [wrapped, finds_unused], calls=TWICE)


def static_graph():
    compare(net, [static], [wrapped, static], calls=TWICE)


def static_graph_with_unused_parameters():
    compare(some, [static], [wrapped, static], calls=[4, 4, 0])


def frozen_parameters():
    compare(partly_frozen, [parallel], [wrapped, parallel], calls=TWICE)


def blocks_called_twice_on_different_tensors():
    compare(siamese, [static], [wrapped, static], calls=[8, 8, 8])


def accumulation_without_sync():
    compare(net, [parallel], [wrapped, parallel], calls=[12, 12, 12], micros=3)


def bytes_between_forward_and_backward():
    held(lambda *ways: [*ways, parallel], wrapped)


CASES = {
    case.__name__: case
    for case in (
        wrapped_before,
        wrapped_after,
        root_wrapped,
        around_the_parallel_module,
        checkpoint_in_the_model,
        nested_regions,
        run_of_sibling_calls,
        shared_parameters,
        shared_parameters_in_a_static_graph,
        block_called_three_times,
        unused_parameters,
        all_used_though_looked_for,
        static_graph,
        static_graph_with_unused_parameters,
        frozen_parameters,
        blocks_called_twice_on_different_tensors,
        accumulation_without_sync,
        bytes_between_forward_and_backward,
    )
}
