import re

import pytest

from schedules.brute_force import make_stage, random_chain, shape
from schedules.within import Within
from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, KeepNode, RegionNode
from torchremat.schedules.interpreter import interpret
from torchremat.schedules.uniform import candidates, every, keep_all, segments


def chain_of(count):
    return Chain(stages=(make_stage(),) * count)


def test_shapes():
    chain = chain_of(5)

    assert shape(keep_all(chain)) == "0 1 2 3 4"
    assert shape(every(chain, 1)) == "[0] [1] [2] [3] [4]"
    assert shape(every(chain, 2)) == "[0] 1 [2] 3 [4]"
    assert shape(segments(chain, 1)) == "[0 1 2 3 4]"
    assert shape(segments(chain, 2)) == "[0 1 2] [3 4]"
    assert shape(segments(chain, 2, keep_last=True)) == "[0 1 2] 3 4"
    assert shape(segments(chain, 5)) == "[0] [1] [2] [3] [4]"


def test_candidates_are_different_and_named():
    assert {name: shape(tree) for name, tree in candidates(chain_of(3)).items()} == {
        "keep all": "0 1 2",
        "every stage": "[0] [1] [2]",
        "every 2nd stage": "[0] 1 [2]",
        "every 3rd stage": "[0] 1 2",
        "1 segment": "[0 1 2]",
        "2 segments": "[0 1] [2]",
        "2 segments, last kept": "[0 1] 2",
        "3 segments, last kept": "[0] [1] 2",
    }


def test_the_persistent_solver_is_never_worse():
    for seed in range(10):
        chain = random_chain(seed, 8, 1)
        for name, tree in candidates(chain).items():
            outcome = interpret(chain, tree)

            assert Within(chain, outcome.peak_bytes, slot_bytes=1).cost(outcome.peak_bytes) <= outcome.cost, name


def test_counts_are_checked():
    with pytest.raises(ScheduleError, match="step=0 must be at least 1"):
        every(chain_of(3), 0)
    with pytest.raises(ScheduleError, match="count=3, but there are 2 stages; give 1 to that"):
        segments(chain_of(2), 3)


def test_regions_are_regions():
    assert every(chain_of(2), 2) == (RegionNode((KeepNode(0),)), KeepNode(1))


def test_the_trees_with_small_numbers_are_those_that_all_have():
    chain = chain_of(30)
    every_name, few = candidates(chain), candidates(chain, most=4)

    assert list(few) == [name for name in every_name if not any(int(n) > 4 for n in re.findall(r"\d+", name))]
    assert all(every_name[name] == tree for name, tree in few.items())
