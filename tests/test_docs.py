"""The code in README and docs runs, and every public name and every error has its place there."""

import inspect
import re
from pathlib import Path

import pytest

import torchremat
from torchremat import errors

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page):
    """Yield the line number and the code of each block that is marked `python`."""
    for match in re.finditer(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        yield page.read_text()[: match.start()].count("\n") + 1, match.group(1)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}

    # One page is one program. Empty lines in front make a traceback show the line of the page.
    for line, code in python_blocks(page):
        exec(compile("\n" * line + code, str(page), "exec"), names)


def test_every_public_name_is_in_the_api():
    documented = re.findall(r"^::: torchremat\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    names = [name for name in torchremat.__all__ if not inspect.isclass(vars(errors).get(name))]

    assert sorted(set(documented) - {"errors"}) == names
    assert "errors" in documented


def test_every_error_is_explained():
    headings = re.findall(r"^## `(\w+)`$", (ROOT / "docs" / "when-it-goes-wrong.md").read_text(), re.MULTILINE)
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]

    assert headings == sorted(set(classes) - {"TorchrematError"})
