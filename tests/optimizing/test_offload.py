"""The state of optimizers in stores."""

import copy
import io
import os
import pickle
import re
import signal
import weakref

import pytest
import torch
from torch import nn, optim

import torchremat
from forked import run_main
from optimizing.loops import KINDS, STEPS, ByTheNormOfAll, Lion, Loop, adamw, equal, in_memory, loss_of, net, plain_end
from probes.memory import record_allocations
from torchremat import (
    Compressed,
    Disk,
    Host,
    StoreError,
    StoreWarning,
    Tiers,
    UnsupportedError,
    codecs,
    offload_optimizer,
    release_gradients,
)

# The counts of steps, which stay: of the twelve parameters that have a gradient.
COUNTS = 4 * 12

STORES = {
    "host": Host,
    "disk": Disk,
    "tiers": lambda: Tiers(Host("8KiB"), Disk()),
    "compressed": lambda: Compressed(Host()),
}


def into(store, *, releases=False, min_bytes=64):
    def prepare(model, optimizer):
        return (
            release_gradients(model, optimizer) if releases else None,
            offload_optimizer(optimizer, store, min_bytes=min_bytes),
        )

    return prepare


@pytest.mark.parametrize("releases", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_is_bit_for_bit_the_plain_one(kind, releases):
    plain, store = plain_end(kind), Host()

    stored = Loop(kind, into(store, releases=releases)).run()

    if kind not in (KINDS["Counting"], KINDS["SGD"]):  # which have no state
        # Adagrad makes state for parameters without a gradient, too, which then waits there unread.
        assert store.statistics.copied_in_bytes >= (STEPS - 1) * store.statistics.stored_bytes / 2 > 0
    assert equal(stored.ends_with(), plain)


@pytest.mark.parametrize("releases", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_every_store_gives_back_what_it_took(make, releases):
    plain, store = plain_end(adamw), make()

    stored = Loop(adamw, into(store, releases=releases)).run()

    # Two averages of each trained parameter that has a gradient, of at least 16 elements.
    state = 2 * sum(p.nbytes for p in stored.model.parameters() if p.grad is not None)
    assert store.statistics.copied_in_bytes > 0
    assert in_memory(stored.optimizer) == COUNTS
    assert isinstance(store, Compressed) or store.statistics.stored_bytes == state
    assert equal(stored.ends_with(), plain)


@pytest.mark.parametrize("releases", [False, True], ids=["step", "backward"])
def test_the_state_of_two_parameters_is_in_memory_at_most(releases):
    # Eight layers of 256 KiB, two averages each. The gradients are there before a step, unless they are released.
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    optimizer = optim.AdamW(model.parameters())
    store = Disk()
    into(store, releases=releases)(model, optimizer)

    def step():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 256)).sum()
        if releases:
            with record_allocations(torch.device("cpu")) as recorder:
                loss.backward()
                optimizer.step()
        else:
            loss.backward()
            with record_allocations(torch.device("cpu")) as recorder:
                optimizer.step()
        return recorder.trace.peak_bytes

    step()
    peaks = [step() for _ in range(5)]

    layer, small = 2**18, 2**13
    # State of one and of the one before or after it, two temporaries of AdamW's, and the gradient.
    most = (4 + 2 + releases) * layer + small
    assert in_memory(optimizer) == 8 * 4
    assert store.statistics.stored_bytes == 16 * layer
    assert len(set(peaks)) == 1, peaks
    assert peaks[0] <= most


def test_state_that_exists_goes_at_once_and_comes_back_at_the_end():
    plain, stored = Loop(adamw).run(), Loop(adamw).run(stop=4)
    disk = Disk()
    with offload_optimizer(stored.optimizer, disk, min_bytes=64):
        assert in_memory(stored.optimizer) == COUNTS
        stored.run(4, 8)
    assert {type(one) for one in dict.values(stored.optimizer.state)} == {dict}
    assert disk.statistics.stored_bytes == 0
    stored.run(8)

    assert equal(stored.ends_with(), plain.ends_with())
    assert not stored.optimizer._optimizer_step_pre_hooks
    assert not stored.optimizer._optimizer_state_dict_post_hooks


# ---------------------------------------------------------------------------------------- what other code sees


def test_a_checkpoint_in_the_middle_resumes():
    plain = plain_end(adamw)
    first = Loop(adamw, into(Disk(), releases=True)).run(stop=8)
    file = io.BytesIO()
    torch.save([first.model.state_dict(), first.optimizer.state_dict(), first.schedule.state_dict()], file)
    file.seek(0)

    second = Loop(adamw, into(Disk(), releases=True))
    saved = torch.load(file, weights_only=True)
    for own, state in zip((second.model, second.optimizer, second.schedule), saved, strict=True):
        own.load_state_dict(state)
    second.average.load_state_dict(first.average.state_dict())

    del saved, state
    second.run(start=8)
    assert in_memory(second.optimizer) == COUNTS
    assert equal(second.ends_with(), plain)
    assert equal(first.run(start=8).ends_with(), plain)


READS = {
    "item": lambda entries: entries["exp_avg"],
    "get": lambda entries: entries.get("exp_avg"),
    "pop": lambda entries: entries.pop("exp_avg"),
    "setdefault": lambda entries: entries.setdefault("exp_avg", None),
    "values": lambda entries: [*entries.values()][1],
    "items": lambda entries: dict(entries.items())["exp_avg"],
    "dict": lambda entries: dict(entries)["exp_avg"],
    "unpacked": lambda entries: {**entries}["exp_avg"],
    "copied": lambda entries: copy.copy(entries)["exp_avg"],
    "copy": lambda entries: entries.copy()["exp_avg"],
    "deep": lambda entries: copy.deepcopy(entries)["exp_avg"],
    "pickled": lambda entries: pickle.loads(pickle.dumps(entries))["exp_avg"],
    "or": lambda entries: (entries | {})["exp_avg"],
    "ror": lambda entries: ({} | entries)["exp_avg"],
    "updated": lambda entries: updated(entries)["exp_avg"],
    "mapped": lambda entries: torch.utils._pytree.tree_map(lambda one: one, dict(entries))["exp_avg"],
}


def updated(entries):
    made = {}
    made.update(entries)
    return made


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_reads_the_state_finds_it(read):
    plain, stored = Loop(adamw).run(stop=2), Loop(adamw, into(Host())).run(stop=2)
    assert in_memory(stored.optimizer) == COUNTS

    found = read(stored.optimizer.state[stored.model.head.weight])

    assert torch.equal(found, plain.optimizer.state[plain.model.head.weight]["exp_avg"])


def test_who_holds_a_part_of_the_state_sees_it_change_and_may_write_to_it():
    def held(prepare):
        loop = Loop(adamw, prepare).run(stop=2)
        average = loop.optimizer.state_dict()["state"][0]["exp_avg"]
        view = loop.optimizer.state[loop.model.blocks[1][1].weight]["exp_avg"].view(-1)
        loop.run(2, 4)
        average.mul_(0.5)
        view.zero_()
        del view
        loop.run(4, 6)
        return average.clone(), loop.ends_with()

    assert equal(held(into(Host())), held(lambda *_: None))


def test_lists_and_dicts_in_the_state_go_out_and_come_back():
    # The statistics of SOAP, its largest state, stayed in memory.
    plain, store = Loop(KINDS["Preconditioned"]).run(stop=3), Disk()
    stored = Loop(KINDS["Preconditioned"], into(store)).run(stop=3)
    key, same = stored.model.blocks[1][3].weight, plain.model.blocks[1][3].weight
    entries, expected = stored.optimizer.state[key], plain.optimizer.state[same]

    assert in_memory(stored.optimizer) == 0
    whole_bytes = in_memory(plain.optimizer)
    assert whole_bytes * 0.9 < store.statistics.stored_bytes <= whole_bytes
    assert equal(dict(entries), expected)
    assert [type(one) for one in entries["bases"].values()] == [torch.Tensor, list, list]

    # What other code holds stays, and sees what is written to it.
    held = entries["statistics"]
    stored.run(3, stop=4)
    plain.run(3, stop=4)
    assert equal(held, plain.optimizer.state[same]["statistics"])
    assert dict.__getitem__(entries, "statistics") is held
    assert not isinstance(dict.__getitem__(entries, "bases"), dict)


def test_a_strict_store_has_room_for_a_part_of_a_list():
    plain = Loop(KINDS["Preconditioned"]).run(stop=1)
    stored = Loop(KINDS["Preconditioned"], into(Host("20KiB", strict=True), releases=True))

    with pytest.raises(StoreError, match="no room"):
        stored.step(0)

    key, same = stored.model.blocks[1][3].weight, plain.model.blocks[1][3].weight
    assert equal(dict(stored.optimizer.state[key]), plain.optimizer.state[same])


def test_what_was_read_goes_out_again():
    loop = Loop(adamw, into(Host())).run(stop=2)
    saved = loop.optimizer.state_dict()
    assert in_memory(loop.optimizer) > COUNTS
    del saved

    loop.run(2, 3)

    assert in_memory(loop.optimizer) == COUNTS


def test_an_optimizer_is_copied_with_full_state():
    loop = Loop(adamw, into(Host())).run(stop=3)

    twin = copy.deepcopy(loop.optimizer)

    assert {type(one) for one in twin.state.values()} == {dict}
    assert equal(twin.state_dict(), loop.optimizer.state_dict())


@pytest.mark.parametrize("releases", [False, True])
def test_a_closure_is_called_once(releases):
    """As Lightning's, which runs the whole step in one."""

    def trained(prepare):
        loop, losses = Loop(adamw, prepare), []
        for number in range(3):

            def closure(number=number):
                loop.optimizer.zero_grad()
                loss = loss_of(loop.model, number)
                loss.backward()
                losses.append(loss.item())
                return loss

            losses.append(loop.optimizer.step(closure).item())
        return loop.ends_with(), losses

    assert equal(trained(into(Host(), releases=releases)), trained(lambda *_: None))


class Twice(Lion):
    """Takes its closure's loss again after its step, as a line search does."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            closure()
        super().step()
        return None if closure is None else closure()


def test_a_closure_that_is_called_twice_is_refused():
    model = net()
    optimizer = Twice(model.parameters())
    into(Host())(model, optimizer)

    with pytest.raises(UnsupportedError, match=r"Twice.step\(closure\) calls the closure several times"):
        optimizer.step(lambda: loss_of(model, 0).backward())


def test_hooks_before_the_step_change_what_it_steps_on():
    def halves(model, optimizer):
        def halve(*_):
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)

    def both(model, optimizer):
        halves(model, optimizer)
        into(Host())(model, optimizer)

    assert equal(Loop(adamw, both).run(stop=3).ends_with(), Loop(adamw, halves).run(stop=3).ends_with())

    late = Loop(adamw, into(Host()))
    halves(late.model, late.optimizer)
    with pytest.raises(UnsupportedError, match=r"Register such a hook before torchremat\.offload_optimizer"):
        late.step(0)


def test_a_loss_scaler_and_clipping_work():
    def trained(prepare):
        loop = Loop(adamw, prepare)
        scaler = torch.amp.GradScaler("cpu")
        for number in range(4):
            loop.optimizer.zero_grad()
            scale = float("inf") if number == 2 else 1.0
            scaler.scale(loss_of(loop.model, number) * scale).backward()
            scaler.unscale_(loop.optimizer)
            nn.utils.clip_grad_norm_(loop.model.parameters(), 0.5)
            scaler.step(loop.optimizer)
            scaler.update()
        return loop.ends_with()

    assert equal(trained(into(Host())), trained(lambda *_: None))


def test_gradients_are_there_after_the_step():
    loop = Loop(adamw, into(Host()))
    loop.step(0)

    assert loop.model.head.weight.grad.norm() > 0


def test_parameters_that_are_added_later_are_stepped_and_stored():
    def trained(prepare):
        loop = Loop(lambda model: optim.AdamW(model.embed.parameters(), lr=1e-2), prepare).run(stop=2)
        loop.optimizer.add_param_group({"params": [*loop.model.blocks.parameters()], "lr": 1e-3})
        loop.schedule = optim.lr_scheduler.StepLR(loop.optimizer, 3, 0.8)
        return loop.run(2, 6)

    plain, stored = trained(lambda *_: None), trained(into(Host(), releases=True))

    assert in_memory(stored.optimizer) == COUNTS
    assert equal(stored.ends_with(), plain.ends_with())


def test_planning_and_measuring_leave_stored_state_as_it_was():
    plain, disk = Loop(adamw).run(stop=4), Disk()
    loop = Loop(adamw, into(disk)).run(stop=4)
    stored_bytes = disk.statistics.stored_bytes

    measured = torchremat.measure(loop.model, lambda model: loss_of(model, 0), optimizer=loop.optimizer)
    torchremat.plan(loop.model, lambda model: loss_of(model, 0), budget="min", optimizer=loop.optimizer)

    assert measured.optimizer_bytes == COUNTS
    assert in_memory(loop.optimizer) == COUNTS
    assert disk.statistics.stored_bytes == stored_bytes
    assert equal(loop.run(4, 6).ends_with(), plain.run(4, 6).ends_with())


def test_a_lossy_codec_is_the_users_word():
    store = Compressed(Host(), lossy=codecs.BFloat16())
    plain, lossy = Loop(adamw).run(stop=5), Loop(adamw, into(store)).run(stop=5)

    state = 2 * sum(p.nbytes for p in lossy.model.parameters() if p.grad is not None)
    assert store.statistics.stored_bytes == state // 2
    assert not equal(lossy.ends_with(), plain.ends_with())
    torch.testing.assert_close(lossy.model.head.weight, plain.model.head.weight, atol=0.02, rtol=0)


# ------------------------------------------------------------------------------------------------------------ failures


def test_without_room_the_state_stays_in_memory():
    plain = plain_end(adamw)

    stored = Loop(adamw, into(Host("10KiB"))).run()

    assert in_memory(stored.optimizer) > 10 * 2**10
    assert equal(stored.ends_with(), plain)


def test_a_strict_store_without_room_raises_and_the_state_is_whole():
    plain = Loop(adamw).run(stop=1)
    stored = Loop(adamw, into(Host("15KiB", strict=True), releases=True))

    with pytest.raises(StoreError, match="no room") as caught:
        stored.step(0)

    # Of the two averages of 8 KiB there is room for one.
    assert caught.value.__notes__ == [
        "AdamW was at blocks.1.3.weight. 2 of 15 parameters had made this step (blocks.1.3.bias, "
        "blocks.1.3.weight); all others, and their state, are as before it. Load a checkpoint before you go on."
    ]
    key, same = stored.model.blocks[1][3].weight, plain.model.blocks[1][3].weight
    assert equal(dict(stored.optimizer.state[key]), plain.optimizer.state[same])
    assert torch.equal(key, same)
    assert stored.model.head.weight not in stored.optimizer.state
    assert torch.equal(stored.model.head.weight, net().head.weight)


class Failing:
    """A store whose tensors cannot be brought back any more, from one time on, or after so many more."""

    def __init__(self):
        self.fails, self.left = False, None

    def put(self, tensor):
        return FailingHandle(self, tensor)


class FailingHandle:
    def __init__(self, store, tensor):
        self.store, self.tensor, self.stored_bytes = store, tensor.clone(), tensor.nbytes

    def get(self):
        if self.store.left is not None:
            self.store.left -= 1
        if self.store.fails or self.store.left == 0:
            raise StoreError("the disk is gone.")
        return self.tensor.clone()

    def prefetch(self):
        pass


def test_a_read_that_fails_in_a_backward_tells_which_parameters_have_stepped():
    store = Failing()
    loop = Loop(adamw, into(store, releases=True)).run(stop=2)
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}

    def fail(_):
        store.fails = True

    loop.model.blocks[1][0].weight.register_post_accumulate_grad_hook(fail)
    loop.optimizer.zero_grad()
    with pytest.raises(StoreError, match=r"the disk is gone\.") as caught:
        loss_of(loop.model, 2).backward()

    stepped = [name for name, p in loop.model.named_parameters() if not torch.equal(p, before[name])]
    (note,) = caught.value.__notes__
    named = note.partition("this step (")[2].partition(")")[0].split(", ")
    assert sorted(named) == sorted(stepped)
    assert 0 < len(stepped) < 10
    store.fails = False
    ahead = Loop(adamw).run(stop=3)
    # What has stepped has the state of this step, and what has not that of the last one.
    for (name, own), theirs in zip(loop.model.named_parameters(), ahead.model.parameters(), strict=True):
        if name in stepped:
            assert equal(dict(loop.optimizer.state[own]), ahead.optimizer.state[theirs])
        elif own in loop.optimizer.state:
            assert loop.optimizer.state[own]["step"] == 2


def test_a_checkpoint_that_is_loaded_after_half_a_step_begins_afresh():
    store = Failing()
    loop = Loop(adamw, into(store)).run(stop=2)
    model, optimizer = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
    loop.optimizer.zero_grad()
    loss_of(loop.model, 2).backward()
    store.left = 12
    with pytest.raises(StoreError, match=r"the disk is gone\.") as caught:
        loop.optimizer.step()
    assert re.search(r" [1-9]\d? of 15 parameters had made this step", caught.value.__notes__[0])

    store.left = None
    loop.model.load_state_dict(model)
    loop.optimizer.load_state_dict(optimizer)
    loop.run(2, 4)

    assert equal(loop.ends_with(), Loop(adamw).run(stop=4).ends_with())


def test_a_disk_that_is_full_leaves_the_state_in_memory(monkeypatch):
    """What a write in the background could not write is still where it was."""

    def full(*_):
        raise OSError(28, "No space left on device")

    plain = Loop(adamw).run(stop=4).ends_with()
    loop = Loop(adamw, into(Disk())).run(stop=2)
    monkeypatch.setattr(os, "pwrite", full)

    with pytest.warns(StoreWarning, match="No space left"):
        loop.run(2, 4)

    assert equal(loop.ends_with(), plain)


KILLED = """
import os, signal, sys
import torch
from optimizing.loops import Loop, loss_of
from optimizing.test_offload import adamw, into
from torchremat import Disk

torch.set_num_threads(1)  # as the tests have: sums in two threads end in other bits
folder = sys.argv[1]
loop = Loop(adamw, into(Disk(folder), releases=True)).run(stop=8)
parts = loop.model, loop.optimizer, loop.average, loop.schedule
torch.save([one.state_dict() for one in parts], sys.argv[2] + ".part")
os.rename(sys.argv[2] + ".part", sys.argv[2])
loop.run(8, 10)
loop.model.blocks[0][3].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
loop.step(10)
"""


def test_a_process_that_is_killed_in_a_step_leaves_its_checkpoint_and_nothing_else(tmp_path):
    folder, file, program = tmp_path / "store", tmp_path / "checkpoint", tmp_path / "killed.py"
    folder.mkdir()
    program.write_text(KILLED)

    ended = run_main(program, str(folder), str(file), folder=tmp_path, timeout=120)

    assert ended.code == -signal.SIGKILL, ended.err
    assert list(folder.iterdir()) == []
    loop = Loop(adamw, into(Disk(folder), releases=True))
    parts = loop.model, loop.optimizer, loop.average, loop.schedule
    for own, state in zip(parts, torch.load(file, weights_only=True), strict=True):
        own.load_state_dict(state)
    assert equal(loop.run(8).ends_with(), plain_end(adamw))


# ------------------------------------------------------------------------------------------------------------ its life


def test_refusals():
    model = net()
    optimizer = adamw(model)
    with pytest.raises(UnsupportedError, match="store=Host: expected an object with a method `put`"):
        offload_optimizer(optimizer, Host)
    with pytest.raises(UnsupportedError, match="ByTheNormOfAll: its step on all parameters"):
        offload_optimizer(ByTheNormOfAll(model.parameters()), Host())
    with pytest.raises(UnsupportedError, match=r"optimizer: expected a torch.optim.Optimizer, got Linear"):
        offload_optimizer(nn.Linear(1, 1), Host())
    with pytest.raises(UnsupportedError, match=r"got list, which holds an optimizer: hand over that, the AdamW"):
        offload_optimizer([optimizer], Host())
    offload_optimizer(optimizer, Host())
    with pytest.raises(UnsupportedError, match=r"is in Host\(\) already"):
        offload_optimizer(optimizer, Host())


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("releases", [False, True])
def test_an_optimizer_that_is_dropped_takes_its_state_along(releases):
    host = Host()
    loop = Loop(adamw, into(host, releases=releases)).run(stop=2)
    assert host.statistics.stored_bytes > 0
    gone = weakref.ref(loop.optimizer)
    del loop.schedule, loop.optimizer, loop.prepared
    assert gone() is None
    assert host.statistics.stored_bytes == 0


def test_it_is_public():
    assert torchremat.offload_optimizer is offload_optimizer
