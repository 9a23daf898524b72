import pytest

from schedules.brute_force import make_option, make_stage
from torchremat.errors import ScheduleError
from torchremat.schedules.chain import Chain, Keep, Region, kept


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
        Region(())


def test_nodes_know_their_stages():
    region = Region((Region((Keep(2, 1), Keep(3))), Keep(4)))

    assert (region.first, region.last) == (2, 4)
    assert list(kept((Keep(1), region))) == [Keep(1), Keep(2, 1), Keep(3), Keep(4)]
