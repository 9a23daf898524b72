"""Imported first by every benchmark: finds the models of examples and tests, and silences the profiler's own log."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "examples"), str(ROOT / "tests")]
# Read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
