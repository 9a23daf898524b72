from schedules.brute_force import random_chain, shape
from schedules.within import Within
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.uniform import uniform_trees


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
