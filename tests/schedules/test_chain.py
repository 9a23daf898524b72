import pytest

from schedules.brute_force import make_option, make_stage, random_chain, shape
from schedules.within import Within
from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, KeepNode, RegionNode, kept, uniform_trees
from torchremat.schedules.interpreter import interpret


def test_all_problems_are_listed():
    stages = (make_stage(forward=1, linked=-3), make_stage(make_option(-1), forward=float("nan")))

    with pytest.raises(ScheduleError) as raised:
        Chain(stages=stages, tail_bytes=-1)

    assert str(raised.value) == (
        "no chain: chain: tail_bytes=-1 is negative or not finite; "
        "stage 0: linked_bytes=-3 is negative or not finite; "
        "stage 1: forward=nan is negative or not finite; "
        "stage 1, option 0: saved_bytes=-1 is negative or not finite"
    )


def test_empty_chains_and_regions_are_refused():
    with pytest.raises(ScheduleError, match="no chain: it has no stages"):
        Chain(stages=())
    with pytest.raises(ScheduleError, match="a region without children covers no stage"):
        RegionNode(())


def test_nodes_know_their_stages():
    region = RegionNode((RegionNode((KeepNode(2, 1), KeepNode(3))), KeepNode(4)))

    assert (region.first, region.last) == (2, 4)
    assert list(kept((KeepNode(1), region))) == [KeepNode(1), KeepNode(2, 1), KeepNode(3), KeepNode(4)]


def test_regions_are_equal_by_their_children():
    region = RegionNode((KeepNode(0), RegionNode((KeepNode(1, 1), KeepNode(2)))))

    assert region == RegionNode((KeepNode(0), RegionNode((KeepNode(1, 1), KeepNode(2)))))
    assert region != RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2)))))
    assert region != RegionNode((KeepNode(0), KeepNode(1, 1), KeepNode(2)))
    assert RegionNode((KeepNode(0),)) != KeepNode(0)
    assert len({region, RegionNode((KeepNode(0), RegionNode((KeepNode(1, 1), KeepNode(2)))))}) == 1
    assert repr(RegionNode((KeepNode(0),))) == "RegionNode(children=(KeepNode(stage=0, option=0),))"


def test_trees_as_deep_as_a_chain_is_long_are_looked_up():
    # A plan of 520 calls asked whether a tree is known, which made its hash by as many calls in one another.
    def nested():
        node = RegionNode((KeepNode(0),))
        for stage in range(1, 5_000):
            node = RegionNode((node, KeepNode(stage)))
        return node

    assert {(nested(),): "known"}[nested(),] == "known"
    assert nested() != RegionNode((nested(),))


def test_trees_are_different():
    assert [shape(tree) for tree in uniform_trees(3)] == [
        "0 1 2",
        "[0] [1] [2]",  # every stage
        "[0] 1 [2]",
        "[0] 1 2",
        "[0 1 2]",  # 1 segment
        "[0 1] [2]",
        "[0 1] 2",  # the last one is kept
        "[0] [1] 2",
    ]


def test_longer_segments_come_first():
    assert {"[0 1 2] [3 4]", "[0 1 2] 3 4", "[0 1] [2 3] [4]"} <= {shape(tree) for tree in uniform_trees(5)}


def test_the_persistent_solver_is_never_worse():
    for seed in range(10):
        chain = random_chain(seed, 8, 1)
        for tree in uniform_trees(len(chain.stages)):
            outcome = interpret(chain, tree)

            assert Within(chain, outcome.peak_bytes, slot_bytes=1).cost(outcome.peak_bytes) <= outcome.cost, shape(tree)


def test_small_numbers_alone():
    few = uniform_trees(30, most=4)

    assert len(few) == 2 + 3 + 2 * 4 - 1  # one segment that is kept keeps everything
    assert few[:2] == uniform_trees(30)[:2]
    assert [tree for tree in uniform_trees(30) if tree in few] == few
