"""How many functions of Python a region runs, beside those of the user and of torch.

A benchmark says how long a region takes (`benchmarks/region_overhead`), and no test can: the time is the machine's.
These counts are the same everywhere. Functions once came in one by one, each for a good reason and none of them seen,
until the benchmark missed its bar. Whoever has to raise a number here runs the benchmark as well.
"""

import ast
import sys
import threading
from contextvars import Context
from pathlib import Path

import pytest
from torch import nn

import torchremat
from logs import Log
from probes.regions import Dicts, calls, objects
from regions.comparing import leaf
from torchremat import checkpoint, wrap
from torchremat.interop.torch_checkpoint import checkpoint as drop_in

OURS = str(Path(torchremat.__file__).parent)
# Comprehensions are functions up to Python 3.11, and later versions run them in place. What is reported of a generator
# differs as well.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@pytest.fixture(autouse=True)
def for_cpus(monkeypatch):
    # A torch that is built for accelerators is asked which devices a function reaches.
    monkeypatch.setattr(calls, "_ACCELERATED", False)


def functions(run):
    """Return the functions of ours that run, once all that is made once has been made."""
    run(), run()
    found = Log()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and code.co_name not in COMPREHENSIONS:
            found.append(code.co_qualname)

    had = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(had)
    return found


def sines(x):
    return x.sin().sin().sin().sin()


def of_each_way(call):
    """Return how many functions run in a forward, and in a forward and its backward."""
    x = leaf(4)
    empty = Context()  # a recompute looks at each context variable, and who runs the tests may have set some
    forward = empty.run(functions, lambda: call(x))
    return len(forward), len(empty.run(functions, lambda: call(x).sum().backward()))


def test_of_a_function():
    # Of those in the forward 8 make slots, 6 wait for a gradient that is differentiated, and 3 find that the function
    # reaches nothing with a state; of those in the backward 1 sees that it is not, 4 take recomputed tensors, 4 put
    # them into slots, and 4 give them out.
    assert of_each_way(lambda x: checkpoint(sines, x)) == (44, 84)


def test_of_the_drop_in():
    assert of_each_way(lambda x: drop_in(sines, x, use_reentrant=False)) == (46, 86)


def test_of_a_reentrant_region():
    assert of_each_way(lambda x: drop_in(sines, x, use_reentrant=True)) == (30, 46)


def test_of_a_wrapped_module(monkeypatch):
    # Where another test has imported FSDP2, each module is asked whether it is sharded.
    monkeypatch.setattr(objects, "has_fsdp", lambda: False)
    model = wrap(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), "0")

    # Of those in the forward 22 read again what the module reaches, and 1 finds which module is called; of those in the
    # backward 8 compare it. None compares it once more after the recompute: only code of torch's has run.
    assert of_each_way(model) == (67, 116)


def test_of_one_dict_of_a_class_of_its_own_among_many():
    # A registry in transformers is one. For its sake each other dict was read by two functions more.
    class Registry(dict[str, int]):
        pass

    then = Dicts([{"a": 1} for _ in range(100)] + [Registry(a=1)] + [{} for _ in range(100)])

    assert functions(then.are_here) == ["Dicts.are_here", "Dicts._has_keys"]


def test_no_container_is_made_by_its_annotation():
    # `list[Tensor]()` takes twenty times as long as `[]`, and no count of functions shows it.
    found = [
        f"{path.name}:{node.lineno}"
        for room in ("ambient", "regions", "state", "tensors")
        for path in Path(OURS, room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
        if isinstance(node.func.value, ast.Name) and node.func.value.id in ("dict", "list", "set", "tuple")
    ]

    assert found == []


def test_the_state_of_a_thread_is_an_attribute_that_python_finds_itself():
    # With a `__getattr__` in its class each attribute of a `threading.local` takes twice as long, and a region reads
    # that of its thread some 15 times.
    ours = [kind for kind in threading.local.__subclasses__() if kind.__module__.startswith("torchremat.")]

    assert "Thread" in [kind.__name__ for kind in ours]
    assert [kind for kind in ours if hasattr(kind, "__getattr__")] == []
