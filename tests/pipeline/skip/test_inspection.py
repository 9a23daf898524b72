"""What is known of a model's skips before it runs: all faults in one message, nested ones too, and the routes."""

from collections import OrderedDict

import pytest
from torch import nn

from torchremat import SkippableError
from torchremat.pipeline.skip import Namespace, SkipLayout, inspect_skip_layout, skippable, verify_skippables


def layer(stash=(), pop=()):
    return skippable(stash=stash, pop=pop)(type("Layer", (nn.Module,), {}))()


def layers(*given):
    return nn.Sequential(OrderedDict((f"layer{number}", one) for number, one in enumerate(given, start=1)))


class Holder(nn.Module):
    """Runs what it has in an order of its own."""

    def __init__(self, *modules):
        super().__init__()
        self.held = nn.ModuleList(modules)


def faults(module):
    with pytest.raises(SkippableError) as error:
        verify_skippables(module)
    head, _, listed = str(error.value).partition("\n\n")
    assert head == "one or more pairs of stash and pop do not match:"
    return listed.split("\n")


SHARED = layer(stash=["a"])


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(),
        nn.Linear(2, 2),
        layers(layer(stash=["a"]), nn.Linear(2, 2), layer(pop=["a"])),
        layers(layer(stash=["a", "b"]), layer(pop=["b"], stash=["c"]), layer(pop=["a", "c"])),
        layers(layers(layer(stash=["a"])), Holder(layer(pop=["a"]))),
        # In which order a holder runs what it has is not known.
        Holder(layer(pop=["a"]), layer(stash=["a"])),
    ],
    ids=["empty", "none", "pair", "three", "nested", "held"],
)
def test_what_fits_together(module):
    verify_skippables(module)


def test_namespaces_are_other_names():
    one, two = Namespace(), Namespace()
    pairs = [(layer(stash=["a"]), layer(pop=["a"])) for _ in range(3)]
    for pair, namespace in zip(pairs, [one, two, None], strict=True):
        [module.isolate(namespace) for module in pair]

    verify_skippables(layers(*(pair[0] for pair in pairs), *(pair[1] for pair in pairs)))


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (layers(layer(stash=["a"])), ["* no module declared 'a' as poppable but stashed"]),
        (layers(layer(pop=["a"])), ["* 'layer1' declared 'a' as poppable but it was not stashed"]),
        (layer(pop=["a"]), ["* 'Layer' declared 'a' as poppable but it was not stashed"]),
        (
            layers(layer(pop=["a"]), layer(stash=["a"])),
            ["* 'layer1' declared 'a' as poppable but it was not stashed"],
        ),
        (layers(layer(stash=["a"], pop=["a"])), ["* 'layer1' declared 'a' both as stashable and as poppable"]),
        (
            layers(layer(stash=["a"]), layer(stash=["a"]), layer(pop=["a"])),
            ["* 'layer2' redeclared 'a' as stashable but not isolated by namespace"],
        ),
        (
            layers(layer(stash=["a"]), layer(pop=["a"]), layer(pop=["a"])),
            ["* 'layer3' redeclared 'a' as poppable but not isolated by namespace"],
        ),
        (
            layers(SHARED, SHARED, layer(pop=["a"])),
            ["* 'layer1' redeclared 'a' as stashable but not isolated by namespace"],
        ),
        (
            layers(layers(Holder(nn.Linear(1, 1), layer(stash=["a", "b"])))),
            ["* no module declared 'a', 'b' as poppable but stashed"],
        ),
        (
            layers(nn.Linear(1, 1), layers(Holder(nn.Linear(1, 1), layer(pop=["b", "a"])))),
            ["* 'layer2.layer1.held.1' declared 'a', 'b' as poppable but it was not stashed"],
        ),
    ],
)
def test_a_fault_with_its_path(module, words):
    assert faults(module) == words


def test_all_faults_in_one_message():
    module = layers(
        layer(stash=["a", "c"]),
        layer(pop=["b"], stash=["a"]),
        Holder(layer(stash=["d"], pop=["d"])),
        layer(pop=["a"]),
        layer(pop=["a"]),
    )

    assert faults(module) == [
        "* 'layer2' redeclared 'a' as stashable but not isolated by namespace",
        "* 'layer2' declared 'b' as poppable but it was not stashed",
        "* 'layer3.held.0' declared 'd' both as stashable and as poppable",
        "* 'layer5' redeclared 'a' as poppable but not isolated by namespace",
        "* no module declared 'c' as poppable but stashed",
    ]


# ------------------------------------------------------------------------------------------------------------ layouts


def test_no_skip():
    layout = inspect_skip_layout([nn.Sequential(nn.Linear(2, 2)), nn.Sequential()])

    assert layout == SkipLayout(2, {})
    assert list(layout.copies_to(0)) == list(layout.copies_to(1)) == []


def test_routes():
    layout = inspect_skip_layout(
        [
            layers(layer(stash=["in", "out"]), layer(pop=["in"])),
            layers(nn.Linear(2, 2)),
            layers(Holder(layer(pop=["out"]))),
        ]
    )

    assert layout == SkipLayout(3, {(None, "in"): (0, 0), (None, "out"): (0, 2)})


def test_copies_are_in_order_without_those_inside_of_a_stage():
    one, two = sorted([Namespace(), Namespace()])
    routes = {
        (two, "a"): (0, 2),
        (None, "z"): (1, 2),
        (one, "b"): (0, 2),
        (None, "y"): (0, 2),
        (one, "a"): (0, 2),
        (None, "x"): (2, 2),
        (None, "w"): (0, 1),
    }
    layout = SkipLayout(3, routes)

    assert list(layout.copies_to(2)) == [
        (0, (None, "y")),
        (0, (one, "a")),
        (0, (one, "b")),
        (0, (two, "a")),
        (1, (None, "z")),
    ]
    assert list(layout.copies_to(1)) == [(0, (None, "w"))]


def test_stages_that_do_not_fit_together():
    with pytest.raises(SkippableError, match=r"\* '1\.layer1' declared 'a' as poppable but it was not stashed$"):
        inspect_skip_layout([layers(nn.Linear(2, 2)), layers(layer(pop=["a"])), layers()])
