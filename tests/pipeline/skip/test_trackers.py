"""Trackers: one for each thread, another for a while, and one for each run of a microbatch on a stage."""

import threading

import pytest
import torch
from torch import nn

from pipeline.skip.modules import Between, Pop, Stash
from regions.comparing import leaf, same
from torchremat import SkipError, checkpointed, wrap
from torchremat.pipeline.skip import (
    CellTracker,
    Namespace,
    SkipLayout,
    SkipTracker,
    current_skip_tracker,
    inspect_skip_layout,
    use_skip_tracker,
)


def test_save_and_load():
    tracker, namespace = SkipTracker(), Namespace()
    tracker.save(None, "a", 1)
    tracker.save(namespace, "a", 2)

    assert tracker.load(namespace, "a") == 2
    assert tracker.load(None, "a") == 1
    with pytest.raises(SkipError, match="'a' has not been stashed"):
        tracker.load(None, "a")


def test_each_thread_has_its_own():
    seen = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(current_skip_tracker()))
        thread.start()
        thread.join()

    assert len({id(one) for one in (*seen, current_skip_tracker())}) == 3
    assert current_skip_tracker() is current_skip_tracker()


def test_another_for_a_while():
    default, one, two = current_skip_tracker(), SkipTracker(), SkipTracker()

    def fail():
        with use_skip_tracker(two):
            assert current_skip_tracker() is two
            raise KeyboardInterrupt

    with use_skip_tracker(one):
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert current_skip_tracker() is one
    assert current_skip_tracker() is default


# -------------------------------------------------------------------------------------------------------------- cells


LAYOUT = SkipLayout(3, {(None, "in"): (1, 1), (None, "out"): (1, 2), (None, "from"): (0, 1), (None, "far"): (0, 2)})


def test_what_goes_out_what_comes_in_and_what_stays():
    tracker = CellTracker(LAYOUT, 1, {(None, "from"): "f"})
    tracker.save(None, "in", "i")
    tracker.save(None, "out", "o")

    assert tracker.outgoing == {(None, "out"): "o"}
    assert tracker.load(None, "in") == "i"
    assert tracker.load(None, "from") == "f"
    for name in ("from", "in", "far"):
        with pytest.raises(SkipError, match=f"'{name}' has not been stashed"):
            tracker.load(None, name)


class Cells:
    """Runs stages one after the other, each as a function of its value and its skips, and counts."""

    def __init__(self, *stages):
        self.stages = stages
        self.layout = inspect_skip_layout(stages)

    def cell(self, stage, value, incoming):
        tracker = CellTracker(self.layout, stage, incoming)
        with use_skip_tracker(tracker):
            output = self.stages[stage](value)
        return output, tracker.outgoing

    def run(self, value, call):
        skips = {}
        for stage in range(len(self.stages)):
            incoming = {key: skips.pop(key) for _, key in self.layout.copies_to(stage)}
            value, outgoing = call(self.cell, stage, value, incoming)
            skips.update(outgoing)
        assert skips == {}
        return value


def as_regions(function, *args):
    return checkpointed(function, early_stop=False)(*args)


@pytest.mark.parametrize("inside", [None, "0", "*"])
def test_cells_are_functions_that_can_be_recomputed(inside):
    stages = [nn.Sequential(Stash(), Between()), nn.Sequential(Between()), nn.Sequential(Between(), Pop())]
    net, x = nn.Sequential(*stages), leaf(3, 4)
    plain = nn.Sequential(*stages)
    cells = Cells(*stages)
    if inside is not None:
        wrap(stages[0], inside)
        wrap(stages[2], inside)

    assert same(lambda: cells.run(x, as_regions), lambda: plain(x), [x], [net])
    assert current_skip_tracker()._carrier._values == {}
    counts = [stages[0][0].module.calls, stages[2][1].module.calls]
    # The plain run, the forward, and the recompute of the cell; with regions inside, theirs too, in both runs: of the
    # first child of each stage, or of all children.
    assert counts == {None: [3, 3], "0": [5, 3], "*": [5, 5]}[inside]


def test_the_graph_has_an_edge_past_the_stages_between():
    stages = [nn.Sequential(Stash()), nn.Sequential(Between()), nn.Sequential(Pop())]
    cells, seen, x = Cells(*stages), [], leaf(3, 4)

    def call(cell, stage, value, incoming):
        seen.append((sorted(name for _, name in incoming), value.shape))
        return as_regions(cell, stage, value, incoming)

    cells.run(x, call)

    assert [names for names, _ in seen] == [[], [], ["a"]]


def test_a_cell_under_no_grad():
    stages = [nn.Sequential(Stash()), nn.Sequential(Pop())]
    x = leaf(3, 4)
    with torch.no_grad():
        y = Cells(*stages).run(x, as_regions)

    assert not y.requires_grad
    assert torch.equal(y, nn.Sequential(*stages)(x))
