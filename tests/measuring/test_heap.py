"""The collector keeps from what lay on the heap before a block, and comes back to it afterwards."""

import gc
from weakref import ref

import pytest

from probes.memory import heap, heap_set_aside


class Knot:
    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch):
    monkeypatch.setattr(heap, "_is_set_aside", False)  # as it is for all other tests
    gc.unfreeze()
    yield
    gc.freeze()  # as it was, so that what all tests share is not collected again


def garbage():
    return ref(Knot())


def test_garbage_from_before_stays_for_the_block():
    before = garbage()

    with heap_set_aside():
        inside = garbage()
        gc.collect()
        assert before() is not None
        assert inside() is None

    gc.collect()
    assert before() is None


def test_an_error_ends_it_too():
    before = garbage()

    with pytest.raises(KeyboardInterrupt), heap_set_aside():
        raise KeyboardInterrupt

    gc.collect()
    assert before() is None
    assert gc.get_freeze_count() == 0


def test_a_block_within_another_does_not_ask_how_much_is_frozen(monkeypatch):
    # The collector walks through all of it to tell, and a plan opens dozens of blocks within blocks.
    asked = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: asked.append(1))

    with heap_set_aside(), heap_set_aside():
        inside = garbage()
        with heap_set_aside():
            assert inside() is None
    with heap_set_aside():
        pass

    assert len(asked) == 2


def test_a_heap_that_the_caller_has_frozen_stays_frozen():
    frozen = garbage()
    gc.freeze()
    later = garbage()

    with heap_set_aside():
        assert later() is None

    assert gc.get_freeze_count() > 0
    gc.collect()
    assert frozen() is not None


def test_objects_that_are_not_young_are_visited_rarely_in_the_block_and_as_before_after_it():
    young, middle, old = gc.get_threshold()

    with heap_set_aside():
        inside = gc.get_threshold()

    assert inside == (young, 10 * middle, old)
    assert gc.get_threshold() == (young, middle, old)
