"""Every benchmark runs, and its README shows what its results say."""

import importlib.util
import sys
from pathlib import Path

import pytest

from forked import run_main
from versions import NEEDS_OWN_SENDS

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# That of a device has no tiny run without one.
MAINS = sorted(main for main in BENCHMARKS.glob("*/main.py") if main.parent.name != "gpu")


NEEDS = {"split_backward": NEEDS_OWN_SENDS}


@pytest.mark.parametrize(
    "main", [pytest.param(main, id=(name := main.parent.name), marks=NEEDS.get(name, ())) for main in MAINS]
)
def test_benchmark_runs_on_tiny_models(main, tmp_path):
    before = {path: path.read_bytes() for path in main.parent.iterdir() if path.is_file()}

    done = run_main(main, "--smoke", folder=tmp_path, timeout=300)

    assert done.code == 0, done.err
    assert done.out
    assert {path: path.read_bytes() for path in main.parent.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.parent.name)
def test_readme_shows_the_results(main, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(f"benchmark_{main.parent.name}", main)
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)
    spec.loader.exec_module(benchmark)

    wrong = benchmark.publish(main.parent, benchmark.run, benchmark.tables, ["--check"])

    assert not wrong, "README.md differs from results.json: run main.py --tables"


def test_there_are_benchmarks():
    assert MAINS
