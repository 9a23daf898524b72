"""Every benchmark runs, and its README shows what its results say."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
MAINS = sorted(BENCHMARKS.glob("*/main.py"))


def run(main, option):
    return subprocess.run([sys.executable, main, option], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.parent.name)
def test_benchmark_runs_on_tiny_models(main):
    before = {path: path.read_bytes() for path in main.parent.iterdir() if path.is_file()}

    done = run(main, "--smoke")

    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert {path: path.read_bytes() for path in main.parent.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("main", MAINS, ids=lambda main: main.parent.name)
def test_readme_shows_the_results(main):
    done = run(main, "--check")

    assert done.returncode == 0, done.stderr or "README.md differs from results.json: run main.py --tables"


def test_there_are_benchmarks():
    assert MAINS
