"""The command line of a benchmark, its results on disk, and the tables that its README shows.

A benchmark is a folder with a `main.py` that has two functions: `run(smoke)` returns the results as data, and
`tables(results)` makes Markdown tables of them by name. `publish` does the rest:

    main.py            run, write results.json, put the tables into README.md, print them; 1 if a bar is missed
    main.py --smoke    a few seconds on tiny models, to see that it works; writes nothing
    main.py --tables   make the tables again from results.json
    main.py --check    1 if README.md does not show what results.json says
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.markdown import Markdown

MIB = 2**20


def publish(
    folder: Path,
    run: Callable[[bool], dict[str, object]],
    tables: Callable[[dict[str, object]], dict[str, str]],
    arguments: Sequence[str] | None = None,
) -> int:
    """Do what the command line, or `arguments` in its place, asks for; returns the exit code."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few seconds on tiny models; writes nothing")
    parser.add_argument("--tables", action="store_true", help="make the tables again from results.json")
    parser.add_argument("--check", action="store_true", help="fail if README.md is not what results.json says")
    options = parser.parse_args(arguments)
    path, readme = folder / "results.json", folder / "README.md"

    if options.check or options.tables:
        results = json.loads(path.read_text())
        text = _with_tables(readme.read_text(), _all_tables(results, tables))
        if options.check:
            return int(text != readme.read_text())
        readme.write_text(text)
        return 0

    torch.set_num_threads(1)  # with more, waiting for a core that another process has is most of what is measured
    results = {"environment": environment(), **run(options.smoke)}
    if options.smoke:
        results.pop("bars")  # they are about the real models
    made = _all_tables(results, tables)
    for table in made.values():
        Console(width=160 if not sys.stdout.isatty() else None).print(Markdown(table))
    if options.smoke:
        return 0
    path.write_text(json.dumps(results, indent=1) + "\n")
    readme.write_text(_with_tables(readme.read_text(), made))
    return int(not all(bar["met"] for bar in results.get("bars", ())))


def bar(claim: str, figure: str, met: bool) -> dict[str, object]:
    """Return one bar: what was asked for, what was found, and whether that is enough."""
    return {"claim": claim, "figure": figure, "met": bool(met)}


def environment() -> dict[str, object]:
    """Return versions and the class of the hardware."""
    return {
        "processor": f"{platform.machine()} CPU, {torch.get_num_threads()} thread",
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; all columns but the first are aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / MIB:.2f}"


def mflop(flops: float) -> str:
    """Return flops in millions."""
    return f"{flops / 1e6:.0f}"


def yes(fact: bool) -> str:
    """Return a fact as a word."""
    return "yes" if fact else "**no**"


def _all_tables(results: dict[str, object], tables: Callable[[dict[str, object]], dict[str, str]]) -> dict[str, str]:
    made = tables(results)
    rows = [[one["claim"], one["figure"], "met" if one["met"] else "**missed**"] for one in results.get("bars", ())]
    if rows:
        made["bars"] = markdown(["Bar", "Found", ""], rows)
    made["environment"] = ", ".join(f"{name} {value}" for name, value in results["environment"].items())
    return made


def _with_tables(text: str, made: dict[str, str]) -> str:
    """Return the text with what is between `<!-- name -->` and `<!-- end -->` replaced by the table of that name."""
    for name, table in made.items():
        mark = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(\n?<!-- end -->)", re.DOTALL)
        text, count = mark.subn(lambda match, table=table: f"{match[1]}\n{table}\n\n<!-- end -->", text)
        if count != 1:
            raise ValueError(f"README.md has {count} places for the table `{name}`, not one")
    return text
