"""The flat order of calls that a plan chooses among: which calls are units, and which of their inputs are links."""

import copy

import pytest
import torch
from torch import nn

import models
import zoo
from planning.kinds import KINDS, Loop, block, inputs, linear, square
from planning.steps import differences, known_subject, outcome, recomputed_flops
from probes.planning import find_units, trace
from torchremat import Planner, plan
from torchremat.errors import StepError


def units_of(model, step):
    found = find_units(trace(model, step, aside=known_subject(step, model).untouched))
    return " ".join(
        f"{unit.name.replace(' ', '')}{'<' + ','.join(str(unit_) for _, unit_ in unit.links) if unit.links else ''}"
        for unit in found.units
    )


# After `<` stand the units whose outputs it takes, by identity and version.
EXPECTED = {
    "loop": "layers.0 layers.1<0 layers.2<1 layers.3<2",
    "glue in place": "layers.0 layers.1 layers.2 layers.3",
    "glue": "layers.0 layers.1 layers.2 layers.3",
    "shared in-place relu": "a+relu b+relu<0 c<1",
    "sequential": "0 1<0 2<1 3<2 4<3 5<4 6<5 7<6",
    "sequential in place": "0+1 2+3<0 4+5<1 6+7<2",
    "nested sequentials": "0 1<0 2<1 3<2",
    "shared weights": "block block<0 block<1 head<2",
    "encoder and decoder": "encoder decoder.0<0 decoder.1<1,0 head<2",
    "returns a dict": "body.layers.0 body.layers.1<0 body.layers.2<1 body.layers.3<2 head<3",
    "returns a tuple": "body.layers.0 body.layers.1<0 body.layers.2<1 body.layers.3<2 head<3",
    "tied": "embed body.layers.0<0 body.layers.1<1 body.layers.2<2 body.layers.3<3 head<4",
    "frozen and low rank": "embed first<0 layers.0<1 layers.1<2 layers.2<3 layers.3<4",
    "recurrent": "lstm gru<0 head<1",
    "attention": "a between b<1",
    "transformer": (
        "encoder.layers.0 encoder.layers.1<0 encoder.norm<1 decoder.layers.0<2 decoder.layers.1<3,2 decoder.norm<4"
    ),
    "partly without grad": "student.layers.0 student.layers.1<0 student.layers.2<1 student.layers.3<2",
    "submodules alone": "layers.0 layers.1",
    "siamese": "layers.0 layers.1<0 layers.2<1 layers.3<2 layers.0 layers.1<4 layers.2<5 layers.3<6",
    "the same submodule twice": "layers.0 layers.0",
    "one linear": "",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_units_and_their_links(name):
    assert units_of(*KINDS[name]()) == EXPECTED[name]


def test_units_of_a_unet_with_skips():
    assert units_of(*models.unet_step(batch=2, size=16)) == (
        "first down1.0<0 down1.1<1 shrink1<2 down2.0<3 down2.1<4 shrink2<5 middle.0<6 middle.1<7 "
        "grow2 up2.0 up2.1<10 grow1 up1.0 up1.1<13 last<14"
    )


def test_units_of_a_resnet_keep_the_relu_in_place_with_its_input():
    found = units_of(*models.resnet_step(batch=2, size=8, width=8))

    assert found.startswith("first norm+relu<0 blocks.0<1 blocks.1<2 ")
    assert found.endswith(" blocks.8<9 head")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            zoo.gpt2,
            "transformer.wte transformer.wpe transformer.drop transformer.h.0<2 transformer.h.1<3 transformer.h.2<4 "
            "transformer.h.3<5 transformer.ln_f<6 lm_head",  # which takes a slice
        ),
        (zoo.bert, "bert.embeddings " + " ".join(f"bert.encoder.layer.{i}<{i}" for i in range(4)) + " cls<4"),
    ],
)
def test_units_of_models_of_transformers(make, expected):
    model, step = make(blocks=4, width=64)

    assert units_of(model, step) == expected


def test_units_of_an_encoder_decoder_of_transformers():
    found = find_units(trace(*zoo.t5(blocks=4, width=64)))

    names = [unit.name for unit in found.units]
    assert [name for name in names if ".block." in name] == [
        *(f"encoder.block.{i}" for i in range(4)),
        *(f"decoder.block.{i}" for i in range(4)),
    ]
    # The position bias that the first block makes, and the memory of the encoder, are links as well.
    second = found.units[names.index("encoder.block.1")]
    assert len(second.links) == 2
    assert {names[unit] for _, unit in second.links} == {"encoder.block.0"}


def test_a_call_that_writes_to_an_earlier_tensor_is_no_unit():
    class Writes(nn.Module):
        def forward(self, x):
            return x.add_(1)

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.writes = block(), block(), block(), Writes()

        def forward(self, x):
            h = self.a(x)
            y = self.b(h.detach() * 2)
            self.writes(h)
            return self.c(h) + y

    found = find_units(trace(Root(), lambda m: square(m(inputs()))))

    # What `a` gave is written after `b` has run, which does not hold it.
    assert [unit.name for unit in found.units] == ["a", "b", "c"]
    assert [key for _, key in found.others] == [("writes", 0)]
    assert found.units[2].links == ()


def test_a_call_whose_input_is_written_later_is_no_unit():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.relu, self.c = block(), block(), nn.ReLU(inplace=True), block()

        def forward(self, x):
            h = self.a(x)
            with torch.no_grad():
                self.b(h)
            y = self.b(h.detach())
            return self.c(self.relu(h)) + y

    found = find_units(trace(Root(), lambda m: square(m(inputs()))))

    assert "a" in [unit.keys[0][0] for unit in found.units]
    assert all("relu" not in unit.name or unit.keys[0][0] == "a" for unit in found.units)


def test_a_step_that_calls_nothing_of_the_model_is_an_error():
    model, other = Loop(), Loop()

    with pytest.raises(StepError, match="calls no module of the model with grad mode on; does it use another model"):
        find_units(trace(model, lambda m: square(other(inputs()))))


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rest = nn.Embedding(16, 64, max_norm=0.1), Loop()

    def forward(self, tokens):
        return self.rest(self.embed(tokens))


class Initialised(nn.Module):
    """Sets its scale by its first batch, as the layers of a flow do."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(64)), block()
        self.register_buffer("is_ready", torch.tensor(False))

    def forward(self, x):
        if not self.is_ready:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.is_ready.fill_(True)
        return self.inner(x * self.scale)


class WritesLater(nn.Module):
    """Its head is written after its call: a recompute would find other weights."""

    def __init__(self):
        super().__init__()
        self.rest, self.head = Loop(), linear()

    def forward(self, x):
        x = self.head(self.rest(x)) * 2
        with torch.no_grad():
            self.head.bias.mul_(1)
        return x


@pytest.mark.parametrize(
    ("model", "step", "expected"),
    [
        (
            Renormed,
            lambda m: square(m(torch.arange(16))),
            "rest.layers.0 rest.layers.1<0 rest.layers.2<1 rest.layers.3<2",
        ),
        (
            lambda: nn.Sequential(Initialised(), block(), Initialised()),
            lambda m: square(m(inputs())),
            "0.inner 1<0 2.inner",
        ),
        (WritesLater, lambda m: square(m(inputs())), "rest.layers.0 rest.layers.1<0 rest.layers.2<1 rest.layers.3<2"),
    ],
    ids=["renormed", "initialised", "written later"],
)
def test_a_call_whose_parameters_are_written_is_no_unit(model, step, expected):
    # Its recompute finds other weights, so that planning ended in a MutationError about `optimizer.step()`.
    torch.manual_seed(0)
    model = model()
    assert units_of(model, step) == expected

    planner = Planner(model, step, cost="flops", operators=False, accumulates=True)
    plain = outcome(copy.deepcopy(model), step)  # the step writes to its weights
    planner.plan(planner.floor_bytes).apply(model)

    assert differences(outcome(model, step), plain) == []
    assert recomputed_flops(model, step) > 0


def test_a_step_of_which_nothing_can_be_recomputed_is_an_error():
    # It ended in an IndexError.
    model = nn.Sequential(nn.Embedding(16, 64, max_norm=0.1))

    with pytest.raises(StepError, match=r"no call of the model can be recomputed"):
        plan(model, lambda m: m(torch.arange(16)).sum(), budget="100%")
