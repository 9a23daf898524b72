"""How far planning is: what is told of it, in which order, and what is said of a search that had no time left."""

import itertools

import pytest
from torch import nn

import torchremat
from logs import Log
from planning.kinds import inputs, linear, square
from probes.planning import SearchBudget
from torchremat import Planner, Progress, UnsupportedError


def subject():
    x = inputs(512, 64)
    model = nn.Sequential(*(nn.Sequential(linear(), nn.GELU(), linear()) for _ in range(6)))
    return model, lambda model: square(model(x))


@pytest.fixture(scope="module")
def told():
    """What is told of a planner, of a plan, and of a frontier, each by itself."""
    seen = []

    def taken():
        found = tuple(seen)
        seen.clear()
        return found

    model, step = subject()
    planner = Planner(model, step, cost="flops", certify=True, progress=seen.append)
    made = taken()
    planner.plan("60%")
    planned = taken()
    planner.frontier(points=5)
    return made, planned, taken()


def phases(told):
    return [phase for phase, _ in itertools.groupby(one.phase for one in told)]


def shares(told):
    return [one.share for one in told if one.share is not None]


def test_fit_tells_too():
    seen, (model, step) = [], subject()

    torchremat.fit(model, step, budget="60%", cost="flops", operators=False, progress=seen.append)

    assert phases(seen)[:2] == ["profiling", "tables"]  # there are no options to find


def test_a_planner_profiles_and_finds_options(told):
    made, _, _ = told

    assert phases(made) == ["profiling", "options"]
    assert [one.share for one in made if one.phase == "profiling"] == [None]


def test_a_plan_goes_from_the_plain_peak_through_the_search_to_the_certificate(told):
    _, planned, _ = told

    assert phases(planned)[:2] == ["profiling", "tables"]
    assert phases(planned)[-1] == "certificate"
    assert {"tables", "judging", "polishing"} <= set(phases(planned))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_shares_never_fall(told, which):
    found = shares(told[which])

    assert all(0 <= share <= 1 for share in found)
    assert found == sorted(found)
    assert found[0] <= 0.25


def test_a_plan_is_most_of_the_way_when_the_lowest_peak_is_sought(told):
    _, planned, _ = told

    assert max(shares(planned)) > 0.75


def test_each_budget_of_a_frontier_is_a_part_of_it(told):
    _, _, found = told

    # The lowest peak is known from the plan, and the plain step needs no search: four of five budgets are sought.
    assert {int((share - 0.25) / 0.15) for share in shares(found)} == {0, 1, 2, 3}


def test_the_best_plan_so_far_is_told_and_forgotten_with_its_budget(told):
    _, planned, found = told
    best = [one.slowdown for one in planned]

    assert best[0] is None
    assert best[-1] > 1
    assert [one.slowdown for one in found if one.phase == "judging"].count(None) > 0


def test_the_plan_does_not_depend_on_whether_anybody_watches():
    model, step = subject()
    seen = []

    watched = torchremat.plan(model, step, budget="60%", cost="flops", progress=seen.append)
    alone = torchremat.plan(model, step, budget="60%", cost="flops")

    assert seen
    assert watched.tree == alone.tree
    assert watched.peak_bytes == alone.peak_bytes


def test_what_a_watcher_raises_ends_planning():
    model, step = subject()

    def stop(progress):
        if progress.phase == "polishing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torchremat.frontier(model, step, cost="flops", points=3, progress=stop)


def test_what_is_no_function_is_refused_before_the_step_runs():
    ran = Log()

    with pytest.raises(UnsupportedError, match=r"progress=True: expected a function .*or False for none"):
        Planner(nn.Linear(2, 2), ran.append, progress=True)
    assert not ran


def test_parts_of_parts_share_the_whole():
    told = []
    search_budget = SearchBudget(observer=told.append)

    with search_budget.running():
        with search_budget.part(0.0, 0.5):
            for _ in search_budget.parts("ab"):
                search_budget.tell("judging")
                search_budget.tell("polishing", 0.5)
        search_budget.tell("judging", 0.25)  # less than is told already
        with search_budget.part(0.5, 1.0):
            search_budget.tell("tables")
            search_budget.tell("certificate", None)

    assert [one.share for one in told] == [0.0, 0.125, 0.25, 0.375, 0.375, 0.5, None]
    assert told[-1] == Progress(phase="certificate", share=None, slowdown=None)


def test_what_runs_ahead_of_a_search_counts_in_its_time(monkeypatch):
    # Options had 18 seconds, and the search after them the whole minute that both are said to take.
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    search_budget = SearchBudget(60.0)

    with search_budget.running(0.3):
        assert search_budget.left_s == 18
        now_s += 10
    with search_budget.running():
        assert search_budget.left_s == 50
        with search_budget.running(0.5):
            assert search_budget.left_s == 25
        now_s += 5
        assert search_budget.left_s == 45
    with search_budget.running():
        assert search_budget.left_s == 60


def test_a_plan_says_that_the_time_ran_out(tmp_path):
    model, step = subject()
    planner = Planner(model, step, cost="flops")
    whole = planner.plan("60%")
    hurried = Planner(model, step, cost="flops")
    hurried.solver.search_budget.most_s = 0.0

    plan, frontier = hurried.plan("60%"), hurried.frontier(points=3)
    plan.save(tmp_path / "plan.json")

    sentence = "the search ended at its cap of 60 s with the best found by then; there may be better."
    assert plan.ran_out and sentence in str(plan)
    assert frontier.ran_out and sentence in str(frontier)
    assert frontier.plan(frontier.points[0]).ran_out
    assert torchremat.Plan.load(tmp_path / "plan.json").ran_out
    assert plan.floor_bytes <= plan.budget_bytes
    assert not whole.ran_out and "the search ended" not in str(whole)
    assert not planner.frontier(points=3).ran_out
