"""A step as one list of events, and what its readers make of it."""

import gc

import torch
from torch import nn

from torchremat import Host, offload_parameters
from torchremat._compat.autograd import pop_saved_tensor_hooks, push_saved_tensor_hooks
from torchremat.measuring.flops import FlopCounter
from torchremat.measuring.recorder import StepRecorder
from torchremat.measuring.step_record import GraphDropped, Run, StorageFreed, TensorSaved


def refused(packed):
    raise AssertionError("no backward runs")


def recorded(body, **options):
    """The record of a block whose saved tensors are told."""
    with StepRecorder(FlopCounter(), None, **options) as log:
        push_saved_tensor_hooks(log.save, refused)
        try:
            result = body()
        finally:
            pop_saved_tensor_hooks()
        log.close()
    del result
    return log.record


def told(record):
    """Each event in short: an operator with what it reads and makes, a save, a dropped graph, a freed storage."""
    return " ".join(map(_short, record.events))


def _short(event):
    match event:
        case Run():
            return f"{event.name.split('.')[1]}({','.join(map(str, event.reads))})->{','.join(map(str, event.makes))}"
        case TensorSaved():
            return f"S{','.join(map(str, event.values))}"
        case GraphDropped():
            return f"D{event.save}"
        case StorageFreed():
            return f"F{event.storage}"


def test_operators_saves_and_frees_are_one_list_in_order():
    x = torch.ones(4, requires_grad=True)

    def body():
        # exp saves its result, after it ran; `*` saves both arguments, before.
        return (x.exp() * 2).sin().sum()

    # The loss, value 4, outlives the block, and so do the saved results of exp and of `*`, dropped by nobody yet; but
    # storages are held by graphs through what was saved in their place, which holds nothing: they die.
    assert told(recorded(body)) == "exp(0)->1 S1 mul(1)->2 F1 S2 sin(2)->3 F2 sum(3)->4 F3"


def test_a_parameter_that_leaves_and_comes_back_is_one_storage():
    # It has other memory each time, and its way out and back are operators that no step has.
    layer, x = nn.Linear(128, 128, bias=False), torch.ones(1, 128)

    def body():
        with torch.no_grad():
            y = layer(x)
            assert type(layer.weight) is not nn.Parameter
            return layer(y).sum()

    with offload_parameters(layer, None, Host()):
        found = told(recorded(body))

    assert found == "t(0)-> mm(1,0)->2 t(0)-> mm(2,0)->3 sum(3)->4 F3 F2"


def test_a_graph_that_goes_is_an_event_of_its_own():
    x = torch.ones(4, requires_grad=True)

    def body():
        x.exp()  # its graph goes at once, and what it saved
        return x.sum()

    record = recorded(body)

    assert told(record) == "exp(0)->1 S1 D1 F1 sum(0)->2"
    assert [(one.value, one.position, one.is_dropped) for one in record.saves] == [(1, 1, True)]


def test_a_write_makes_another_value_of_the_same_storage():
    x = torch.ones(4)

    def body():
        y = x + 1
        y.mul_(2)
        return y.neg()

    record = recorded(body)

    assert told(record) == "add(0)->1 mul_(1)->2 neg(2)->3 F1"
    assert [one.storage for one in record.values] == [0, 1, 1, 2]
    assert [one.is_overwritten for one in record.values] == [False, True, False, False]


def test_what_computes_nothing_is_told_on_request():
    x = torch.ones(4)
    with StepRecorder(FlopCounter(), None) as log:
        x.detach()
        log.sees_all = True
        x.detach()

    assert [run.name for run in log.record.runs] == ["aten.detach.default"]


def test_storages_get_the_numbers_that_a_reader_wants_and_others_larger_ones():
    with StepRecorder(FlopCounter(), None) as log:
        x, y = torch.ones(4), torch.ones(2)
        z = x + 1

    assert [one.storage for one in log.record.values] == [0, 1, 2]
    assert [one.storage for one in log.record.numbered({2: 0, 1: 1}, 2).values] == [2, 1, 0]
    assert (y.shape, z.shape) == ((2,), (4,))


def test_calls_see_a_tensor_with_its_number_and_its_version():
    log = StepRecorder(FlopCounter(), None)
    x, y = torch.ones(4), torch.ones(2)

    first, _ = log.seen(x), log.seen(y)
    x.add_(1)
    again = log.seen(x[:2])

    assert [(one.identity, one.version, one.storage) for one in (*first, *again)] == [(0, 0, 0), (2, 1, 0)]
    assert log.record.shown == {0: 16, 1: 8}
    assert log.storages(torch.ones(4).to_sparse()) == (-1,)


def test_a_recorder_that_is_closed_needs_no_collector():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    gc.disable()
    try:
        record = recorded(lambda: model(x).sum())
        del record
        assert not any(isinstance(one, StepRecorder) for one in gc.get_objects())
    finally:
        gc.enable()
