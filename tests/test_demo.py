"""The demo in its tiny mode, and that it fails loudly."""

import pytest

import demo
import torchremat

NAMES = ["plan-30.json", "plan-50.json", "plan-75.json", "plan-smallest.json"]


def test_it_ends_well_and_writes_its_files(tmp_path, capsys):
    assert demo.main(["--smoke", "--out", str(tmp_path)]) == 0

    printed = capsys.readouterr().out
    assert "FAILED" not in printed and "bit-identical" in printed
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == NAMES
    assert (tmp_path / "memory.png").stat().st_size > 10_000
    for share in (75, 50, 30):
        assert torchremat.Plan.load(tmp_path / f"plan-{share}.json").budget == f"{share}%"


def test_a_wrong_bit_is_found_and_said(tmp_path, capsys, monkeypatch):
    finish = demo.Run.finish

    def damaged(run, rows):
        finish(run, rows)
        if run.name == "50%":
            run.losses[1] = run.losses[1] + 1e-6
            run.parameters[0][0, 0] += 1e-3
            run.optimizer_peak_bytes = 2 * run.plan.budget_bytes

    monkeypatch.setattr(demo.Run, "finish", damaged)
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
