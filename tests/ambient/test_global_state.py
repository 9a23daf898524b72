"""Each thing that surrounds a call: the recompute sees the forward's, and leaves the caller's as it was."""

import contextvars
import subprocess
import sys
import threading
from collections import defaultdict, deque
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from weakref import ref

import pytest
import torch
from torch import nn
from torch._functorch import config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from logs import Log
from regions.comparing import leaf
from torchremat import checkpoint, extend
from torchremat._compat.dynamo import is_compilers
from torchremat.ambient.global_state import ambient_state


class Doubles(TorchFunctionMode):
    """Changes a result: the sine is twice as large."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.sin else result


class Halves(TorchDispatchMode):
    """Changes a result: the sine is half as large."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is torch.ops.aten.sin.default else result


class Logs(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Log()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def setting(write, value, old):
    write(value)
    try:
        yield
    finally:
        write(old)


def matmul_precision():
    try:
        old = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's own: nobody can ask for it once the new way was used
        old = None
    new = torch.backends.mkldnn
    return old, new.matmul.fp32_precision, new.fp32_precision, torch.backends.fp32_precision


def set_matmul_of_mkldnn(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


def set_all_of_mkldnn(value):
    torch._C._set_fp32_precision_setter("mkldnn", "all", value)  # the public way sets that of all backends


def set_all(value):
    torch.backends.fp32_precision = value


def determinism():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def sdpa_backends():
    return torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()


def autocast_of(kind):
    return lambda: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))


variable = contextvars.ContextVar("variable", default=0)


def set_variable(value):
    variable.set(value)


# How to read it, how to change it for a block, and what is read in the block and outside of it.
EINSUM = (not torch.backends.opt_einsum.enabled, bool(torch.backends.opt_einsum.enabled))
ENTRIES = {
    "autocast, cpu": (
        autocast_of("cpu"),
        lambda: torch.autocast("cpu", torch.float16),
        (True, torch.float16),
        (False, torch.bfloat16),
    ),
    # There need not be such a device: code in the region may ask.
    "autocast, cuda": (
        autocast_of("cuda"),
        lambda: setting(lambda value: torch.set_autocast_enabled("cuda", value), True, False),
        (True, torch.float16),
        (False, torch.float16),
    ),
    "autocast dtype alone": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: setting(lambda value: torch.set_autocast_dtype("cpu", value), torch.float16, torch.bfloat16),
        torch.float16,
        torch.bfloat16,
    ),
    "autocast cache": (
        torch.is_autocast_cache_enabled,
        lambda: setting(torch.set_autocast_cache_enabled, False, True),
        False,
        True,
    ),
    "default dtype": (
        torch.get_default_dtype,
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        torch.float64,
        torch.float32,
    ),
    "default device": (
        lambda: torch.empty(1).device.type,
        lambda: torch.device("meta"),
        "meta",
        "cpu",
    ),
    "deterministic": (
        determinism,
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        (True, False),
        (False, False),
    ),
    "deterministic, warns": (
        determinism,
        lambda: setting(lambda value: torch.use_deterministic_algorithms(value, warn_only=value), True, False),
        (True, True),
        (False, False),
    ),
    "fill uninitialized": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        lambda: setting(
            lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value), False, True
        ),
        False,
        True,
    ),
    "mkldnn": (
        lambda: torch._C._get_mkldnn_enabled(),
        lambda: setting(torch._C._set_mkldnn_enabled, False, True),
        False,
        True,
    ),
    "nnpack": (
        lambda: torch._C._get_nnpack_enabled(),
        lambda: setting(torch._C._set_nnpack_enabled, False, True),
        False,
        True,
    ),
    "fast path of attention": (
        lambda: torch.backends.mha.get_fastpath_enabled(),
        lambda: setting(torch.backends.mha.set_fastpath_enabled, False, True),
        False,
        True,
    ),
    "einsum": (
        lambda: bool(torch.backends.opt_einsum.enabled),
        lambda: setting(partial(setattr, torch.backends.opt_einsum, "enabled"), *EINSUM),
        *EINSUM,
    ),
    "denormal numbers": (
        lambda: float(torch.full((), 1e-39) * 1.0) == 0.0,
        lambda: setting(torch.set_flush_denormal, True, False),
        True,
        False,
    ),
    "mkldnn, deterministic": (
        lambda: torch._C._get_mkldnn_deterministic(),
        lambda: setting(torch._C._set_mkldnn_deterministic, True, False),
        True,
        False,
    ),
    "sdpa backend": (sdpa_backends, lambda: sdpa_kernel([SDPBackend.MATH]), (False, True), (True, True)),
    "sdpa backend, flash": (
        sdpa_backends,
        lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
        (True, False),
        (True, True),
    ),
    "matmul precision of mkldnn": (
        matmul_precision,
        lambda: setting(set_matmul_of_mkldnn, "bf16", "none"),
        (None, "bf16", "none", "none"),
        ("highest", "none", "none", "none"),
    ),
    "precision of mkldnn": (
        matmul_precision,
        lambda: setting(set_all_of_mkldnn, "bf16", "none"),
        (None, "bf16", "bf16", "none"),
        ("highest", "none", "none", "none"),
    ),
    "precision": (
        matmul_precision,
        lambda: setting(set_all, "tf32", "none"),
        (None, "tf32", "tf32", "tf32"),
        ("highest", "none", "none", "none"),
    ),
    "torch function": (
        torch._C._is_torch_function_enabled,
        torch._C.DisableTorchFunctionSubclass,
        False,
        True,
    ),
    "function mode": (lambda: float(torch.ones(()).sin()), Doubles, 2 * 0.8414709568023682, 0.8414709568023682),
    "dispatch mode": (lambda: float(torch.ones(()).sin()), Halves, 0.8414709568023682 / 2, 0.8414709568023682),
    "context variable": (variable.get, lambda: setting(set_variable, 3, 0), 3, 0),
}


def recomputed(read, around_forward, around_backward=nullcontext, *, in_thread=False):
    """Return what a region reads in its forward, its caller before backward, the recompute, and the caller after it."""
    seen = Log()
    x = torch.ones(3, requires_grad=True)

    def body(x):
        seen.append(read())
        return x.exp().sin()

    def backward():
        with around_backward():
            seen.append(read())
            y.backward()
            seen.append(read())

    with around_forward():
        y = checkpoint(body, x).sum()
    if in_thread:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    forward, before, again, after = seen
    return forward, before, again, after


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "in a thread"])
def test_the_recompute_sees_what_the_forward_saw(name, in_thread):
    read, change, inside, outside = ENTRIES[name]

    assert recomputed(read, change, in_thread=in_thread) == (inside, outside, inside, outside)
    assert read() == outside


@pytest.mark.parametrize("name", ENTRIES)
def test_it_does_not_see_what_surrounds_the_backward(name):
    read, change, inside, outside = ENTRIES[name]

    assert recomputed(read, nullcontext, change) == (outside, inside, outside, inside)
    assert read() == outside


def test_the_old_way_to_set_the_precision():
    # It sets a word and the precision of operations, which torch refuses to see differ.
    seen = recomputed(matmul_precision, lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"))
    set_matmul_of_mkldnn("none")

    inside, outside = ("medium", "bf16", "none", "none"), ("highest", "ieee", "none", "none")
    assert seen == (inside, outside, inside, outside)


def test_an_inherited_precision_is_inherited_afterwards():
    recomputed(matmul_precision, lambda: setting(set_all_of_mkldnn, "bf16", "none"))

    with setting(set_all, "tf32", "none"):
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"


def test_everything_at_once_and_all_of_it_is_put_back_when_the_recompute_raises():
    turns = iter(range(9))

    def body(x):
        if next(turns) > 0:
            raise ValueError
        return x.exp().sin()

    def everything():
        return [read() for read, *_ in ENTRIES.values()]

    # These read one another's effects, or break an operation that the reading of others needs.
    left_out = {"precision", "precision of mkldnn", "default device", "torch function"}
    before = everything()
    with ExitStack() as stack:
        for name, (_, change, *_) in ENTRIES.items():
            if name not in left_out:
                stack.enter_context(change())
        y = checkpoint(body, torch.ones(3, requires_grad=True)).sum()
    with pytest.raises(ValueError):  # noqa: PT011
        y.backward()

    assert everything() == before


def test_modes_that_change_results_change_those_of_the_recompute():
    x = leaf(4)
    for mode in (Doubles, Halves):
        with mode():
            y = checkpoint(lambda x: x.sin().exp(), x).sum()
            plain = x.sin().exp().sum()

        assert torch.equal(torch.autograd.grad(y, x)[0], torch.autograd.grad(plain, x)[0])


def test_a_mode_around_the_backward_alone_changes_gradients_and_not_the_recompute():
    x = leaf(4)
    ours, plain = checkpoint(lambda x: x.sin().exp(), x).sum(), x.sin().exp().sum()
    with Halves():
        ours, plain = torch.autograd.grad(ours, x)[0], torch.autograd.grad(plain, x)[0]

    assert torch.equal(ours, plain)


def test_a_flop_counter_counts_what_runs_inside_of_it():
    layer = nn.Linear(8, 8, bias=False)
    x = leaf(4, 8)
    with FlopCounterMode(display=False) as forward:
        y = checkpoint(lambda x: layer(x).exp().sin(), x).sum()
    with FlopCounterMode(display=False) as backward:
        y.backward()

    # 2 * 4 * 8 * 8 flops of each matrix product: one forward; one recompute, and a gradient for each operand.
    assert (forward.get_total_flops(), backward.get_total_flops()) == (512, 3 * 512)


@pytest.mark.parametrize("marked", [False, True])
def test_a_mode_of_a_user_that_only_watches(marked):
    x = leaf(4)
    forward, backward = Logs(), Logs()
    if marked:
        assert extend.only_watches(forward) is forward
        extend.only_watches(backward)
    with forward:
        y = checkpoint(lambda x: x.exp().sin(), x).sum()
    with backward:
        y.backward()

    # Unmarked, it is taken for one that changes results: the forward's is there in the recompute, and no other.
    assert forward.seen.count("aten.exp.default") == (1 if marked else 2)
    assert backward.seen.count("aten.exp.default") == (1 if marked else 0)


def test_a_class_of_modes_that_only_watch():
    @extend.only_watches
    class Watches(Logs):
        pass

    with Watches() as mode:
        y = checkpoint(lambda x: x.exp().sin(), leaf(4)).sum()
    y.backward()

    assert mode.seen.count("aten.exp.default") == 1


def test_the_order_of_modes_is_the_forwards():
    seen = Log()

    class Named(TorchDispatchMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.exp.default:
                seen.append(self.name)
            return func(*args, **(kwargs or {}))

    a, b = Named("a"), Named("b")
    with a, b:
        y = checkpoint(lambda x: x.exp().sin(), leaf(4)).sum()
    with b, a:
        y.backward()

    assert "".join(seen) == "baba"


def test_a_mode_does_not_live_on_after_it_was_left():
    mode = Doubles()
    with mode:
        checkpoint(lambda x: x.exp().sin(), leaf(4)).sum().backward()
    gone = ref(mode)
    del mode

    assert gone() is None


def test_tensors_without_data_are_recomputed_without_data():
    from torch._subclasses.fake_tensor import FakeTensorMode

    body_calls = Log()

    def body(x):
        body_calls.append(type(torch.ones(1)).__name__)
        return x.exp().sin()

    checkpoint(body, leaf(3))  # what surrounded a call before is not taken for what does now
    body_calls.clear()

    with FakeTensorMode() as mode:
        x = torch.empty(4, requires_grad=True)
        y = checkpoint(body, x).sum()
    y.backward()

    assert body_calls == ["FakeTensor", "FakeTensor"]
    assert x.grad.shape == (4,) and x.grad.fake_mode is mode
    assert type(torch.ones(1)) is torch.Tensor


# ------------------------------------------------------------------------------------------ the cache of casted weights


def casts_in(run):
    """Return how many tensors `run` casts."""
    with Logs() as log:
        run()
    return log.seen.count("aten._to_copy.default")


@pytest.mark.parametrize("where", ["around the forward", "in the region"])
def test_casts_of_a_recompute_do_not_stay_in_the_cache(where):
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)

    def body(x):
        with torch.autocast("cpu", torch.bfloat16) if where == "in the region" else nullcontext():
            return layer(x).float().exp().sin()

    with torch.autocast("cpu", torch.bfloat16) if where == "around the forward" else nullcontext():
        y = checkpoint(body, x).sum()
    with torch.autocast("cpu", torch.bfloat16):
        y.backward()
        # The input, the weight and the bias: none of them was casted in this block but by the recompute.
        assert casts_in(lambda: layer(x)) == 3
        assert casts_in(lambda: layer(x)) == 1
    assert torch.autocast_increment_nesting() == 1
    assert torch.autocast_decrement_nesting() == 0


def test_casts_from_before_a_backward_stay_in_the_cache():
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(lambda x: layer(x).float().exp(), x).sum()
        y.backward()

        # The forward has casted the weight and the bias.
        assert casts_in(lambda: layer(x)) == 1


def test_a_weight_that_is_used_twice_is_casted_once_in_a_recompute_as_well():
    layer = nn.Linear(4, 4, bias=False)
    x = torch.ones(2, 4)

    def body(x):
        return layer(layer(x)).float().exp()

    log = extend.only_watches(Logs())
    with torch.autocast("cpu", torch.bfloat16):
        y = checkpoint(body, x).sum()
    with log:
        y.backward()
    again = log.seen[: log.seen.index("aten.exp.default")].count("aten._to_copy.default")

    # The input, the weight, and the result.
    assert again == 3


def test_weights_under_autocast_get_their_gradients_in_a_loop():
    layer = nn.Linear(4, 4)

    def train(call):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(3):
                call(lambda x: layer(layer(x)).float().exp(), torch.ones(2, 4)).sum().backward(retain_graph=True)
        return layer.weight.grad

    assert torch.equal(train(checkpoint), train(lambda function, x: function(x)))


# --------------------------------------------------------------------------------------------------- context variables


def test_what_a_region_sets_in_context_variables_is_set_by_the_forward_alone():
    seen = Log()

    def body(x):
        seen.append(variable.get())
        variable.set(variable.get() + 1)
        return x.exp().sin()

    def run():
        y = checkpoint(body, leaf(3)).sum()
        assert variable.get() == 1
        variable.set(7)
        y.backward(retain_graph=True)
        y.backward()
        return variable.get()

    assert contextvars.copy_context().run(run) == 7
    assert seen == [0, 0, 0]
    assert variable.get() == 0


def test_a_recompute_copies_no_settings_of_compilers():
    # The first `torch.compile` of a process leaves some 200 context variables behind: settings, and caches of them.
    seen = Log()

    def body(x):
        seen.append((config._save_config_ignore, variable.get()))
        return x.exp().sin()

    def run():
        variable.set([1])
        config.save_config()
        checkpoint(body, leaf(3)).sum().backward()
        return [one.name for one in contextvars.copy_context() if not is_compilers(one)]

    assert contextvars.Context().run(run) == ["variable"]
    (settings, own), (settings_again, own_again) = seen
    assert settings_again is settings
    assert own_again == own and own_again is not own


def test_what_a_region_adds_to_containers_in_context_variables_is_added_by_the_forward_alone():
    # Outputs that a hook collects so were there twice after backward.
    found = {"outputs": [], "pairs": ([1], {2}, deque([3])), "counts": defaultdict(list)}
    seen, x, context = Log(), leaf(3), contextvars.copy_context()
    context.run(variable.set, found)

    def put(x):
        now = variable.get()
        now["outputs"].append(x.detach())
        now["counts"]["calls"].append(1)
        now["pairs"][2].append(4)
        return x.exp()

    def take(x):
        seen.append(len(variable.get()["outputs"]))
        return x * variable.get()["outputs"].pop() + x.sin()

    def body(x):
        return take(put(x)).cos()

    context.run(lambda: checkpoint(body, x).sum().backward())

    grad, x.grad = x.grad, None
    (x.exp() * x.detach() + x.exp().sin()).cos().sum().backward()
    assert torch.equal(grad, x.grad)
    assert seen == [1, 1]
    assert found == {"outputs": [], "pairs": ([1], {2}, deque([3, 4])), "counts": {"calls": [1]}}


def test_a_container_in_an_argument_as_well_is_one_in_the_recompute():
    found, x, context = [], leaf(3), contextvars.copy_context()
    context.run(variable.set, found)

    def body(x, mine):
        variable.get().append(x.detach())
        return (x * mine.outputs.pop()).exp()

    context.run(lambda: checkpoint(body, x, SimpleNamespace(outputs=found)).sum().backward())

    grad, x.grad = x.grad, None
    (x * x.detach()).exp().sum().backward()
    assert torch.equal(grad, x.grad)
    assert found == []


# ----------------------------------------------------------------------------------------------------------- the price


def test_what_surrounds_calls_is_captured_once_while_it_stays():
    first = ambient_state()

    assert ambient_state() is first
    with setting(torch.set_default_dtype, torch.float64, torch.float32):
        assert ambient_state() is not first


OF_TWO_WORDS = """
import torch

torch.backends.cuda.is_built = lambda: True  # that a build for CUDA has these flags is read when they are imported
import torchremat

products = torch.backends.cuda.matmul
read = torch._C._get_cublas_allow_bf16_reduced_precision_reduction

@torchremat.extend.only_watches
class Log(list): ...

log = Log()

def function(x):
    log.append(read())
    return x.sin().sin()

y = torchremat.checkpoint(function, torch.ones(3, requires_grad=True))
products.allow_bf16_reduced_precision_reduction = False
y.sum().backward()
assert log == [(True, True)] * 2, log
assert read() == (False, True), read()
"""


def test_a_flag_of_two_words_is_as_in_the_forward_and_put_back():
    found = subprocess.run([sys.executable, "-c", OF_TWO_WORDS], capture_output=True, text=True, timeout=120)

    assert (found.returncode, found.stderr) == (0, "")
