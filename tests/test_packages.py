"""What is handed out: the source distribution and the wheel that is built from it, installed where nothing else is."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command, cwd):
    ended = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    place = tmp_path_factory.mktemp("sdist")
    run("-m", "hatchling", "build", "--target", "sdist", "--directory", str(place), cwd=ROOT)
    (found,) = place.glob("torchremat-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """A wheel made from what the source distribution has, and from nothing else."""
    place = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as packed:
        packed.extractall(place, filter="data")
    (source,) = place.iterdir()
    run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(place), cwd=source)
    (found,) = place.glob("torchremat-*.whl")
    return found


def test_a_wheel_has_every_file_of_the_package_and_nothing_else(wheel):
    package = ROOT / "src"
    expected = {
        str(path.relative_to(package))
        for path in (package / "torchremat").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    names = set(zipfile.ZipFile(wheel).namelist())

    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "torchremat/py.typed" in names


def test_a_wheel_runs_where_it_is_alone(wheel, tmp_path):
    bare = tmp_path / "bare"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(bare), str(wheel), cwd=tmp_path)
    program = f"""
import sys
sys.path.insert(0, {str(bare)!r})
import torch
import torchremat.pipeline

assert torchremat.__file__.startswith({str(bare)!r})
for one in ("matplotlib", "plotly", "rich", "scipy", "torch.distributed.pipelining", "transformers", "typer"):
    assert one not in sys.modules, one
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)))
plan = torchremat.plan(model, lambda model: model(torch.ones(64, 64)).sum(), budget="90%", progress=False)
print(plan.peak_bytes <= plan.budget_bytes)
"""

    assert run("-I", "-c", program, cwd=tmp_path).strip().endswith("True")
