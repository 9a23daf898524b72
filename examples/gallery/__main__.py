"""Run the examples of the gallery, and write docs/gallery/: the code of each, what it printed, and its picture.

    python examples/gallery              runs all of them and writes the pages
    python examples/gallery NAME ...     runs these alone and prints what they print; nothing is written

An example is a program: what its docstring says becomes the text of its page. Its picture is the file `NAME.png` that
it leaves in the folder where it runs. What it prints goes to `sys.stdout` of this process.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import platform
import runpy
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

# In the order of the gallery.
NAMES = (
    "half_the_memory",
    "expensive_line",
    "choose_a_budget",
    "selective",
    "memory_curve",
    "changing_lengths",
    "to_the_disk",
    "hidden_state",
    "two_optimizers",
    "two_processes",
    "pipeline",
    "long_sequence",
    "neural_ode",
    "guided_sampler",
    "inner_steps",
)
HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
_SHOWN_AS = "examples/gallery"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example as it is written.

    Attributes:
        name: Of its file.
        title: The first line of its docstring, without the full stop.
        text: What follows there.
        code: Its code without the docstring.
    """

    name: str
    title: str
    text: str
    code: str

    @property
    def path(self) -> Path:
        return HERE / f"{self.name}.py"


def example_of(name: str) -> Example:
    source = (HERE / f"{name}.py").read_text()
    docstring = ast.parse(source).body[0]
    title, _, text = docstring.value.value.partition("\n\n")
    code = "\n".join(source.splitlines()[docstring.end_lineno :]).strip()
    return Example(name=name, title=title.removesuffix("."), text=text.strip(), code=code)


def run(example: Example, folder: Path) -> str:
    """Run an example as a program of its own in a folder, and return what it printed."""
    printed, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)  # another number of threads adds in another order
    try:
        with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
            runpy.run_path(str(example.path), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return printed.getvalue().replace(f"{HERE}{os.sep}", f"{_SHOWN_AS}/")


def machine() -> str:
    """What the exact numbers depend on, in words."""
    release = torch.__version__.partition("+")[0]
    return f"torch {release}, one thread of a CPU with {torch.backends.cpu.get_cpu_capability()} ({platform.machine()})"


def page_of(example: Example, printed: str, *, has_picture: bool) -> str:
    picture = f"\n![{example.title}](../assets/gallery/{example.name}.png)\n" if has_picture else ""
    return (
        f"# {example.title}\n\n{example.text}\n\n"
        f'```python title="{_SHOWN_AS}/{example.name}.py"\n{example.code}\n```\n\n'
        f"It prints\n\n```text\n{printed.rstrip()}\n```\n{picture}"
    )


def index_of(examples: list[Example]) -> str:
    rows = "\n".join(f"| [{one.title}]({one.name}.md) | {one.text.splitlines()[0]} |" for one in examples)
    return f"""# Gallery

Small programs that run anywhere within seconds, each with what it printed.
They need the package alone, no data and no GPU; pictures need the extra `plot`, pages `html`.

| Program | It answers, or shows |
| --- | --- |
{rows}

`make gallery` runs all of them and writes these pages, `python examples/gallery NAME` runs one.
A test compares their output with these pages.
The numbers come from {machine()}.
[Recipes](../recipes/index.md) are the same for the frameworks that people train with.
"""


def write(docs: Path) -> None:
    """Run all examples and write their pages."""
    examples = [example_of(name) for name in NAMES]
    pages, pictures = docs / "gallery", docs / "assets" / "gallery"
    for folder in (pages, pictures):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for example in examples:
        print(example.name, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            printed = run(example, Path(folder))
            picture = Path(folder, f"{example.name}.png")
            has_picture = picture.exists()
            if has_picture:
                # A drawing has few colours; with a palette it takes a third of the bytes.
                Image.open(picture).convert("RGB").quantize(96).save(pictures / picture.name, optimize=True)
        (pages / f"{example.name}.md").write_text(page_of(example, printed, has_picture=has_picture))
    (pages / "index.md").write_text(index_of(examples))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these alone, and write nothing")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in NAMES:
            parser.error(f"there is no example {name!r}; there are {', '.join(NAMES)}")
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            print(run(example_of(name), Path(folder)), end="")
    if not options.names:
        write(DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
