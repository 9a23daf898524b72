from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from torchremat.tensors.structure import join, place_of, split, split_call, tensors_in


class Pair(NamedTuple):
    first: object
    second: object


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    value: object
    note: str = "none"
    others: list = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: object


@dataclass(slots=True)
class Slotted:
    value: object


def a():
    return torch.ones(2)


CONTAINERS = {
    "tensor": lambda t: t,
    "tuple": lambda t: (t, 1, "x"),
    "list": lambda t: [None, t],
    "dict": lambda t: {"k": t, 2: 3.0},
    "nested": lambda t: ([{"k": (t,)}], {}),
    "named tuple": lambda t: Pair(t, [t]),
    "old named tuple": lambda t: Point(1, t),
    "ordered dict": lambda t: OrderedDict(b=t, a=1),
    "default dict": lambda t: defaultdict(list, k=t),
    "deque": lambda t: deque([t, 1], maxlen=3),
    "model output": lambda t: BaseModelOutput(last_hidden_state=t, hidden_states=(t, t)),
    "return type": lambda t: torch.max(torch.stack([t, t]), 0),
    "dataclass": lambda t: Record(t, others=[t]),
    "frozen dataclass": lambda t: Frozen({"k": t}),
    "dataclass with slots": lambda t: Slotted(t),
}


def flat(value):
    """Everything in a value, tensors by their ids."""
    if isinstance(value, torch.Tensor):
        return ("tensor", id(value))
    if isinstance(value, dict):
        return (type(value), [(key, flat(item)) for key, item in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value), [flat(item) for item in value])
    if isinstance(value, Record):
        return (Record, flat(value.value), value.note, flat(value.others))
    if isinstance(value, Frozen | Slotted):
        return (type(value), flat(value.value))
    return value


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_join_undoes_split(make):
    value = make(a())
    tensors = []

    template = split(value, tensors, [])

    assert tensors
    assert flat(join(template, tensors)) == flat(value)


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_a_template_holds_no_tensor(make):
    value = make(a())
    tensors = []
    template = split(value, tensors, [])
    others = [torch.zeros(2) for _ in tensors]

    joined = tensors_in(join(template, others))

    assert list(map(id, joined)) == list(map(id, others))


def test_more_tensors_than_leaves_are_made_beforehand():
    value = [torch.full((), float(i)) for i in range(100)]
    tensors = []

    template = split(value, tensors, [])

    assert join(template, tensors) == value


def test_parameters_and_other_subclasses_are_tensors():
    value = (nn.Parameter(a()), nn.Buffer(a()))

    assert len(tensors_in(value)) == 2


def test_what_could_have_state_is_an_object():
    class Cache:
        pass

    cache, function = Cache(), nn.Linear(1, 1)
    objects = []

    split((1, "x", None, cache, {"k": function}, torch.float32, Record(1)), [], objects)

    assert objects == [cache, function, Record(1)]


def test_objects_in_a_dataclass_with_tensors_are_found():
    cache = object()
    objects = []

    split(Record(a(), others=[cache]), [], objects)

    assert objects == [cache]


@pytest.mark.parametrize(
    ("value", "index", "place"),
    [
        ((a(), [a()]), 1, "[1][0]"),
        ({"mask": (a(), a())}, 1, "['mask'][1]"),
        (Pair(1, a()), 0, ".second"),
        (Record([a(), a()]), 1, ".value[1]"),
        (BaseModelOutput(last_hidden_state=a()), 0, "['last_hidden_state']"),
        (deque([1, a()]), 0, "[1]"),
        ((1, a()), 7, None),
    ],
)
def test_places_are_named(value, index, place):
    assert place_of(split(value, [], []), index) == place


def test_an_argument_that_contains_itself_is_an_object():
    cyclic, objects, tensors = [a()], [], []
    cyclic.append(cyclic)

    template = split_call((a(), cyclic), {"mask": a()}, tensors, objects)

    args, kwargs = join(template, tensors)
    assert args[1] is cyclic and objects[0] is cyclic
    assert len(tensors) == 2 and kwargs["mask"] is tensors[1]
