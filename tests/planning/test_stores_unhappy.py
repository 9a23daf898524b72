"""Plans with stores where something goes wrong: the gradients of the plain run or an error, and nothing left behind."""

import copy
import gc
import os
import pickle
import shutil
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import torchremat
from planning.steps import differences, outcome, with_declared_speed
from probes.stores import DiskWriter
from stores.faults import Calls, broken, no_space
from torchremat import BudgetWarning, Disk, Planner, StoreError, StoreWarning, UnsupportedError


def made():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
    return nn.Sequential(*layers)


X = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))


def step(model):
    return model(X).square().mean()


def weights(model):
    return list(model.parameters())


@pytest.fixture(scope="module")
def planned():
    """A plan that stores some of six layers, and what a plain step computes."""
    model = made()
    with with_declared_speed():
        planner = Planner(model, step, cost="flops", operators=False, stores=[Disk()])
    peak, _ = planner.plain_peak()
    plan = planner.plan(planner.fixed_bytes + int(0.6 * (peak - planner.fixed_bytes)))
    assert len(plan.stored) >= 2
    return plan, outcome(model, step)


@pytest.fixture
def applied(planned, tmp_path):
    """A model with the plan applied, the disk, and what a plain step computes."""
    plan, plain = planned
    model, disk = made(), Disk(tmp_path)
    plan.apply(model, stores=[disk])
    gc.collect()
    gc.disable()  # nothing may need it
    yield model, disk, plain
    gc.enable()
    assert disk.statistics.stored_bytes == 0


def is_as_ever(model, disk, plain):
    """Whether a step stores and computes what it always does, and leaves nothing."""
    copied = disk.statistics.copied_out_bytes
    same = differences(outcome(model, step), plain) == []
    return same and disk.statistics.copied_out_bytes > copied and disk.statistics.stored_bytes == 0


@contextmanager
def failing(monkeypatch, name, error, *, after):
    """Let a function of `os` fail in all calls after the first ones."""
    calls = Calls(getattr(os, name))
    calls.fail = lambda number: error(number) if number > after else None
    with monkeypatch.context() as patched:
        patched.setattr(os, name, calls)
        yield


# ------------------------------------------------------------------------------------------------------------ the disk


def test_a_disk_that_is_full_in_the_middle_of_a_step_keeps_the_rest_in_memory(applied, monkeypatch):
    model, disk, plain = applied

    with failing(monkeypatch, "pwrite", no_space, after=1):
        # On a slow disk a step has put all there is before a write fails; then the next one is told.
        with pytest.warns(StoreWarning, match=r"could not be written.* stay where they are. This warning is"):
            found = [outcome(model, step) for _ in range(2)]
        assert [differences(one, plain) for one in found] == [[], []]
        assert disk.statistics.failed > 0
    with pytest.warns(BudgetWarning, match="a step was measured at .* above the budget"):  # the second, see `sounded`
        assert is_as_ever(model, disk, plain)


def test_a_strict_disk_that_is_full_ends_the_step_and_not_the_training(planned, monkeypatch):
    plan, plain = planned
    model, disk = made(), Disk(strict=True)
    plan.apply(model, stores=[disk])

    def train():
        for _ in range(2):  # on a slow disk the second step is told
            step(model).backward()

    with failing(monkeypatch, "pwrite", no_space, after=1), pytest.raises(StoreError, match="could not be written"):
        train()
    model.zero_grad()
    assert is_as_ever(model, disk, plain)


def test_a_disk_that_cannot_be_read_is_an_error_that_says_so(applied, monkeypatch):
    model, disk, plain = applied

    with failing(monkeypatch, "preadv", broken, after=2):
        loss = step(model)
        with pytest.raises(StoreError, match=r"cannot be read back: .*Input/output error"):
            loss.backward()
        del loss
    model.zero_grad()
    assert is_as_ever(model, disk, plain)


def test_a_directory_that_is_removed_is_not_missed(applied, tmp_path):
    model, disk, plain = applied
    shutil.rmtree(tmp_path)

    assert is_as_ever(model, disk, plain)


# ------------------------------------------------------------------------------------------------------------ the step


def test_who_stops_the_forward_while_it_waits_for_the_store_leaves_nothing(applied, monkeypatch):
    model, disk, plain = applied
    wait, waits = DiskWriter.wait_until_written, []

    def interrupted(spool, entry):
        waits.append(entry.content.size_bytes)
        if len(waits) == 3:
            raise KeyboardInterrupt
        wait(spool, entry)

    with monkeypatch.context() as patched:
        patched.setattr(DiskWriter, "wait_until_written", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(model)
    assert disk.statistics.stored_bytes == 0
    assert is_as_ever(model, disk, plain)


def test_who_stops_the_backward_leaves_what_the_graph_holds(applied):
    model, disk, plain = applied
    loss = step(model)

    def stop(_gradient):
        raise KeyboardInterrupt

    hook = model[1][0].weight.register_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    hook.remove()
    model.zero_grad()
    del loss
    # torch holds the nodes that were to run next until the thread's next backward.
    torch.ones((), requires_grad=True).backward()
    assert disk.statistics.stored_bytes == 0
    assert is_as_ever(model, disk, plain)


def test_graphs_of_several_steps_and_eval_in_between(applied):
    model, disk, plain = applied
    first, second = step(model), step(model)
    in_memory = disk.statistics.stored_bytes
    model.eval()
    with torch.no_grad():
        step(model)
    third = step(model)
    model.train()

    assert disk.statistics.stored_bytes == in_memory * 3 // 2
    found = [torch.autograd.grad(loss, weights(model)) for loss in (second, first, third)]
    expected = [plain[f"grad {name}"] for name, _ in model.named_parameters()]
    assert all(torch.equal(one, there) for each in found for one, there in zip(each, expected, strict=True))


def test_a_plan_that_is_removed_between_forward_and_backward(planned):
    plan, plain = planned
    model, disk = made(), Disk()
    plan.apply(model, stores=[disk])
    loss = step(model)
    plan.remove(model)

    found = torch.autograd.grad(loss, weights(model))
    names = [name for name, _ in model.named_parameters()]
    assert all(torch.equal(one, plain[f"grad {name}"]) for one, name in zip(found, names, strict=True))
    assert disk.statistics.stored_bytes == 0


def test_the_backward_of_a_backward(applied):
    model, disk, _ = applied

    def penalty(model):
        gradients = torch.autograd.grad(step(model), weights(model), create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in gradients), weights(model), allow_unused=True)

    for ours, plain in zip(penalty(model), penalty(made()), strict=True):
        assert (ours is None and plain is None) or torch.equal(ours, plain)
    assert disk.statistics.copied_in_bytes > 0


# ---------------------------------------------------------------------------------------------------- stores and copies


@pytest.mark.parametrize(
    ("stores", "message"),
    [
        ("disk", "stores='disk': expected a list of stores"),
        (None, "stores=None: expected a list of stores"),
        ([Disk], r"stores\[0\]=<class .*Disk'>: expected an object with a method `put`"),
        # Gradients would not be those of the plain run, and nobody would know: the plan's own stores lose nothing.
        (
            [torchremat.Compressed(lossy=torchremat.codecs.Int8())],
            r"stores\[0\]=Compressed.* loses digits .*Pass allow_lossy=True",
        ),
    ],
)
def test_a_plan_takes_no_store_that_is_none_or_loses_digits(planned, stores, message):
    plan, _ = planned
    model = made()

    with pytest.raises(UnsupportedError, match=message):
        plan.apply(model, stores=stores)
    plan.apply(model)  # nothing has been applied


def test_digits_may_be_lost_where_that_is_said(planned):
    plan, plain = planned
    model = made()
    plan.apply(model, stores=[torchremat.Compressed(lossy=torchremat.codecs.Int8())], allow_lossy=True)

    assert differences(outcome(model, step), plain) != []


def test_another_store_that_is_too_small_says_what_that_means(planned):
    plan, plain = planned
    model = made()
    plan.apply(model, stores=[Disk(limit="64KiB")])

    with pytest.warns(StoreWarning, match=r"stays where it is .* The peak may be above that of the plan\."):
        assert differences(outcome(model, step), plain) == []


def test_a_copy_of_a_model_shares_its_store(applied):
    model, disk, plain = applied

    # A copy of a disk had the number of the same open file, and closed it for the original when it went.
    twin = copy.deepcopy(model)

    assert is_as_ever(twin, disk, plain)
    del twin
    assert is_as_ever(model, disk, plain)


def test_a_model_goes_to_another_process_with_a_store_of_its_own(applied):
    model, disk, plain = applied
    copied = disk.statistics.copied_out_bytes

    there = pickle.loads(pickle.dumps(model))

    assert differences(outcome(there, step), plain) == []
    assert disk.statistics.copied_out_bytes == copied
    assert is_as_ever(model, disk, plain)
