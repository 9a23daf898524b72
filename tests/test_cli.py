"""The command line: what it prints, what it writes, and the exit codes for everything that can be wrong."""

import functools
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import torchremat
from torchremat.cli import commands
from torchremat.cli.commands import app

FACTORIES = """
import torch
from torch import nn

made = {}

def build(blocks=4):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(blocks)))
    x = torch.randn(64, 16)
    made["model"] = model
    return model, lambda model: model(x).square().mean()

def with_optimizer():
    model, step = build(2)
    return model, step, torch.optim.AdamW(model.parameters())

def with_lbfgs():
    model, step = build()
    return model, step, torch.optim.LBFGS(model.parameters())

def never():
    return nn.Linear(2, 2), lambda model: 1 / 0

def no_loss():
    return nn.Linear(2, 2), lambda model: None

def broken():
    raise RuntimeError("of the user's own")

def nothing(): pass
def with_a_width(width): return nothing()
def only_a_model(): return nn.Linear(2, 2)
def no_model(): return 1, 2
def no_step(): return nn.Linear(2, 2), 2
def no_optimizer(): return nn.Linear(2, 2), len, 3

number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "needy.py").write_text("import there_is_no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return tmp_path


def run(*arguments, code=0):
    result = CliRunner().invoke(app, arguments)

    assert result.exit_code == code, result.output
    return result


def test_measure_prints_the_peak():
    result = run("measure", "factories:build")

    assert "peak" in result.stdout and "kept by forward" in result.stdout


def test_measure_counts_the_state_of_an_optimizer_that_has_not_stepped():
    assert "optimizer" in run("measure", "factories:with_optimizer").stdout
    assert "optimizer" not in run("measure", "factories:build").stdout


@pytest.mark.parametrize("arguments", [("measure",), ("plan", "--budget", "100%", "--cost", "flops")], ids=" ".join)
def test_a_loop_that_accumulates_is_said(arguments):
    command, *options = arguments

    assert "gradients" not in run(command, "factories:build", *options).stdout
    assert ", gradients " in run(command, "factories:build", *options, "--accumulates").stdout


def test_measure_draws(folder):
    result = run("measure", "factories:build", "--plot", "step.png")

    assert "wrote step.png" in result.stderr
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


def test_plan_prints_writes_and_draws(folder):
    result = run("plan", "factories:build", "--budget", "60%", "--cost", "flops", "--out", "p.json", "--plot", "p.svg")

    plan = torchremat.Plan.load(folder / "p.json")
    assert result.stdout == f"{plan}\n"
    assert (plan.budget, plan.cost) == ("60%", "flops")
    assert (folder / "p.svg").read_text().startswith("<?xml")


COMMANDS_THAT_PLAN = [("plan", "--budget", "60%"), ("fit", "--budget", "60%"), ("frontier", "--points", "3")]


@pytest.mark.parametrize("command", ["plan", "fit"])
def test_how_far_a_plan_can_be_from_the_best_is_said_to_those_who_ask(folder, command):
    asked, plain = (
        run(command, "factories:build", "--budget", "60%", "--cost", "flops", "--out", "plan.json", *given).stdout
        for given in (("--certify",), ())
    )

    assert re.search(r"^optimal +at most [0-9.]+% of a step above the best of all schedules", asked, re.MULTILINE)
    assert "optimal" not in plain


def test_frontier_prints_writes_and_draws(folder):
    arguments = ("--points", "4", "--cost", "flops", "--out", "f.json", "--plot", "f.svg")
    result = run("frontier", "factories:build", *arguments)

    points = json.loads((folder / "f.json").read_text())["points"]
    rows = [line.split() for line in result.stdout.splitlines() if "%" in line]
    assert len(rows) == len(points) >= 3
    assert rows[0][2:] == ["100%", "0.00", "1.00"]
    assert (folder / "f.svg").read_text().startswith("<?xml")


def test_frontier_offers_a_store(folder):
    arguments = ("--points", "4", "--cost", "flops", "--out", "f.json")
    rows = [
        line.split()
        for line in run("frontier", "factories:build", *arguments, "--store", "disk").stdout.splitlines()
        if "%" in line
    ]

    assert rows[0][-1] == "0.0" and float(rows[-1][-1]) > 0
    points = json.loads((folder / "f.json").read_text())["points"]
    assert points[0]["stored_bytes"] == 0 and points[1]["stored_bytes"] > 0 == points[1]["recomputed_flops"]


@pytest.mark.parametrize("command", COMMANDS_THAT_PLAN)
def test_operators_can_be_left_out(monkeypatch, command):
    asked = []
    real = commands.Planner

    def planner(*arguments, **options):
        asked.append(options["operators"])
        return real(*arguments, **options)

    monkeypatch.setattr(commands, "Planner", planner)
    for option in ("--operators", "--no-operators"):
        run(command[0], "factories:build", *command[1:], "--cost", "flops", option)

    assert asked == [True, False]


@pytest.mark.parametrize("arguments", COMMANDS_THAT_PLAN)
def test_a_terminal_shows_how_far_planning_is(monkeypatch, arguments):
    command, *options = arguments
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    seconds = itertools.count()
    quiet = run(command, "factories:build", *options, "--cost", "flops")
    monkeypatch.setattr(commands, "_err", terminal)
    monkeypatch.setattr(commands, "progress_bar", functools.partial(commands.progress_bar, clock=lambda: next(seconds)))
    shown = run(command, "factories:build", *options, "--cost", "flops")

    assert re.search(r"planning: (certificate|polish|candidates)", terminal.file.getvalue())
    assert quiet.stderr == ""
    assert "planning:" not in quiet.stdout + shown.stdout


def test_a_frontier_without_a_choice_says_so(folder):
    (folder / "factories.py").write_text(
        "import torch\n"
        "def build():\n"
        "    x = torch.randn(4, 8)\n"
        "    return torch.nn.Linear(8, 8), lambda model: model(x).sum()\n"
    )

    assert "nothing to choose" in run("frontier", "factories:build").stdout


def test_a_budget_of_digits_is_bytes():
    assert "10000000" in run("plan", "factories:build", "--budget", "10000000").stdout


@pytest.mark.parametrize("margin", ["0", "0B"])
def test_no_margin_can_be_said(margin):
    run("plan", "factories:build", "--budget", "100%", "--margin", margin)


def test_a_margin_is_part_of_the_budget(folder):
    run("plan", "factories:build", "--budget", "1MB", "--margin", "400kB", "--out", "p.json")

    assert torchremat.Plan.load(folder / "p.json").peak_bytes <= 600_000


def test_verify_compares_with_the_plain_step():
    run("plan", "factories:with_optimizer", "--budget", "85%", "--out", "p.json")
    result = run("verify", "factories:with_optimizer", "--plan", "p.json")

    assert "equal bit for bit" in result.stdout
    assert re.search(r"measured [+-][0-3]\.\d\d%", result.stdout)


def test_verify_fails_above_the_budget(folder):
    run("plan", "factories:build", "--budget", "60%", "--out", "p.json")
    text = (folder / "p.json").read_text()
    budget = torchremat.Plan.load("p.json").budget_bytes
    (folder / "p.json").write_text(text.replace(f'"budget_bytes": {budget}', '"budget_bytes": 1000'))
    result = run("verify", "factories:build", "--plan", "p.json", code=1)

    assert "is above the budget of 1000 B" in result.stderr


def test_a_step_that_cannot_be_compared_is_no_success(monkeypatch, folder):
    def incomparable(*arguments, **options):
        return replace(real(*arguments, **options), is_exact=None, noise=("the loss differs",), is_repeatable=False)

    real = commands.verify
    monkeypatch.setattr(commands, "verify", incomparable)
    run("plan", "factories:build", "--budget", "60%", "--out", "p.json")
    result = run("verify", "factories:build", "--plan", "p.json", code=3)

    assert "NOT COMPARABLE: plain differs from plain by itself, in 1 results" in result.stdout
    assert "The plain step differs from the next one, so its gradients cannot be compared" in result.stderr


@pytest.mark.parametrize("command", ["verify", "fit"])
def test_what_was_compared_with_nothing_is_no_success(monkeypatch, folder, command):
    # It ended with 0, which the page on the command line explains as gradients that are equal bit for bit.
    def compared_with_nothing(*arguments, **options):
        return replace(real(*arguments, **options), is_exact=None, plain_peak_bytes=None)

    real = commands.verify
    monkeypatch.setattr(commands, "verify", compared_with_nothing)
    run("plan", "factories:build", "--budget", "60%", "--out", "p.json")
    options = {"verify": ("--plan", "p.json"), "fit": ("--budget", "60%", "--out", "fitted.json")}[command]
    result = run(command, "factories:build", *options, code=3)

    assert "not compared, the plain step does not fit" in result.stdout
    assert "its gradients cannot be compared" in result.stderr
    assert command == "verify" or torchremat.Plan.load(folder / "fitted.json").budget == "60%"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("ends", "code"), [("return model(x).square().mean()", 0), ("return None", 1)])
def test_warnings_of_the_step_are_said_however_planning_ends(folder, ends, code):
    # They were kept back for after planning, and lost where it failed.
    (folder / "factories.py").write_text(
        "import warnings\n"
        "import torch\n"
        "def build():\n"
        "    x = torch.randn(4, 8)\n"
        "    def step(model):\n"
        "        warnings.warn('the tokenizer is old')\n"
        f"        {ends}\n"
        "    return torch.nn.Linear(8, 8), step\n"
    )
    result = run("plan", "factories:build", "--budget", "100%", code=code)

    assert "factories.py:6: UserWarning: the tokenizer is old" in result.stderr


def test_fit_confirms_and_writes(folder):
    result = run("fit", "factories:with_optimizer", "--budget", "85%", "--out", "p.json")

    assert "equal bit for bit" in result.stdout and "floor" in result.stdout
    assert torchremat.Plan.load(folder / "p.json").budget == "85%"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("factories", "expected `module:factory`"),
        ("factories:", "expected `module:factory`"),
        ("factories.py:build", "expected the name of a module"),
        (".factories:build", "expected the name of a module"),
        ("factories:with_a_width", "has to take no arguments: missing a required argument"),
        ("no.such.thing:build", "there is no module 'no'"),
        ("factories.inner:build", "there is no module 'factories.inner'"),
        ("factories:bild", "module 'factories' has no 'bild'. It defines build, with_optimizer"),
        ("factories:number", "is a int, not a function"),
        ("factories:nothing", "returned None (is a `return` missing?)"),
        ("factories:only_a_model", "returned a Linear; expected (model, step) or (model, step, optimizer)"),
        ("factories:no_model", "returned a tuple (int, int); the first must be a torch.nn.Module"),
        ("factories:no_step", "returned a tuple (Linear, int); the second must be a function"),
        ("factories:no_optimizer", "the third must be a torch.optim.Optimizer"),
    ],
)
def test_a_wrong_target_is_refused(target, message):
    result = run("measure", target, code=2)

    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "factories:build", "--device", "gpu7"], "'gpu7' is not a device"),
        (["plan", "factories:build", "--budget", "60%", "--device", "h100"], "take one, with --on meta"),
        (["frontier", "factories:build", "--device", "device.json"], "take one, with --on meta"),
        (["measure", "factories:build", "--plot", "no/such/folder.png"], "cannot be written"),
        (["plan", "factories:build", "--budget", "60%", "--out", "."], "cannot be written"),
        (["plan", "factories:build", "--budget", "60%", "--out", "/dev/full"], "cannot be written: [Errno 28]"),
        (["plan", "factories:build"], "--budget"),
        (["plan", "factories:build", "--budget", "60%", "--cost", "money"], "money"),
    ],
)
def test_a_wrong_option_is_refused(arguments, message):
    result = run(*arguments, code=2)

    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["measure", "factories:with_lbfgs"], "UnsupportedError: LBFGS.step() has to run by itself"),
        (["plan", "factories:with_lbfgs", "--budget", "60%"], "UnsupportedError: LBFGS.step() has to run by itself"),
        (["measure", "factories:build", "--plot", "step"], "UnsupportedError: step: the file ending sets the format"),
        (
            ["measure", "factories:build", "--plot", "step.bmb"],
            "UnsupportedError: step.bmb: the file ending",
        ),
        (["measure", "factories:no_loss"], "StepError: the step returned None"),
        (["plan", "factories:build", "--budget", "6GB/s"], "BudgetError: '6GB/s' is not a size"),
        (["plan", "factories:build", "--budget", "0"], "BudgetError: a size must be at least 1 B"),
        (["fit", "factories:build", "--budget", "110kB"], "Smallest budget that works"),
        (["fit", "factories:build", "--budget", "60%", "--margin", "much"], "BudgetError: 'much' is not a size"),
        (["verify", "factories:build", "--plan", "factories.py"], "PlanError: factories.py: not a plan, it is"),
        (["verify", "factories:build", "--plan", "no.json"], "PlanError: no.json: cannot be read as a plan"),
    ],
)
def test_an_error_of_the_library_is_one_message(arguments, message):
    result = run(*arguments, code=1)

    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ["measure", "--plot", "step.abc"], "step.abc: the file ending sets the format"),
        (1, ["plan", "--budget", "60%", "--plot", "step.abc"], "step.abc: the file ending sets the format"),
        (1, ["frontier", "--plot", "step.abc"], "step.abc: the file ending sets the format"),
        (1, ["fit", "--budget", "60%", "--plot", "step.abc"], "step.abc: the file ending sets the format"),
        (1, ["plan", "--budget", "9999TiB"], "but cpu has"),
        (1, ["fit", "--budget", "9999TiB"], "but cpu has"),
        (1, ["plan", "--budget", "1MiB", "--margin", "1MiB"], "leaves nothing of the budget of 1.00 MiB"),
        (2, ["plan", "--budget", "60%", "--on", "meta", "--save-device", "cpu.json"], "leave out --on meta"),
    ],
)
def test_what_is_wrong_is_said_before_the_step_is_run(code, arguments, message):
    command, *options = arguments

    result = run(command, "factories:never", *options, code=code)

    assert message in result.stderr


def test_a_plan_for_another_model_is_refused():
    run("plan", "factories:build", "--budget", "60%", "--out", "p.json")

    assert "PlanError" in run("verify", "factories:no_loss", "--plan", "p.json", code=1).stderr


def test_what_user_code_raises_goes_through():
    assert isinstance(run("measure", "factories:broken", code=1).exception, RuntimeError)
    assert isinstance(run("measure", "needy:build", code=1).exception, ModuleNotFoundError)


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def test_it_runs_as_a_module_and_stays_quiet():
    result = python("-m", "torchremat", "measure", "factories:build")

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("peak")


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "torchremat.cli.commands")
    monkeypatch.delitem(sys.modules, "torchremat.__main__", raising=False)

    # A text that a program ends with is written to stderr, and the code is 1.
    with pytest.raises(SystemExit, match=r"needs typer, .* pip install 'torchremat\[cli\]'"):
        importlib.import_module("torchremat.__main__")


def test_stores_are_offered_by_name(folder):
    store = ("--store", "disk")
    planned = run("plan", "factories:build", "--budget", "60%", "--cost", "flops", *store, "--out", "plan.json")

    assert "0.00 GFLOP recomputed in 0 calls" in planned.stdout
    assert "store 0" in planned.stdout
    assert "bit for bit" in run("verify", "factories:build", "--plan", "plan.json", *store).stdout
    assert "0 are given" in run("verify", "factories:build", "--plan", "plan.json", code=1).output
    assert (
        "allowed are disk and host" in run("plan", "factories:build", "--budget", "60%", "--store", "x", code=2).output
    )


def test_a_plan_may_change_the_step_of_the_optimizer():
    ways = ("--release-gradients", "auto", "--optimizer-store", "disk", "--cost", "flops")
    table = run("frontier", "factories:with_optimizer", *ways, "--points", "3").stdout
    planned = run("plan", "factories:with_optimizer", "--budget", "min", *ways, "--out", "plan.json").stdout

    rows = [line.rstrip() for line in table.splitlines() if line.rstrip().endswith(("plain", "released", "stored"))]
    assert "optimizer" in table and rows[-1].endswith("stored")  # the row of the lowest peak
    assert "of gradients: each parameter steps in the backward" in planned
    assert "of optimizer state in Disk(" in planned
    verify = ("verify", "factories:with_optimizer", "--plan", "plan.json")
    assert "bit for bit" in run(*verify, "--optimizer-store", "disk").stdout
    assert "made with Disk(" in run(*verify, code=1).output
    assert "--optimizer-store 'x': allowed are disk and host" in run(*verify, "--optimizer-store", "x", code=2).output
    assert "--parameter-store 'x': allowed are disk and host" in run(*verify, "--parameter-store", "x", code=2).output
    assert "bit for bit" in run("fit", "factories:with_optimizer", "--budget", "min", *ways[:2]).stdout
    lone = run("plan", "factories:build", "--budget", "min", "--release-gradients", "yes", code=1)
    assert "pass the one that trains the model" in lone.output


def test_saved_prints_what_autograd_keeps():
    result = run("saved", "factories:build", "--top", "2")

    assert "saved" in result.stdout and "GeluBackward0.self" in result.stdout
    assert "more" in result.stdout
    assert "more" not in run("saved", "factories:build", "--top", "100").stdout


def test_saved_writes_all_of_it(folder):
    result = run("saved", "factories:with_optimizer", "--out", "saved.json")

    found = json.loads((folder / "saved.json").read_text())
    assert "wrote saved.json" in result.stderr
    # Four blocks save their first result and that of gelu, 64 x 64, and their input, 64 x 16. The input of the first is
    # the step's, but `square` saves the last result.
    assert found["saved_bytes"] == 2 * 2 * 64 * 64 * 4 + 2 * 64 * 16 * 4


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["factories:no_loss"], 1, "StepError: the step returned None"),
        (["factories:build", "--out", "no/such/folder.json"], 2, "cannot be written"),
        (["factories:build", "--top", "0"], 2, "top"),
    ],
)
def test_saved_says_what_is_wrong(arguments, code, message):
    assert message in run("saved", *arguments, code=code).stderr


def test_plan_without_running_for_a_device_that_is_described(folder):
    arguments = ("plan", "factories:build", "--budget", "1GB")
    described = run(*arguments, "--save-device", "device.json")
    by_name = run(*arguments, "--on", "meta", "--device", "h100")
    by_file = run(*arguments, "--on", "meta", "--device", "device.json")
    unknown = run(*arguments, "--on", "meta", "--device", "h10", code=1)

    exact = ("budget_bytes", "peak_bytes", "recomputed_flops")  # the seconds are measured
    frontiers = []
    for where in ((), ("--on", "meta", "--device", "device.json")):
        run("frontier", "factories:build", "--cost", "flops", "--points", "3", "--out", "points.json", *where)
        points = json.loads((folder / "points.json").read_text())["points"]
        frontiers.append([[one[name] for name in exact] for one in points])
    unknown_too = run("frontier", "factories:build", "--on", "meta", "--device", "h10", code=1)

    assert "on h100" in by_name.stdout
    assert frontiers[0] == frontiers[1]
    assert "Did you mean 'h100'?" in unknown_too.stderr
    assert re.search(r"peak +(\S+ \S+)", by_file.stdout)[1] == re.search(r"peak +(\S+ \S+)", described.stdout)[1]
    assert "Did you mean 'h100'?" in unknown.stderr


def test_the_version_is_printed():
    result = run("--version")

    assert result.stdout.startswith("torchremat ") and f"torch {torch.__version__}" in result.stdout


@pytest.mark.parametrize(
    ("command", "option", "begins"),
    [
        (["measure", "factories:build"], "--trace", '{"traceEvents"'),
        (["plan", "factories:build", "--budget", "100% of activations"], "--trace", '{"traceEvents"'),
        (["measure", "factories:build"], "--html", "<!doctype html>"),
        (["saved", "factories:build"], "--html", "<!doctype html>"),
        (["plan", "factories:build", "--budget", "min"], "--html", "<!doctype html>"),
        (["fit", "factories:build", "--budget", "min"], "--html", "<!doctype html>"),
        (["frontier", "factories:build", "--points", "2"], "--html", "<!doctype html>"),
    ],
    ids=lambda one: one[0] if isinstance(one, list) else None,
)
def test_pages_and_traces_are_written(folder, command, option, begins):
    if option == "--html":
        pytest.importorskip("plotly", reason="pages need plotly: pip install 'torchremat[html]'")

    result = run(*command, option, "out.file")

    assert (folder / "out.file").read_text().startswith(begins)
    assert "wrote out.file" in result.stderr


def test_a_page_that_cannot_be_written_is_said_before_the_step_runs(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)

    result = run("plan", "factories:never", "--budget", "60%", "--html", "out.html", code=1)

    assert "pip install 'torchremat[html]'" in result.stderr
