"""Runs tests and keeps what failed, with the last line of each error."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 400


def run(path: Path, *arguments: str, seconds: int, processes: int, **environment: str) -> None:
    """Run pytest with these arguments, for so many seconds at most, and write what came of it to `path`."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short"]
        command += [
            "-p",
            "no:cacheprovider",
            "-p",
            "no:benchmark",
            "--no-header",
            "-rN",
            f"--junitxml={report}",
            *arguments,
        ]
        if importlib.util.find_spec("pytest_timeout"):  # a test that hangs is named, and the others are reported
            command += ["--timeout=60", f"--session-timeout={seconds - 20}"]
        if processes:
            command += ["-n", str(processes)]
        outcome = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        found: dict[str, object] = {"ended with": outcome.returncode, "said": outcome.stdout[-600:]}
        if outcome.returncode > 1 or not report.exists():
            found["errors"] = (outcome.stdout[-3000:], outcome.stderr[-3000:])
        if report.exists():
            cases = list(ElementTree.parse(report).iter("testcase"))
            bad = [(case, error) for case in cases for error in (*case.iter("failure"), *case.iter("error"))]
            found["failed"] = {
                f"{case.get('classname')}::{case.get('name')}": (error.get("message") or "")[:_LONGEST]
                for case, error in bad
            }
            found["where"] = {
                f"{case.get('classname')}::{case.get('name')}": (error.text or "")[-1500:] for case, error in bad[:60]
            }
    path.write_text(json.dumps(found, indent=2) + "\n")
