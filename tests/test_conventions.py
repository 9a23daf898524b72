"""The rules of the house that no other tool checks."""

import ast
import builtins
import importlib.util
import inspect
import re
import tokenize
from collections import Counter
from functools import cache
from pathlib import Path

import torchremat
from torchremat import errors

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "torchremat"

# A module may import from its own rung and from those before it.
LADDER = [
    "frames",
    "errors",
    "json_data",
    "_compat",
    "ambient",
    "tensors",
    "state",
    "stores",
    "regions",
    "policies",
    "views",
    "measuring",
    "optimizing",
    "schedules",
    "loops",
    "pipeline",
    "planning",
    "stages",
    "reports",
    "interop",
    "cli",
]
# The doors of the house stand outside the ladder, and nothing inside it imports them.
DOORS = {"torchremat", "torchremat.extend", "torchremat.pipeline", "torchremat.__main__"}


def module_name(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
INSIDE = sorted(MODULES.keys() - DOORS)


@cache
def nodes_in(path):
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(path.read_text())))


def nodes_of(name):
    return nodes_in(MODULES[name])


def imported(name, node):
    """The own modules that one import statement of module `name` reaches."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "torchremat"]
    if not isinstance(node, ast.ImportFrom):
        return []
    source = node.module or ""
    if node.level:
        package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
        source = importlib.util.resolve_name("." * node.level + source, package)
    if source.split(".")[0] != "torchremat":
        return []
    return [f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source for alias in node.names]


def imports(name):
    """The own modules that module `name` imports, those for annotations alone included."""
    return [target for node in nodes_of(name) for target in imported(name, node)]


def rung(name):
    return LADDER.index(name.split(".")[1])


def test_every_module_has_a_rung():
    assert {name.split(".")[1] for name in INSIDE} <= set(LADDER)


def test_imports_point_only_up_the_ladder():
    pairs = [(name, target) for name in INSIDE for target in imports(name)]

    assert [pair for pair in pairs if pair[1] in DOORS] == [], "import the module that defines the name"
    assert [f"{name}: {target}" for name, target in pairs if rung(target) > rung(name)] == []


def test_own_modules_are_imported_at_the_top_of_a_file():
    functions = [
        (name, node)
        for name in INSIDE
        for node in nodes_of(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]

    assert [
        f"{name}.{function.name}: {target}"
        for name, function in functions
        for node in ast.walk(function)
        for target in imported(name, node)
    ] == []


def in_cycles():
    """The modules that import themselves by way of others."""
    # A package whose own module is asked for has begun to import already.
    graph = {name: {target for target in imports(name) if not f"{name}.".startswith(f"{target}.")} for name in MODULES}

    def reached_from(name):
        found, pending = set(), [name]
        while pending:
            new = graph[pending.pop()] - found
            found |= new
            pending += new
        return found

    return {name for name in MODULES if name in reached_from(name)}


def test_imports_have_no_cycle():
    assert in_cycles() == set()


def test_files_and_functions_are_short():
    files = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    functions = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name in MODULES
        for node in nodes_of(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    assert {name: lines for name, lines in files.items() if lines > 400} == {}
    assert {name: lines for name, lines in functions.items() if lines > 80} == {}


def listed(name):
    """What the docstring of a package lists: files and folders, two spaces before what they are for."""
    heads = re.findall(r"^ *((?:\w+(?:\.py|/)?(?:, )?)+)  +\S", ast.get_docstring(nodes_of(name)[0]), re.MULTILINE)
    return [one for head in heads for one in head.split(", ")]


def test_packages_list_their_files():
    packages = {name: path.parent for name, path in MODULES.items() if path.name == "__init__.py"}
    del packages["torchremat"]  # docs/how-it-works.md has its parts
    missing, gone = {}, {}
    for name, folder in packages.items():
        files = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        missing[name] = sorted(files - {"__init__", *(one.removesuffix(".py").rstrip("/") for one in listed(name))})
        gone[name] = [one for one in listed(name) if one.endswith((".py", "/")) and not (folder / one).exists()]

    assert {name: found for name, found in missing.items() if found} == {}
    assert {name: found for name, found in gone.items() if found} == {}


def is_private(name):
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(nodes):
    """The private names of torch that a module uses, and those that it imports from anywhere."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("torchremat._compat"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if is_private(name.removeprefix("torchremat._compat")))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"torch(\.\w+)+", name) and is_private(name):
                yield name


def test_private_names_of_torch_are_used_in_compat_alone():
    others = [name for name in INSIDE if not name.startswith("torchremat._compat")]

    assert [f"{name}: {private}" for name in others for private in private_names(nodes_of(name))] == []


# What describes devices that are not here, or lists the flags of all kinds, and asks no device for anything.
_NAMES_KINDS = ("torchremat._compat", "torchremat.planning.devices")


def questions_about_kinds(nodes):
    """What asks torch about one kind of device, or whether a device is of that kind."""
    for node in nodes:
        if isinstance(node, ast.Attribute) and re.match(r"torch\.(cuda|xpu|mps)\b", ast.unparse(node)):
            yield ast.unparse(node)
        elif isinstance(node, ast.Compare):
            asked = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant)]
            if {"cuda", "xpu", "mps"} & {one for one in asked if isinstance(one, str)}:
                yield ast.unparse(node)


def test_one_file_asks_about_kinds_of_devices():
    others = [name for name in INSIDE if not name.startswith(_NAMES_KINDS)]

    assert [f"{name}: {asked}" for name in others for asked in questions_about_kinds(nodes_of(name))] == []


def test_one_file_walks_frames():
    walks = {
        name
        for name in MODULES
        for node in nodes_of(name)
        if isinstance(node, ast.Attribute) and node.attr in ("f_back", "tb_next")
    }

    assert walks == {"torchremat.frames"}


def test_all_agrees_with_the_imports():
    statements = [node for node in nodes_of("torchremat") if isinstance(node, ast.ImportFrom)]
    names = [alias.asname or alias.name for node in statements for alias in node.names]

    assert torchremat.__all__ == sorted(set(names) - {"annotations"})


def test_no_name_is_both_a_module_and_a_function():
    functions = {name for name in torchremat.__all__ if inspect.isfunction(getattr(torchremat, name))}

    assert functions & {name.rpartition(".")[2] for name in INSIDE} == set()


# The callback of two frameworks, and their base, whose name is in the message of a call without a budget.
TWICE = {"MemoryBudget"}


def test_a_class_name_means_one_class():
    classes = [node for name in MODULES for node in nodes_of(name) if isinstance(node, ast.ClassDef)]
    names = Counter(node.name.lstrip("_") for node in classes)

    assert {name for name, times in names.items() if times > 1} == TWICE


# What users import. To a test all else is private: tests/probes has it for the others, so that when something moves in
# the house, that is the only place which has to know.
OPEN = {"torchremat", "torchremat.extend", "torchremat.errors", "torchremat.policies"}
OPEN |= {f"torchremat.pipeline{name}" for name in ("", ".balance", ".batchnorm", ".skip", ".timeline")}
OPEN |= {f"torchremat.interop.{name}" for name in ("accelerate", "lightning", "torch_checkpoint", "transformers")}
OPEN |= {f"torchremat.interop.torchgpipe{name}" for name in ("", ".balance", ".skip")}
OPEN |= {"torchremat.reports.bars", "torchremat.reports.plots"}


def private_modules(path):
    """The private modules that a file of tests imports, or names where it puts something else into them."""
    nodes = nodes_in(path)
    found = {target for node in nodes for target in imported("torchremat", node)}
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "setattr":
            named = getattr(node.args[0], "value", None)
            found |= {named.rpartition(".")[0]} if isinstance(named, str) and named.startswith("torchremat.") else set()
    return found - OPEN


def test_what_is_open_to_users_is_documented():
    pages = "".join(text for path, text in texts(".md").items() if path.startswith("docs"))

    assert [name for name in OPEN if name.removeprefix("torchremat.interop.") not in pages] == []


def test_at_most_a_third_of_the_test_files_know_private_modules():
    files = list((ROOT / "tests").rglob("test_*.py"))
    know = [str(path.relative_to(ROOT)) for path in files if private_modules(path)]

    assert 3 * len(know) <= len(files), f"{len(know)} of {len(files)}; tests/probes may have what they need"


def test_each_probe_is_used():
    offered = {
        (f"probes.{path.stem}", alias.asname or alias.name)
        for path in (ROOT / "tests" / "probes").glob("*.py")
        for node in nodes_in(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    used = {
        (node.module, alias.name)
        for path in (ROOT / "tests").rglob("*.py")
        for node in nodes_in(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert offered - used == set()


def test_errors_are_drawn():
    drawn = re.findall(r"^ +(?:[├└]── )?(\w+) +\((\w+)\)", errors.__doc__, re.MULTILINE)
    classes = [
        value for value in vars(errors).values() if inspect.isclass(value) and value is not errors.TorchrematError
    ]
    builtin = [value for value in vars(builtins).values() if inspect.isclass(value)]
    bases = [(cls.__name__, next(base.__name__ for base in cls.__mro__ if base in builtin)) for cls in classes]

    assert drawn == bases
    assert all(issubclass(cls, errors.TorchrematError | Warning) for cls in classes)


def test_errors_are_exported():
    names = {name for name, value in vars(errors).items() if inspect.isclass(value)}

    assert names <= set(torchremat.__all__)


@cache
def texts(*endings):
    """The text of every file that is ours, by its path below the root."""
    folders = [ROOT / name for name in ("src", "tests", "examples", "benchmarks", "docs", "changelog.d", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".gitignore"]
    return {str(path.relative_to(ROOT)): path.read_text() for path in files if path.suffix in endings}


@cache
def comments_and_docstrings(text):
    """Comments and strings alone, each with its marks cut off, so that code which talks about labels is not read."""
    kinds = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    return "\n".join(token.string.lstrip("#") for token in tokens if token.type in kinds)


def test_notes_are_defined_once_and_cited():
    prose = [comments_and_docstrings(text) for text in texts(".py").values()]
    defined = Counter(label for text in prose for label in re.findall(r"^\s*NOTE \[ (.+?) \]", text, re.MULTILINE))
    # Every other mention is a citation; one line may cite two.
    cited = {label for text in prose for label in re.findall(r"\S[ ]+NOTE \[ (.+?) \]", text)}

    assert [label for label, times in defined.items() if times > 1] == []
    assert cited == set(defined)


def test_rules_that_are_cited_are_there():
    prose = {path: comments_and_docstrings(text) for path, text in texts(".py").items() if path.startswith("src")}
    rules = next(text for text in prose.values() if "NOTE [ Rules of a region ]\n" in text)
    defined = [int(number) for number in re.findall(r"^ ?(\d+)\. ", rules, re.MULTILINE)]
    cited = {
        int(number)
        for text in prose.values()
        for numbers in re.findall(r"\bRules? (\d+(?:(?:, | and | to )\d+)*)", text)
        for number in re.findall(r"\d+", numbers)
    }

    assert defined == list(range(1, len(defined) + 1))
    assert len(defined) >= 13
    assert cited <= set(defined)
    assert cited


# Split, so that this file may be searched too.
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b")
ABSOLUTE = re.compile(r"(?<![\w.}])/(work|home|root|Users|tmp)/")


def test_nothing_is_left_for_later_and_no_path_is_absolute():
    found = [
        f"{path}: {match.group()}"
        for path, text in texts(".py", ".md", ".toml", ".yml", ".lock", "").items()
        for match in [*UNFINISHED.finditer(text), *ABSOLUTE.finditer(text)]
    ]

    assert found == []


def test_fragments_have_a_type():
    names = {path.name for path in (ROOT / "changelog.d").iterdir()} - {"README.md"}

    assert [
        name for name in names if not re.fullmatch(r"(\d+|\+[\w-]+)\.(added|changed|fixed|removed)\.md", name)
    ] == []
