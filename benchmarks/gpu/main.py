"""A half hour on a CUDA device: sections with a deadline each, a JSON file after each, nothing to install.

    PYTHONPATH=src:tests:examples:benchmarks python3 benchmarks/gpu/main.py [--out FOLDER] [--emulated] [SECTION ...]

Each section runs in a process of its own, so that one that crashes or hangs costs no other its results.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

# Seconds after which a section is stopped; what it has found by then stays.
SECTIONS = {
    "facts": 180,
    "tests": 240,
    "suites": 220,
    "regions": 120,
    "plans": 150,
    "frontier": 480,
    "offload": 240,
    "optimizer": 120,
}

# Runs a section on the device of tests/emulator, which has to be there before torch is imported.
_EMULATED = (
    "import emulator, runpy, sys; emulator.install(); del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], help=f"of {', '.join(SECTIONS)}; all if none")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="the folder of the JSON files")
    parser.add_argument("--emulated", action="store_true", help="on the emulated device, with tiny sizes")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Python finds this folder by the section's path; as one of all paths, its files would hide tests of their names.
    folders = ("src", "tests", "examples", "benchmarks", *(["benchmarks/gpu"] if arguments.emulated else []))
    paths = [str(ROOT / folder) for folder in folders]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    for section in arguments.sections or SECTIONS:
        path = arguments.out / f"{section}.json"
        start_s = time.perf_counter()
        try:
            python = [sys.executable, *(["-c", _EMULATED] if arguments.emulated else [])]
            command = [*python, str(HERE / f"{section}.py"), str(path)]
            ended = str(subprocess.run(command, env=environment, timeout=SECTIONS[section], check=False).returncode)
        except subprocess.TimeoutExpired:
            ended = f"stopped after {SECTIONS[section]} s"
        print(f"{section}: {ended}, {time.perf_counter() - start_s:.0f} s", flush=True)
        if path.exists():
            print(json.dumps(json.loads(path.read_text()), indent=1)[:6000], flush=True)


if __name__ == "__main__":
    main()
