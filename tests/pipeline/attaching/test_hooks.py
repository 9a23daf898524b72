"""What attaching says when it cannot, and that nobody pays for what is not used."""

from importlib import import_module

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeline.attaching.models import SINGLE
from torchremat import BudgetError, UnsupportedError, VersionError
from torchremat.pipeline import attach, detach, in_flight, microbatch_budget


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make(name):
    pipelining = import_module("torch.distributed.pipelining")
    count = 1 if name in SINGLE else 2
    stages = [pipelining.PipelineStage(nn.Linear(2, 2), one, count, torch.device("cpu")) for one in range(count)]
    return getattr(pipelining, name)(
        stages[0] if name in SINGLE else stages, n_microbatches=4, loss_fn=nn.functional.mse_loss
    )


@pytest.mark.parametrize("use", [attach, in_flight])
def test_a_schedule_of_another_class_is_named_with_what_is_allowed(use):
    message = (
        "schedule: a Linear is not supported. Use a schedule of torch.distributed.pipelining: ScheduleGPipe, "
        "Schedule1F1B, ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble, "
        "ScheduleZBVZeroBubble, ScheduleDualPipeV."
    )
    with pytest.raises(UnsupportedError, match=message):
        use(nn.Linear(1, 1))


def test_detaching_what_has_no_attributes_says_so():
    with pytest.raises(UnsupportedError, match="nothing is attached to this object, so there is nothing to detach"):
        detach(object())


def test_a_budget_that_is_no_size_is_refused():
    with pytest.raises(BudgetError, match="'much' is not a size"):
        attach(make("Schedule1F1B"), lookahead_bytes="much")


@pytest.mark.parametrize(
    ("schedule", "owner", "name", "options", "words"),
    [
        ("Schedule1F1B", "stage", "backward_weight_one_chunk", {}, "PipelineStage.backward_weight_one_chunk"),
        ("ScheduleGPipe", "stage", "get_bwd_recv_ops", {}, "PipelineStage.get_bwd_recv_ops"),
        ("ScheduleInterleaved1F1B", "schedule", "bwd_recv_ops", {}, "ScheduleInterleaved1F1B.bwd_recv_ops"),
        ("ScheduleInterleaved1F1B", "schedule", "_stages", {}, "ScheduleInterleaved1F1B._stages"),
        (
            "ScheduleLoopedBFS",
            "schedule",
            "pipeline_order_with_comms",
            {"lookahead": False},
            "ScheduleLoopedBFS.pipeline_order_with_comms",
        ),
    ],
)
def test_a_torch_without_a_hook_is_told_which(monkeypatch, schedule, owner, name, options, words):
    made = make(schedule)
    if owner == "stage":
        for kind in import_module("torch.distributed.pipelining").PipelineStage.__mro__:
            if name in vars(kind):
                monkeypatch.delattr(kind, name)
    else:
        monkeypatch.delattr(made, name)
    before = dict(vars(made))

    message = rf"torch {torch.__version__} has no {words}: attaching to a {schedule} needs that .* 2\.11 to 2\.14"
    with pytest.raises(VersionError, match=message.replace("+", r"\+")):
        attach(made, **options)
    assert vars(made) == before


def test_a_loop_that_waits_in_another_way_is_told_if_its_waits_are_needed(monkeypatch):
    made = make("Schedule1F1B")
    monkeypatch.setattr(type(made), "_step_microbatches", lambda self, *args, **kwargs: None)

    with pytest.raises(VersionError, match=r"Schedule1F1B\._step_microbatches with a call of _wait_batch_p2p"):
        attach(made)
    with pytest.raises(VersionError, match="_wait_batch_p2p"):
        attach(made, lookahead=False, record=True)
    attach(made, lookahead=False).detach()


# A single process: of the stages that it runs, the first one's backward waits for the second's.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ScheduleGPipe", {0: 4}),
        ("Schedule1F1B", {0: 1}),
        ("ScheduleInterleaved1F1B", {0: 2, 1: 1}),
        ("ScheduleLoopedBFS", {0: 4, 1: 4}),
    ],
)
def test_microbatches_in_flight_in_one_process(name, expected):
    assert in_flight(make(name)) == expected


def test_a_budget_below_what_is_there_before_is_refused():
    with pytest.raises(BudgetError, match=r"a budget of 1\.00 KiB for a stage with 2\.00 KiB before the step leaves"):
        microbatch_budget("1KiB", before_bytes=2048, in_flight=2)
