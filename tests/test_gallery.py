"""Each example of the gallery runs, and prints what its page says."""

import re
from pathlib import Path

import pytest

from gallery import __main__ as gallery

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "gallery"
EXAMPLES = [gallery.example_of(name) for name in gallery.NAMES]
# The numbers are compared where they are those of the pages: bytes of kernels differ by torch and by CPU.
IS_SAME = gallery.machine() in (PAGES / "index.md").read_text()
_TIMES = re.compile(r"loss \d+\.\d+|\d+\.\d+ ?x\b")  # and losses, which the files of another Python change


def masked(printed):
    """The lines of what was printed without what differs from run to run, and elsewhere without all numbers."""
    pattern = _TIMES if IS_SAME else re.compile(r"\d[\d,]*(\.\d+)?( ?[KMG]iB| ?x\b)?")
    return [" ".join(line.split()) for line in pattern.sub("0", printed).splitlines()]


def test_there_is_a_page_for_each_program_and_a_program_for_each_page():
    programs = {path.stem for path in gallery.HERE.glob("*.py")} - {"__main__"}
    pages = {path.stem for path in PAGES.glob("*.md")} - {"index"}
    in_navigation = re.findall(r"gallery/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())

    assert programs == pages == set(gallery.NAMES)
    assert in_navigation == ["index", *gallery.NAMES]


@pytest.mark.parametrize("example", EXAMPLES, ids=gallery.NAMES)
def test_an_example_prints_what_its_page_says(example, tmp_path):
    page = (PAGES / f"{example.name}.md").read_text()
    shown = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]

    printed = gallery.run(example, tmp_path)

    assert masked(printed) == masked(shown)
    picture = tmp_path / f"{example.name}.png"
    # Code and text of the page are those of the program; it is written by `make gallery`.
    assert page == gallery.page_of(example, shown, has_picture=picture.exists())
    if picture.exists():
        kept = PAGES.parent / "assets" / "gallery" / picture.name
        assert 5_000 < kept.stat().st_size < 60_000


def test_the_index_is_that_of_the_programs():
    text = (PAGES / "index.md").read_text()

    assert re.sub("torch .*", "", text) == re.sub("torch .*", "", gallery.index_of(EXAMPLES))


def test_an_unknown_name_is_an_error_that_lists_those_there_are(capsys):
    with pytest.raises(SystemExit):
        gallery.main(["nothing"])

    assert "there is no example 'nothing'; there are half_the_memory, " in capsys.readouterr().err


def test_a_page_that_says_another_number_is_found():
    if not IS_SAME:
        pytest.skip("numbers are not compared on this machine")

    assert masked("peak 3.10 MiB, 1.57 x") == masked("peak 3.10 MiB, 1.12 x") != masked("peak 3.11 MiB, 1.57 x")
