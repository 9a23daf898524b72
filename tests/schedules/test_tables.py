import math
from dataclasses import replace

import pytest

from schedules.brute_force import evaluate, make_option, make_stage, random_chain, span, trees
from torchremat.schedules.chain import Chain, KeepNode, RegionNode
from torchremat.schedules.interpreter import Outcome, interpret
from torchremat.schedules.tables import INFINITE, Tables, first_finite


@pytest.mark.parametrize(("stages", "options", "chains"), [(2, 3, 20), (3, 2, 60), (4, 1, 150), (5, 1, 20)])
def test_top_row_is_the_least_cost_at_every_limit(stages, options, chains):
    # The trees that are read off a table may be right where the table is not; so here is the table itself.
    for seed in range(chains):
        chain = random_chain(seed, stages, options)
        outcomes = [evaluate(chain, forest) for forest in trees(chain)]
        least = [math.inf] * 80
        for peak, cost in outcomes:
            if peak < len(least):
                least[peak] = min(least[peak], cost)
        for limit in range(1, len(least)):
            least[limit] = min(least[limit], least[limit - 1])

        top = Tables(chain, slot_bytes=1, slots=len(least) - 1).top[0]

        assert top.tolist() == least, seed


def test_a_nested_region_is_not_run_where_its_forward_does_not_fit():
    # The tail leaves room for one region alone, which holds 1. Its recompute runs at the base of stage 2, which is 4.
    # There 0 and 1 cannot run unsaved in 16 (4 + 1 + 12), and cannot both be kept beside stage 2 (4 + 6 + 9 + 7). So
    # only 0 is nested, and 1 takes its second option: 1 + 1 + 1 and 50, and 1 for the recompute of 0. Random chains
    # come to such a place once in a thousand.
    first = make_stage(make_option(6, peak=6, stopped=6, back=0))
    plain, small = make_option(8, peak=8, stopped=8, back=0), make_option(0, cost=50, peak=0, stopped=0, back=0)
    last = make_stage(make_option(6, peak=6, stopped=6, back=0), backward_base_bytes=4)
    chain = Chain(stages=(first, make_stage(plain, small, drop=12), last), tail_bytes=16)

    assert Tables(chain, slot_bytes=1, slots=17).top[0, 17] == 54
    tree = (RegionNode((RegionNode((KeepNode(0),)), KeepNode(1, 1), KeepNode(2))),)
    assert interpret(chain, tree) == Outcome(peak_bytes=17, cost=54)


def test_rows_fall_with_memory():
    tables = Tables(random_chain(0, 12, 2), slot_bytes=3, slots=50)

    for rows in [*tables.v, *tables.w, tables.top]:
        for row in rows:
            low = first_finite(row)
            assert (row[:low] == INFINITE).all()
            assert (row[low:-1] >= row[low + 1 :]).all()


def test_equal_stretches_have_equal_tables():
    # The blocks of the second chain differ in their cost by less than the tables can tell, so none of them is taken
    # for another one.
    period = random_chain(1, 3, 2).stages
    same = Chain(stages=period * 4, tail_bytes=2)
    costs = [stage.forward * (1 + number * 1e-12) for number, stage in enumerate(same.stages)]
    unlike = replace(same, stages=tuple(replace(s, forward=c) for s, c in zip(same.stages, costs, strict=True)))
    assert len(set(same.stages)) == 3
    assert len(set(unlike.stages)) == 12

    found, expected = (Tables(chain, slot_bytes=1, slots=60) for chain in (same, unlike))

    assert (found.top == expected.top).all()
    assert all((a == b).all() for a, b in zip(found.v, expected.v, strict=True))
    assert all((a == b).all() for a, b in zip(found.w, expected.w, strict=True))


def test_tables_without_time_know_no_regions():
    # What is left are trees that keep every stage.
    chain = random_chain(3, 6, 2)
    full = Tables(chain, slot_bytes=1, slots=120)

    cut = Tables(chain, slot_bytes=1, slots=120, most_seconds=-1.0)

    least = sum(min(option.cost for option in stage.options) for stage in chain.stages)
    assert cut.top[0, -1] == full.top[0, -1] == least
    assert first_finite(cut.top[0]) > first_finite(full.top[0])
    assert all((rows == INFINITE).all() for rows in (*cut.v, *cut.w))


@pytest.mark.parametrize("borders", [{1}, {2}, {1, 3}])
def test_no_region_spans_a_border(borders):
    def spans(node):
        return isinstance(node, list) and any(span(node)[0] < border <= span(node)[-1] for border in borders)

    for seed in range(60):
        chain = replace(random_chain(seed, 4, 1), borders=frozenset(borders))
        least = [math.inf] * 80
        for peak, cost in (evaluate(chain, forest) for forest in trees(chain) if not any(map(spans, forest))):
            if peak < len(least):
                least[peak] = min(least[peak], cost)
        for limit in range(1, len(least)):
            least[limit] = min(least[limit], least[limit - 1])

        assert Tables(chain, slot_bytes=1, slots=len(least) - 1).top[0].tolist() == least, seed


def loops(seed, *, differ=0.0):
    """Stages, five equal ones, a stage, and seven equal ones, with borders; their costs may differ by a little."""
    one, other, before, between = random_chain(seed, 4, 2).stages
    stages = [before, *(one,) * 5, between, *(other,) * 7]
    stages = [replace(stage, forward=stage.forward * (1 + number * differ)) for number, stage in enumerate(stages)]
    return Chain(stages=tuple(stages), tail_bytes=2, borders=frozenset({1, 6, 7, 14}))


def test_equal_steps_share_their_tables():
    for seed in range(20):
        chains = loops(seed), loops(seed, differ=1e-12)
        found, expected = (Tables(chain, slot_bytes=1, slots=70) for chain in chains)

        assert (found.top == expected.top).all()
        assert all((a == b).all() for a, b in zip(found.v, expected.v, strict=True))
        assert all((a == b).all() for a, b in zip(found.w, expected.w, strict=True))
        # A row for each length, in place of one for each stretch.
        assert found.v[7].base is found.v[13].base is not None
        assert len(found.v[7].base) == len(found.w[13].base) == 7


def test_tables_of_equal_steps_without_time_know_no_regions():
    chain = loops(3)
    full = Tables(chain, slot_bytes=1, slots=200)

    cut = Tables(chain, slot_bytes=1, slots=200, most_seconds=-1.0)

    assert not cut.are_whole
    assert cut.top[0, -1] == full.top[0, -1]
    assert first_finite(cut.top[0]) > first_finite(full.top[0])
    assert all((rows == INFINITE).all() for rows in (*cut.v, *cut.w))
