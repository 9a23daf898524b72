"""The demo in its tiny mode, and that it fails loudly."""

import contextlib
import io
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import demo
import torchremat

NAMES = [f"plan-{name}.json" for name in (30, 50, 75, "on-disk", "released", "smallest")]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run of the demo: its exit code, what it printed, the folder of its files, and what it trained."""

    code: int
    printed: str
    out: Path
    runs: list[demo.Run]


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    out, printed, runs, train = tmp_path_factory.mktemp("demo"), io.StringIO(), [], demo.train_and_measure

    def noted(*arguments):
        runs.extend(train(*arguments))
        return runs

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(demo, "train_and_measure", noted)
        code = demo.main(["--smoke", "--out", str(out)])
    return Ended(code=code, printed=printed.getvalue(), out=out, runs=runs)


def test_it_ends_well_and_writes_its_files(ended):
    assert ended.code == 0
    assert "FAILED" not in ended.printed and "bit-identical" in ended.printed
    assert [path.name for path in sorted(ended.out.glob("*.json"))] == NAMES
    assert (ended.out / "memory.png").stat().st_size > 10_000
    for share in (75, 50, 30):
        assert torchremat.Plan.load(ended.out / f"plan-{share}.json").budget == f"{share}%"


def test_each_phase_is_told_where_no_bar_is_drawn(ended):
    told = [line.partition(",")[0] for line in ended.printed.splitlines() if line.endswith("in all")]

    assert told == ["profile and plan", "train", "measure"]


def test_a_wrong_bit_is_found_and_said(ended, tmp_path, capsys, monkeypatch):
    def damaged(run):
        first, second, *losses = run.losses
        parameters = [run.parameters[0] + 1e-3, *run.parameters[1:]]
        peak_bytes = 2 * run.plan.budget_bytes
        return replace(
            run, losses=[first, second + 1e-6, *losses], parameters=parameters, optimizer_peak_bytes=peak_bytes
        )

    runs = [damaged(run) if run.name == "50%" else run for run in ended.runs]
    monkeypatch.setattr(demo, "train_and_measure", lambda *_: runs)
    assert demo.main(["--smoke", "--out", str(tmp_path)]) == 1

    printed = capsys.readouterr().out
    assert "FAILED 50%: 1 losses differ from the plain run's, the first in step 1" in printed
    assert "final parameters differ" in printed
    assert "is above the budget" in printed and "more than 1% off" in printed
    assert "bit-identical" not in printed


def test_a_step_that_takes_too_long_is_a_problem():
    plain, slow = (
        demo.Run(name="", plan=None, model=None, optimizer=None, seconds=[1.0, seconds, 9.0]) for seconds in (1.0, 2.5)
    )

    assert demo.time_problems(plain, plain) == []
    assert demo.time_problems(slow, plain) == ["a step takes 2.50 s, more than 2 times the plain 1.00 s"]


@pytest.mark.parametrize("sizes", [demo.SMOKE, demo.Sizes()])
def test_the_text_is_cut_into_the_same_batches_each_time(sizes):
    text = demo.read_text()

    first, again = demo.draw_batches(text, sizes), demo.draw_batches(text, sizes)

    assert len(first) == sizes.steps
    assert first[0].shape == (sizes.batch, sizes.context + 1)
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
