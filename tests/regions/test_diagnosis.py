"""What the message for a recompute that is not its forward says, and that finding it out leaves no trace."""

import gc
import random
import sys
from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_pre_hooks

from logs import Hidden, Log
from regions.comparing import Counted, leaf, live_regions, same, three
from torchremat import CheckpointError, checkpoint, checkpointed, wrap
from torchremat._compat.modes import dispatch_modes
from torchremat.extend import only_watches
from torchremat.regions.diagnosis.differences import Difference
from torchremat.regions.diagnosis.message import explain

TOO_FEW = "A different number of tensors was saved during the original forward and recomputation"
TOO_MANY = "trying to save more tensors during recomputation than during the original forward pass"
METADATA = "Recomputed values for the following tensors have different metadata than during the forward pass"


def message(run, most_lines=29):
    """The message of a forward and backward that fails."""
    try:
        run().sum().backward()
    except CheckpointError as error:  # and not `pytest.raises`, which keeps the frames, and so the region, in a cycle
        text = str(error)
    else:
        pytest.fail("no difference was found")
    assert text.count("\n") + 1 <= most_lines
    return text


class Between:
    """A forward whose backward finds something changed."""

    def __init__(self, function, change, *inputs, **options):
        self.function = function
        self.change = change
        self.inputs = inputs or (leaf(3, 4),)
        self.options = options

    def __call__(self):
        y = checkpointed(self.function, **self.options)(*self.inputs)
        self.change()
        return y


# --------------------------------------------------------------------------------------------------- torch's sentences


def test_too_few():
    flags = Log([True])

    def body(x):
        y = x.exp()
        return y.sin().tanh() if flags[0] else y.sin()

    text = message(Between(body, lambda: flags.__setitem__(0, False)))

    assert text.splitlines()[:3] == [
        f"region of test_too_few.<locals>.body: {TOO_FEW}.",
        "Number of tensors saved during forward: 3",
        "Number of tensors saved during recomputation: 2.",
    ]
    assert "The last operator that both ran:\n    aten.sin.default(float32[3, 4])\n" in text
    assert "the forward saved shape (3, 4), torch.float32, cpu, the recompute saved nothing" in text


def test_too_many():
    flags = Log([False])

    def body(x):
        y = x.exp()
        if flags[0]:
            y = y * y.cos()
        return y[:2].tanh()

    text = message(Between(body, lambda: flags.__setitem__(0, True), check="none", early_stop=False))

    assert text.splitlines()[:2] == [
        f"region of test_too_many.<locals>.body: {TOO_MANY}.",
        "Number of tensors saved during forward: 2",
    ]
    assert "First operator that differs, as the recompute runs it:\n    aten.cos.default(float32[3, 4])\n" in text
    assert "in test_too_many.<locals>.body: `y = y * y.cos()`" in text


def test_metadata():
    flags = Log([2])

    def body(x):
        return x.exp()[: flags[0]].sin()

    text = message(Between(body, lambda: flags.__setitem__(0, 1)))

    assert text.splitlines()[:4] == [
        f"region of test_metadata.<locals>.body: {METADATA}.",
        "tensor at position 1:",
        "saved metadata: {'shape': torch.Size([2, 4]), 'dtype': torch.float32, 'device': device(type='cpu')}",
        "recomputed metadata: {'shape': torch.Size([1, 4]), 'dtype': torch.float32, 'device': device(type='cpu')}",
    ]
    assert "    aten.sin.default(float32[1, 4])\n    at tests/regions/test_diagnosis.py:" in text


def test_strides_that_differ_are_shown():
    flags = Log([True])

    def body(x):
        y = x.exp()
        return (y if flags[0] else y.t().contiguous().t()).sin()

    text = message(Between(body, lambda: flags.__setitem__(0, False)))

    assert "saved metadata: {'shape': torch.Size([3, 4]), " in text
    assert "'strides': (4, 1)}" in text
    assert "'strides': (1, 3)}" in text
    assert "    aten.sin.default(float32[3, 4])\n" in text


# -------------------------------------------------------------------------------------------------------------- causes


def test_a_cache_in_the_closure_that_grew():
    cache = Log()

    def body(x):
        cache.append(x.detach())
        return torch.cat([x, *cache]).exp()

    text = message(lambda: checkpoint(body, leaf(3, 4)))

    assert "Likely cause: `cache` changes each time that the region runs: 2 items before, 3 items after." in text
    assert "`guard=[...]`" in text
    assert len(cache) == 3  # marked as what only looks on, nobody puts it back


def test_a_counter_of_a_module():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = Log()

        def forward(self, x):
            self.calls.append(None)
            return x[: len(self.calls)].exp()

    model = nn.Sequential(nn.Identity(), Counts())
    wrap(model, "1")

    text = message(lambda: model(leaf(3, 4)))

    assert text.startswith(f"region 1: {METADATA}")
    assert "aten.exp.default(float32[3, 4]) in `1`" in text
    assert "Likely cause: `1.calls` changes each time that the region runs: 2 items before, 3 items after." in text
    assert len(model[1].calls) == 3


def test_a_flag_that_was_flipped_where_the_region_cannot_see(monkeypatch):
    hidden = ModuleType("hidden")
    hidden.net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    monkeypatch.setitem(sys.modules, "hidden", hidden)

    def body(x):
        return sys.modules["hidden"].net(x).sin()  # a name that is looked up at run time

    text = message(Between(body, hidden.net.eval))

    assert (
        "Likely cause: train/eval was flipped: a Sequential, which the region cannot see, is in eval mode now" in text
    )
    assert not hidden.net.training
    assert not hidden.net[1].training


@pytest.mark.parametrize(("then", "now"), [(True, False), (False, True)])
def test_a_flag_of_dropout(then, now):
    flags = Hidden({"training": then})

    def body(x):
        return F.dropout(x.exp(), 0.5, flags["training"]).sin()

    text = message(Between(body, lambda: flags.update(training=now), check="none", early_stop=False))

    assert ("dropout, batch norm or another random operator ran in the recompute alone" in text) == now


def test_autocast_by_a_flag():
    flags = Hidden({"on": True})

    def body(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=flags["on"]):
            return (x @ x.t()).sin()

    text = message(Between(body, lambda: flags.update(on=False)))

    assert "autocast: the forward saved torch.bfloat16, the recompute torch.float32" in text


def test_a_dtype_by_a_flag():
    flags = Hidden({"dtype": torch.float64})

    def body(x):
        return x.to(flags["dtype"]).exp()

    text = message(Between(body, lambda: flags.update(dtype=torch.float32)))

    assert "the dtype: the forward saved torch.float64, the recompute torch.float32" in text


def test_an_attribute_that_somebody_set():
    @only_watches
    class Settings:
        rows = 2

    class Cut(nn.Module):
        def forward(self, x):
            return x[: settings.rows].exp()

    settings = Settings()

    text = message(Between(Cut(), lambda: setattr(settings, "rows", 1)))

    assert "Likely cause: not found" in text and "an attribute of a Python module" in text
    assert settings.rows == 1


def test_a_branch_on_data():
    x = leaf(3, 4)
    x.data.abs_()

    def body(x):
        return x.exp().tanh() if x.sum().item() > 0 else x.cos()

    text = message(Between(body, x.data.neg_, x, early_stop=False))

    assert (
        "Likely cause: a branch on data: aten._local_scalar_dense.default at tests/regions/test_diagnosis.py:" in text
    )


@pytest.mark.parametrize(
    ("draw", "seed", "entry"),
    [
        (lambda: import_module("random").random(), random.seed, "python_random"),
        (lambda: import_module("numpy.random").rand(), np.random.seed, "numpy_random"),
    ],
)
def test_random_draws_that_torch_knows_nothing_of(draw, seed, entry):
    def body(x):
        return x[: 1 + int(draw() * 1000)].exp()

    seed(0)

    text = message(lambda: checkpoint(body, leaf(1000)))

    assert f"which a recompute restores only if `torchremat.extend.{entry}` is registered" in text


def test_a_generator_in_the_closure_that_is_not_preserved():
    generator = torch.Generator()

    def body(x):
        return x[: torch.randint(1, 1000, (), generator=generator).item()].exp()

    text = message(lambda: checkpointed(body, preserve_rng=False)(leaf(1000)))

    assert "Likely cause: the region draws from the generator `generator`, and `preserve_rng=False`" in text


def test_a_generator_that_is_not_preserved():
    def body(x):
        return x[: torch.randint(1, 1000, ()).item()].exp()

    text = message(lambda: checkpointed(body, preserve_rng=False)(leaf(1000)))

    assert "the region draws from torch's default generator of cpu, and `preserve_rng=False`" in text


def test_a_global_counter_that_nobody_sees():
    turns = iter(range(1, 10))

    def body(x):
        return x[: next(turns)].exp()

    text = message(lambda: checkpoint(body, leaf(9)))

    assert "Likely cause: each run does something else" in text


class OnceScripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return nn.functional.dropout(self.norm(x), 0.5).relu()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_torchscript_rewrites_its_code():
    # The message blamed a `training` flag.
    inner = torch.jit.script(OnceScripted())

    text = message(lambda: checkpoint(lambda x: inner(x) + inner(2 * x), leaf(9, 4)))

    assert "Likely cause: `inner` is scripted, and TorchScript rewrites its code in the first two calls" in text


def test_a_compiled_function_may_have_another_graph():
    flags = Hidden({"rows": 2})

    @torch.compile(backend="eager")
    def inner(x):
        return x.exp()

    def body(x):
        return inner(x)[: flags["rows"]].sin()

    text = message(Between(body, lambda: flags.update(rows=1)))

    assert "`inner` is compiled" in text and "mark_dynamic" in text


def test_what_is_not_found_says_where_to_look(monkeypatch):
    monkeypatch.setenv("ROWS", "2")

    def body(x):
        import os

        return x[: int(os.environ["ROWS"])].exp()

    text = message(Between(body, lambda: monkeypatch.setenv("ROWS", "1")))

    assert "Likely cause: not found. Something that the function reads and a region cannot see" in text


# --------------------------------------------------------------------------------------------------------------- values


def made(function, *inputs):
    """The region that a call makes, and its output, which keeps it alive."""
    before = [id(region) for region in live_regions()]
    y = checkpoint(function, *inputs)
    (region,) = [region for region in live_regions() if id(region) not in before]
    return region, y


def explained(region, index):
    """The message for a saved tensor whose values differ."""
    count = len(region.metadata)
    then = region.metadata[index]
    difference = Difference(kind="values", index=index, then=then, now=then, saved_then=count, saved_now=count)
    text = explain(region, 0, difference)
    assert text.count("\n") + 1 < 30
    return text


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("index", "name", "operator"),
    [
        (0, "the input args[0]", "addmm"),
        (1, "the parameter or buffer `0.weight`", "addmm"),
        (2, "the parameter or buffer `0.bias`", "tanh"),
        (4, "the parameter or buffer `2.weight`", "addmm"),
    ],
)
def test_values_that_were_written_past_their_version(index, name, operator):
    region, y = made(net(), leaf(3, 4))
    shape = tuple(region.metadata[index][0])

    text = explained(region, index)

    assert text.startswith(
        f"region of Sequential: tensor {index} of 5 that autograd saves, shape {shape}, "
        "torch.float32, cpu, has other values in the recompute than in the forward.\n"
    )
    assert f"\n    aten.{operator}.default(" in text
    assert f"Likely cause: {name} was written between forward and recompute past its version counter" in text
    assert y.grad_fn is not None


def test_values_of_python_and_numpy():
    def body(x):
        return (x * import_module("random").random() * import_module("numpy.random").rand()).exp()

    region, _y = made(body, leaf(3, 4))

    text = explained(region, 0)

    assert "Likely cause: the region draws from Python's `random`" in text
    assert "Or: the region draws from `numpy.random`" in text


def test_values_that_differ_each_time():
    turns = iter(range(1, 10))

    def body(x):
        return (x * next(turns)).exp()

    region, _y = made(body, leaf(3, 4))

    assert "Likely cause: each run does something else" in explained(region, 0)


# ---------------------------------------------------------------------------------------------------------------- where


def test_the_module_of_a_wrapped_model():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), Cut())

        def forward(self, x):
            return self.inner(x).sin()

    class Cut(nn.Module):
        def forward(self, x):
            return x[: rows[0]].exp()

    rows = Log([2])
    model = wrap(nn.ModuleDict({"layers": nn.ModuleList([nn.Identity(), Block()])}), "layers.1")

    text = message(Between(lambda x: model["layers"][1](x), lambda: rows.__setitem__(0, 1), check="none"))

    assert text.startswith(f"region layers.1: {METADATA}")
    assert "    aten.exp.default(float32[1, 4]) in `layers.1.inner.1`\n" in text
    assert "Cut.forward: `return x[: rows[0]].exp()`" in text


def test_an_operator_that_no_line_of_the_user_calls_is_at_a_line_of_torch():
    region, _y = made(net(), leaf(3, 4))

    assert "nn/modules/activation.py:" in explained(region, 2)
    assert " in Tanh.forward" in explained(region, 2)


def test_the_region_inside_of_a_region_is_the_one_that_is_named():
    rows = Log([2])

    def inner(x):
        return x[: rows[0]].exp()

    def outer(x):
        return checkpoint(inner, x.sin()).tanh()

    text = message(Between(outer, lambda: rows.__setitem__(0, 1), check="none"))

    assert text.startswith("region of test_the_region_inside_of_a_region_is_the_one_that_is_named.<locals>.inner: ")
    assert "    aten.exp.default(float32[1, 4])\n" in text


def test_an_input_of_a_region_inside_is_what_the_outer_one_saves():
    rows = Log([2])

    def outer(x):
        return checkpoint(torch.exp, x.sin()[: rows[0]]).tanh()

    text = message(Between(outer, lambda: rows.__setitem__(0, 1)))

    assert text.startswith("region of test_an_input_of_a_region_inside_is_what_the_outer_one_saves.<locals>.outer: ")
    assert "    input of a region inside((1, 4))\n" in text
    assert "`return checkpoint(torch.exp, x.sin()[: rows[0]]).tanh()`" in text


def test_a_custom_function_is_named():
    class Mine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x * 2
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    rows = Log([2])

    def body(x):
        return Mine.apply(x[: rows[0]]) + 1

    # Its backward asks for nothing, so the next one does.
    text = message(Between(lambda x: body(x).exp(), lambda: rows.__setitem__(0, 1), early_stop=False))

    assert "    Mine((1, 4))\n" in text


def test_compiled_code_runs_eagerly_for_the_message():
    compiled = torch.compile(lambda x: x.sin().exp(), backend="eager")
    rows = Log([2])

    def body(x):
        return compiled(x)[: rows[0]].tanh()

    text = message(Between(body, lambda: rows.__setitem__(0, 1)))

    assert "Part of the region is compiled; to find the operator it ran eagerly" in text
    assert "    aten.tanh.default(float32[1, 4])\n" in text


# ---------------------------------------------------------------------------------------------------------------- debug


@pytest.mark.parametrize(("then", "now", "side"), [(True, False, "forward"), (False, True, "recompute")])
def test_debug_shows_both_logs_from_where_they_part(then, now, side):
    flags = Hidden({"training": then})

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
            self.last = nn.Sequential(*[nn.Linear(4, 4) for _ in range(20)])

        def forward(self, x):
            return self.last(F.dropout(self.first(x), 0.5, flags["training"]))

    model = wrap(nn.Sequential(Block()), "0", debug=True)

    def run():
        y = model(leaf(3, 4))
        flags["training"] = now
        return y

    text = message(run, 59)
    lines = text.splitlines()
    then_line = lines.index("Operations executed during the original forward:")
    now_line = lines.index("Operations executed during recomputation:")
    marked = [line for line in lines if line.startswith("> ")]
    with_dropout, without = marked if side == "forward" else marked[::-1]

    assert "An error happened while unpacking tensors; dumping logs of latest computation because you passed" in text
    assert f" of F.dropout ran in the {side} alone: a `training` flag was another" in text
    assert lines[then_line + 2] == lines[now_line + 2] == "  ... 5 operators that both ran"
    assert lines[then_line + 3 : then_line + 6] == lines[now_line + 3 : now_line + 6]
    assert with_dropout.startswith("> aten.empty_like.default of F.dropout(float32[3, 4]) -> float32[3, 4] in `0` at ")
    assert without.startswith("> aten.t.default(float32[4, 4]) -> float32[4, 4] in `0.last.0` at ")


def test_debug_without_an_error_changes_nothing():
    model = net()
    x = leaf(3, 4)

    assert same(lambda: checkpointed(model, debug=True)(x), lambda: model(x), [x], [model])


def test_a_cast_that_was_cached_is_no_difference_between_the_logs():
    rows = Log([2])
    model = nn.Linear(4, 4)

    def body(x):
        return model(x)[: rows[0]].exp()

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            model(leaf(3, 4))
            y = checkpointed(body, debug=True)(leaf(3, 4))
        rows[0] = 1
        return y

    assert "the forward ran aten.slice.Tensor" in message(run)


# ------------------------------------------------------------------------------------------------------------- no trace


class Everything(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.steps = 0
        self.seen = []
        self.generator = torch.Generator()

    def forward(self, x):
        self.steps += 1
        self.seen.append(x.shape)
        self.count += 1
        self.linear.bias.sum().backward()
        for hidden in HIDDEN.values():
            x = hidden(x)
        noise = torch.rand(4) + torch.rand(4, generator=self.generator) + np.random.rand()
        noise = noise + import_module("random").random()
        return (self.norm(self.linear(x)) * noise)[: ROWS[0]].exp()


HIDDEN = {"norm": nn.BatchNorm1d(4)}
ROWS = [3]


def state(model):
    buffers = [*model.named_buffers(), *HIDDEN["norm"].named_buffers()]
    return {
        "python": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "cpu": torch.get_rng_state().tolist(),
        "own": model.generator.get_state().tolist(),
        "buffers": [(name, one.tolist(), one._version, id(one)) for name, one in buffers],
        "parameters": [(one.tolist(), one._version, str(one.grad), id(one.grad)) for one in model.parameters()],
        "training": [module.training for module in [*model.modules(), *HIDDEN.values()]],
        "attributes": (model.steps, list(model.seen)),
        "hooks": (len(_global_forward_pre_hooks), [len(one._forward_pre_hooks) for one in model.modules()]),
        "grad mode": torch.is_grad_enabled(),
        "modes": len(dispatch_modes()),
    }


@pytest.mark.parametrize("forgets", [True, False])
def test_the_message_leaves_no_trace(forgets):
    model = Everything()
    x = leaf(5, 4)
    region, y = made(model, x)
    model.linear.bias.grad = None if forgets else model.linear.bias.grad
    before = state(model)

    text = explained(region, 0)

    assert state(model) == before
    assert x.grad is None and x._version == 0
    assert model.steps == len(model.seen) == 1
    # What is put back for each recompute is no cause.
    assert "the region draws from Python's `random`" in text
    assert "changes each time" not in text
    assert y.shape == (3, 4)


def test_hooks_and_buffers_that_each_run_adds_are_gone():
    class Adds(nn.Module):
        def forward(self, x):
            self.register_forward_hook(lambda *_: None)
            self.register_buffer(f"buffer{len(self._forward_hooks)}", x.detach())
            return x.exp()

    model = Adds()
    region, _y = made(model, leaf(3, 4))

    explained(region, 0)

    assert len(model._forward_hooks) == 1
    assert list(model._buffers) == ["buffer1"]


def after(function):
    return lambda x: function(x)


def test_a_long_chain_of_functions_and_a_large_object_are_no_obstacle():
    chain = torch.exp
    for _ in range(2_000):
        chain = after(chain)
    rows, large = Log([2]), {"more": list(map(str, range(200_000)))}

    def body(x):
        return x[: rows[0]].sin() if chain and large else x

    text = message(Between(body, lambda: rows.__setitem__(0, 1), debug=True), 59)

    assert "the recompute ran aten.slice.Tensor(float32[3, 4])" in text


def test_the_flags_of_hidden_modules_are_as_before():
    rows = Log([2])

    def body(x):
        return HIDDEN["norm"](x)[: rows[0]].exp()

    message(Between(body, lambda: rows.__setitem__(0, 1)))

    assert HIDDEN["norm"].training


def test_a_message_leaves_no_region_behind():
    rows = Log([2])
    failures = 0

    def body(x):
        return x[: rows[0]].exp()

    gc.collect()
    gc.disable()
    try:
        for debug in (False, True):
            rows[0] = 2
            count = len(live_regions())
            try:
                Between(body, lambda: rows.__setitem__(0, 1), debug=debug)().sum().backward()
            except CheckpointError:  # a name for it would keep it, and its frames, in a cycle
                failures += 1
            assert len(live_regions()) == count
        assert failures == 2
    finally:
        gc.enable()


def test_nothing_is_run_again_while_all_is_well(monkeypatch):
    calls = Log()
    monkeypatch.setattr("torchremat.regions.region.explain", lambda *_: calls.append(1))
    function = Counted(three)

    checkpoint(function, leaf(3)).sum().backward()

    assert function.calls == 2
    assert calls == []


# --------------------------------------------------------------------------------------------------------- what goes on


def test_code_that_raises_when_it_runs_again_leaves_the_facts():
    turns = iter([3, 2])

    def body(x):
        return x[: next(turns)].exp()

    text = message(lambda: checkpoint(body, leaf(3, 4)))

    assert text.startswith(
        f"region of test_code_that_raises_when_it_runs_again_leaves_the_facts.<locals>.body: {METADATA}"
    )
    assert "Run once more to find the operator, the region raised StopIteration" in text


def test_nothing_is_run_again_where_other_processes_wait(monkeypatch):
    turns = iter([3, 2])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def body(x):
        return x[: next(turns)].exp()

    text = message(lambda: checkpoint(body, leaf(3, 4)))

    assert text.splitlines()[4:] == [
        "The region was not run again to find the operator: torch.distributed is initialized, and other processes "
        "would wait for its collectives.",
        "To see the operators of both runs, pass `debug=True`.",
    ]


def test_where_other_processes_wait_debug_shows_what_ran(monkeypatch):
    turns = iter([3, 2])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def body(x):
        return x[: next(turns)].exp()

    text = message(lambda: checkpointed(body, debug=True)(leaf(3, 4)))

    assert "> aten.slice.Tensor(float32[3, 4]) -> float32[2, 4] at " in text
    assert text.count("> aten.exp.default") == 0


def test_user_code_that_catches_everything_does_not_hide_a_difference():
    rows = Log([2])

    def body(x):
        try:
            y = x[: rows[0]].exp()
        except BaseException:  # noqa: BLE001  as user code does
            y = x
        return y.sum().tanh()

    message(Between(body, lambda: rows.__setitem__(0, 1)))


def test_long_regions_have_short_messages():
    rows = Log([2])

    def body(x):
        for _ in range(300):
            x = x.sin()
        x = x[: rows[0]]
        for _ in range(300):
            x = x.sin()
        return x

    text = message(Between(body, lambda: rows.__setitem__(0, 1)))

    assert len(text) < 2_000
