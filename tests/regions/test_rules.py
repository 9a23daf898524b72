"""The rules by which regions hold, stop and let go, on numbers; that they are obeyed is tested with what calls them."""

import pytest

from torchremat.regions.rules import ended, external_inputs, last_needed, last_uses


def test_a_region_holds_what_it_neither_has_nor_makes_each_once():
    # Call 0 is given 7 and makes 8; call 1 is given both, and 9 twice.
    assert external_inputs([7], set()) == [7]
    assert external_inputs([8, 9, 7, 9], {7, 8}) == [9]


@pytest.mark.parametrize(
    ("waiting", "last"),
    [({0, 1, 2, 3}, 3), ({0, 2}, 2), ({0}, 0), (set(), -1)],
)
def test_a_recompute_stops_at_the_last_save_that_is_waited_for(waiting, last):
    asked = []

    def waits(number):
        asked.append(number)
        return number in waiting

    assert last_needed(4, waits) == last
    assert asked == list(range(3, max(last, 0) - 1, -1))  # and what lies before it is not looked at


def test_a_link_goes_with_the_last_call_that_takes_it():
    #    call 2 takes a    call 3 takes a, b    call 4 takes c
    last_use = last_uses([["a"], ["a", "b"], ["c"]], 2)

    assert last_use == {"a": 3, "b": 3, "c": 4}
    assert ended(["a", "b", "c"], last_use, 2) == []
    assert ended(["a", "b", "c"], last_use, 3) == ["a", "b"]
    assert ended(["c", "an output that no call takes"], last_use, 3) == ["an output that no call takes"]
