"""The program for a real device runs on the emulated one, so that its first run there is no debugging."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = Path(__file__).parents[2] / "benchmarks" / "gpu" / "main.py"


@pytest.mark.parametrize("section", ["frontier", "offload", "regions"])
def test_a_section_finds_what_it_looks_for(section, tmp_path):
    command = [sys.executable, str(MAIN), "--emulated", "--out", str(tmp_path), section]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)

    assert ended.returncode == 0, ended.stderr
    found = json.loads((tmp_path / f"{section}.json").read_text())
    assert found
    errors = {name: one["found"]["error"] for name, one in found.items() if "error" in one["found"]}
    assert errors == {}
    if section == "frontier":
        for one in found.values():
            assert max(one["found"]["over budget"].values()) <= 0
            assert all(report["exact"] for report in one["found"]["verified"].values())
    if section == "offload":
        assert found["wide"]["found"]["freed, share of what was kept"] > 0.5
