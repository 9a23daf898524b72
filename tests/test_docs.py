"""The code in README and docs runs, and every public name and every error has its place there."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

import torchremat
from test_conventions import LADDER
from torchremat import errors, extend, pipeline, policies
from torchremat.pipeline import balance, skip
from versions import NEEDS_OWN_SENDS, NEEDS_SAVED_TENSORS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(page):
    """Yield each block marked `python`: its line, its code, and what it prints if a block marked `text` follows it."""
    text = page.read_text()
    pattern = r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?"
    for match in re.finditer(pattern, text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 1, match.group(1), match.group(2)


def masked(printed):
    """The lines of what was printed without what depends on the machine: numbers, units, and the rows of a plan."""
    printed = re.sub(r"\d+(\.\d+)?", "0", printed)
    printed = re.sub(r"0 ([KMG]i)?B\b", "0 bytes", printed)
    printed = re.sub(
        r"^\S+ +0 bytes .* (recompute|keep( 0 of 0 operators)?)$|^\.\.\.$", "", printed, flags=re.MULTILINE
    )
    return [" ".join(line.split()) for line in printed.splitlines() if line.strip()]


def needs_package(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}, which is not installed")


# Packages that the tests have no other use for are not in the lock file; who has them runs these pages.
NEEDS = {
    "docs/saved-tensors.md": NEEDS_SAVED_TENSORS,
    "docs/many-machines.md": NEEDS_OWN_SENDS,
    "docs/recipes/diffusion.md": needs_package("diffusers"),
    "docs/recipes/graphs.md": (
        needs_package("torch_geometric"),
        pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    ),
    "docs/recipes/images.md": needs_package("timm"),
    "docs/recipes/lora.md": pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
    "docs/recipes/trl.md": (
        needs_package("trl"),
        pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated"),
    ),
    "docs/recipes/lightning.md": (
        pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
        pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
    ),
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=(name := str(page.relative_to(ROOT))), marks=NEEDS.get(name, ())) for page in PAGES]
)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    # One page is one program, in a file that messages can quote. Empty lines make its lines those of the page.
    program, lines = tmp_path / "train.py", [""] * (len(page.read_text().splitlines()) + 1)
    for line, code, _ in python_blocks(page):
        lines[line : line + code.count("\n")] = code.splitlines()
    program.write_text("\n".join(lines))

    for line, code, shown in python_blocks(page):
        exec(compile("\n" * line + code, str(program), "exec"), names)
        printed = capsys.readouterr().out
        if shown is not None:
            assert masked(printed) == masked(shown)


def test_every_public_class_is_in_the_glossary():
    glossary = (ROOT / "docs" / "concepts.md").read_text().partition("## Glossary")[2]
    classes = {name for name in torchremat.__all__ if inspect.isclass(getattr(torchremat, name))}

    assert classes - {name for name, value in vars(errors).items() if inspect.isclass(value)} <= set(
        re.findall(r"`(\w+)`", glossary)
    )


def test_the_library_again_has_200_lines():
    page = ROOT / "docs" / "how-it-works.md"

    assert 150 < sum(code.count("\n") for _, code, _ in python_blocks(page)) <= 200


# Modules as a whole, and names without a door.
ELSEWHERE = {
    "errors",
    "interop.accelerate.prepare",
    "interop.accelerate.within_budget",
    "interop.lightning.MemoryBudget",
    "interop.transformers.MemoryBudget",
    "interop.torch_checkpoint",
    "interop.torchgpipe",
    "measuring.store_speeds.Bandwidth",
    "measuring.store_speeds.Speed",
    "pipeline.batchnorm.DeferredBatchNorm",
    "pipeline.batchnorm.convert_deferred_batch_norm",
    "pipeline.timeline.Timeline",
    "planning.compiling.partitioning.Partition",
    "planning.results.plan_data.Forecast",
    "planning.results.plan_data.Point",
    "planning.results.plan_data.Choice",
    "planning.results.plan_data.PlannedUnit",
    "planning.results.plan_data.Provenance",
    "planning.plan_options.PlanOptions",
    "planning.training.report.StepComparison",
    "planning.shapes.classes.PlannedShape",
    "planning.simulator.offload_choices.StoredUnit",
    "reports.bars.progress_bar",
    "reports.plots",
}


def test_every_public_name_is_in_the_api():
    documented = re.findall(r"^::: torchremat\.([\w.]+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    names = {name for name in torchremat.__all__ if name != "extend" and not inspect.isclass(vars(errors).get(name))}
    doors = (extend, policies, pipeline, skip, balance)
    behind_doors = {f"{door.__name__.removeprefix('torchremat.')}.{name}" for door in doors for name in door.__all__}

    assert sorted(documented) == sorted(names | behind_doors | ELSEWHERE)


def test_the_house_has_the_parts_that_there_are():
    # It named a part that was called otherwise by then, and left one out.
    text = (ROOT / "docs" / "how-it-works.md").read_text().partition("## The house")[2]

    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == LADDER


def test_every_error_is_explained():
    headings = re.findall(r"^## `(\w+)`$", (ROOT / "docs" / "when-it-goes-wrong.md").read_text(), re.MULTILINE)
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value)]

    assert headings == sorted(set(classes) - {"TorchrematError"})
