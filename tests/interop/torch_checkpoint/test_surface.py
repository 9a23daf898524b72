import inspect
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

import torchremat
from logs import Log
from regions.comparing import Counted, Watched, leaf, result, same, three
from torchremat import MutationError, UnsupportedError
from torchremat.extend import only_watches
from torchremat.interop import torch_checkpoint as ours

BOTH = pytest.mark.parametrize("module", [torchs, ours], ids=["torch", "ours"])
WAYS = pytest.mark.parametrize("use_reentrant", [True, False])


def parameters(function):
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def test_the_names_are_torchs_in_torchs_order():
    assert ours.__all__ == torchs.__all__
    assert all(hasattr(ours, name) for name in ours.__all__)


@pytest.mark.parametrize("name", [name for name in torchs.__all__ if inspect.isfunction(getattr(torchs, name))])
def test_signatures_are_torchs(name):
    if name == "checkpoint_sequential":  # torch's own, with any number of inputs
        expected = ["functions", "segments", "inputs", "use_reentrant", "kwargs"]
        assert list(inspect.signature(ours.checkpoint_sequential).parameters) == expected
    elif name != "checkpoint":
        assert parameters(getattr(ours, name)) == parameters(getattr(torchs, name))


def test_checkpoint_takes_what_that_of_torch_2_14_takes():
    # `preserve_rng_state` is True there: None stands for PyTorch 1.0's switch of the module, which is on.
    assert str(inspect.signature(ours.checkpoint, eval_str=False)).replace("'", "").split(" -> ")[0] == (
        "(function: Callable[..., Any] | None = None, *args: Any, use_reentrant: bool | None = None, "
        "preserve_rng_state: bool | None = None, context_fn: ContextFn = <function noop_context_fn at "
        f"{id(torchs.noop_context_fn):#x}>, determinism_check: str = default, debug: bool = False, "
        "early_stop: bool = True, respect_saved_tensors_hooks: bool | None = None, **kwargs: Any)"
    )
    known = inspect.signature(ours.checkpoint).parameters
    assert known.keys() >= inspect.signature(torchs.checkpoint).parameters.keys()


def test_methods_of_classes_are_torchs():
    assert parameters(ours.CheckpointFunction.forward) == parameters(torchs.CheckpointFunction.forward)
    assert [one[1] for one in parameters(ours.CheckpointFunction.backward)] == [
        one[1] for one in parameters(torchs.CheckpointFunction.backward)
    ]


@pytest.mark.parametrize("name", ["noop_context_fn", "DefaultDeviceType", "CheckpointPolicy", "CheckpointError",
                                  "SelectiveCheckpointContext", "SAC_IGNORED_OPS", "detach_variable"])  # fmt: skip
def test_what_others_compare_by_identity_is_torchs_own(name):
    assert getattr(ours, name) is getattr(torchs, name)


def test_our_errors_are_torchs_too():
    assert issubclass(torchremat.CheckpointError, ours.CheckpointError)


@WAYS
def test_gradients_are_the_plain_ones_and_the_function_runs_twice(use_reentrant):
    function = Counted(three)
    x = leaf(3)

    assert same(lambda: ours.checkpoint(function, x, use_reentrant=use_reentrant), lambda: three(x), [x])
    assert function.calls == 2


@WAYS
def test_nothing_stays_between_forward_and_backward(use_reentrant):
    watched = Watched()
    x = leaf(3)

    y = ours.checkpoint(watched, x, use_reentrant=use_reentrant)

    assert len(watched.alive) == 0
    y.sum().backward()
    assert watched.calls == 2 and len(watched.alive) == 0


@BOTH
def test_without_use_reentrant_it_warns_and_is_reentrant(module):
    with pytest.warns(
        UserWarning,
        match=r"^torch\.utils\.checkpoint: the use_reentrant parameter should be passed explicitly\. Starting in "
        r"PyTorch 2\.9, calling checkpoint without use_reentrant will raise an exception\. use_reentrant=False is "
        r"recommended, but if you need to preserve the current default behavior, you can pass use_reentrant=True\. "
        r"Refer to docs for more details on the differences between the two variants\.$",
    ):
        y = module.checkpoint(three, leaf(3))

    assert y.grad_fn.name() == "CheckpointFunctionBackward"


def test_warnings_point_at_the_caller():
    with pytest.warns(UserWarning, match="use_reentrant|None of the inputs") as found:
        ours.checkpoint(three, torch.ones(3))

    assert [one.filename for one in found] == [__file__, __file__]


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": True, "scale": 2, "bias": 1}, r"^Unexpected keyword arguments: scale,bias$"),
        ({"use_reentrant": True, "debug": True}, r"^Passing `context_fn`.* only supported when use_reentrant=False"),
        ({"use_reentrant": True, "context_fn": torchs.DefaultDeviceType}, r"^Passing `context_fn`.* is only"),
        ({"use_reentrant": False, "determinism_check": "all"}, r"^determinism_check should be one of \['default', 'no"),
        (
            {"use_reentrant": False, "debug": True, "context_fn": lambda: torchs.noop_context_fn()},
            r"^debug=True is incompatible with non-default context_fn$",
        ),
    ],
)
def test_what_does_not_go_together_is_an_error(module, options, message):
    with pytest.raises(ValueError, match=message):
        module.checkpoint(three, leaf(3), **options)


def context_fn():
    return torchs.noop_context_fn()


@BOTH
def test_the_switch_for_debugging_goes_before_the_argument(module):
    with (
        module.set_checkpoint_debug_enabled(True),
        pytest.raises(ValueError, match="debug=True is incompatible with non-default context_fn"),
    ):
        module.checkpoint(three, leaf(3), use_reentrant=False, context_fn=context_fn)

    with module.set_checkpoint_debug_enabled(False):
        module.checkpoint(three, leaf(3), use_reentrant=False, debug=True, context_fn=context_fn)


@WAYS
def test_what_is_no_function_is_an_error_that_says_so(use_reentrant):
    with pytest.raises(TypeError, match="function: expected a callable, got str"):
        ours.checkpoint("three", leaf(3), use_reentrant=use_reentrant)


@WAYS
def test_without_grad_it_is_a_plain_call(use_reentrant):
    function = Counted(three)

    with torch.no_grad():
        y = ours.checkpoint(function, leaf(3), use_reentrant=use_reentrant)

    assert not y.requires_grad and function.calls == 1


def steps_of_recompute(**options):
    steps = Log()

    def function(a):
        b = a.exp().sin()
        steps.append("a")
        c = b + 1
        steps.append("b")
        return c

    y = ours.checkpoint(function, leaf(3), use_reentrant=False, **options)
    steps.append("|")
    y.sum().backward()
    return "".join(steps)


def test_a_recompute_stops_early_unless_told_otherwise():
    assert steps_of_recompute() == "ab|"
    assert steps_of_recompute(early_stop=False) == "ab|ab"


def test_the_switch_for_stopping_early_goes_before_the_argument():
    with ours.set_checkpoint_early_stop(False):
        assert steps_of_recompute(early_stop=True) == "ab|ab"
    with torchs.set_checkpoint_early_stop(True):
        assert steps_of_recompute(early_stop=False) == "ab|"
    assert steps_of_recompute(early_stop=False) == "ab|ab"


def test_the_switch_counts_in_the_forward_and_not_in_the_backward():
    function = Counted(lambda a: a.exp().sin() + 1)
    after = Log()

    def body(a):
        y = function(a)
        after.append(1)
        return y

    with ours.set_checkpoint_early_stop(False):
        y = ours.checkpoint(body, leaf(3), use_reentrant=False)
    y.sum().backward()

    assert len(after) == 2


@WAYS
def test_random_numbers_are_drawn_again_unless_told_otherwise(use_reentrant):
    dropout = nn.Dropout(0.5)
    x = leaf(64)

    def run(**options):
        return lambda: ours.checkpoint(dropout, x, use_reentrant=use_reentrant, **options)

    assert same(run(), lambda: dropout(x), [x])
    assert not same(run(preserve_rng_state=False), lambda: dropout(x), [x])


@WAYS
@pytest.mark.parametrize("module", [ours, torchs], ids=["ours", "torch"])
def test_the_switch_of_pytorch_1_for_the_whole_module(use_reentrant, module, monkeypatch):
    dropout = nn.Dropout(0.5)
    x = leaf(64)
    monkeypatch.setattr(module, "preserve_rng_state", False, raising=False)

    def run(**options):
        return lambda: ours.checkpoint(dropout, x, use_reentrant=use_reentrant, **options)

    assert not same(run(), lambda: dropout(x), [x])
    assert same(run(preserve_rng_state=True), lambda: dropout(x), [x])


def test_keyword_arguments_are_inputs():
    x, y = leaf(3), leaf(3)
    function = Counted(lambda a, *, other, scale: (a * other).exp() * scale)

    assert same(
        lambda: ours.checkpoint(function, x, use_reentrant=False, other=y, scale=2.0),
        lambda: function(x, other=y, scale=2.0),
        [x, y],
    )
    assert function.calls == 3


def test_what_a_partial_holds_is_input_too():
    h = torch.ones(3)

    def function(a, b, *, scale):
        return (a * b).exp() * scale

    x = leaf(3)
    held = partial(partial(function, x), scale=torch.ones(3) * 2)
    assert same(lambda: ours.checkpoint(held, h, use_reentrant=False), lambda: held(h), [x])

    y = ours.checkpoint(partial(function, x, scale=h), torch.ones(3), use_reentrant=False)
    h.add_(1)
    with pytest.raises(MutationError, match=r"its input kwargs\['scale'\] was changed in place"):
        y.sum().backward()


def differing(first, second):
    calls = Log()

    def function(a):
        calls.append(1)
        return (first if len(calls) == 1 else second)(a)

    return function


@BOTH
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            lambda a: a.exp().sin(),
            torch.exp,
            r"A different number of tensors was saved during the original forward and recomputation\.\n"
            r"Number of tensors saved during forward: 2\nNumber of tensors saved during recomputation: 1",
        ),
        (
            torch.exp,
            lambda a: a.exp().sin(),
            r"trying to save more tensors during recomputation than during the original forward pass",
        ),
        (
            torch.exp,
            lambda a: a[:2].exp(),
            r"Recomputed values for the following tensors have different metadata than during the forward pass\.\n"
            r"tensor at position 0:\n"
            r"saved metadata: \{'shape': torch\.Size\(\[3\]\), 'dtype': torch\.float32, 'device': device\(.*\}\n"
            r"recomputed metadata: \{'shape': torch\.Size\(\[2\]\), 'dtype': torch\.float32, 'device': device\(.*\}",
        ),
    ],
    ids=["fewer", "more", "others"],
)
def test_recomputes_that_differ_are_an_error_of_torchs_type_and_words(module, first, second, message):
    y = module.checkpoint(differing(first, second), leaf(3), use_reentrant=False, early_stop=False)

    with pytest.raises(torchs.CheckpointError, match=message):
        y.sum().backward()


@pytest.mark.parametrize("switch", [False, True], ids=["argument", "switch"])
def test_debugging_adds_the_operators_of_both_runs(switch):
    with ours.set_checkpoint_debug_enabled(True if switch else None):
        y = ours.checkpoint(
            differing(lambda a: a.exp().sin(), torch.exp), leaf(3), use_reentrant=False, debug=not switch
        )

    with pytest.raises(torchs.CheckpointError) as error:
        y.sum().backward()
    text = str(error.value)
    headers = (
        "An error happened while unpacking tensors; dumping logs of latest computation",
        "You are seeing this error because you passed `debug=True` to checkpoint",
    )
    assert all(header in " ".join(text.split()) for header in headers)
    forward, recompute = text.split("Operations executed during recomputation:")
    forward = forward.split("Operations executed during the original forward:")[1]
    assert "aten.sin" in forward and "aten.sin" not in recompute and "aten.exp" in recompute


def test_the_check_can_be_left_out():
    calls = Log()

    def function(a):
        calls.append(1)
        return (a * (1 if len(calls) == 1 else torch.ones(1, 3))).exp()

    def run(**options):
        calls.clear()
        ours.checkpoint(function, leaf(3), use_reentrant=False, **options).sum().backward()

    with pytest.raises(torchs.CheckpointError):
        run()
    run(determinism_check="none")
    assert len(calls) == 2


@WAYS
def test_runtime_a_compiled_function_it_is_torchs_operator(use_reentrant):
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph

    x = leaf(3)
    compiled = torch.compile(
        lambda a: ours.checkpoint(three, a, use_reentrant=use_reentrant, preserve_rng_state=True),
        backend=backend,
        fullgraph=True,
    )

    assert same(lambda: compiled(x), lambda: three(x), [x])
    assert len(graphs) == 1 and "tag_activation_checkpoint" in graphs[0]


def test_around_a_compiled_function_it_is_a_region():
    function = Counted(torch.compile(three, backend="aot_eager"))
    x = leaf(3)

    assert same(lambda: ours.checkpoint(function, x, use_reentrant=False), lambda: three(x), [x])
    assert function.calls == 2


def selective(policy):
    return lambda: torchs.create_selective_checkpoint_contexts(policy)


def test_torchs_selective_contexts_work():
    weight = leaf(4, 4)
    x = leaf(2, 4)
    ran = []

    @only_watches
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            ran.append(function)
            return function(*args, **(kwargs or {}))

    def function(a):
        return (a @ weight).exp().sin()

    def run():
        ops = [torch.ops.aten.mm.default]
        return ours.checkpoint(function, x, use_reentrant=False, context_fn=selective(ops))

    assert same(run, lambda: function(x), [x, weight])
    y = run()
    with Counting():
        y.sum().backward()
    assert ran.count(torch.ops.aten.mm.default) == 2  # both of the backward, none of the recompute
    assert ran.count(torch.ops.aten.exp.default) == 1


@BOTH
def test_what_is_no_policy(module):
    for wrong, error in [
        ([torch.ops.aten.mm], pytest.raises(ValueError, match=r"Expected op in `op_list` to be an OpOverload")),
        (["aten.mm"], pytest.raises(ValueError, match=r"but got: aten\.mm of type <class 'str'>")),
        (3, pytest.raises(TypeError, match="must be either a function or a list of ops")),
    ]:
        with error:
            module.create_selective_checkpoint_contexts(wrong)


@BOTH
def test_helpers(module):
    x = leaf(3)

    detached, number = module.detach_variable((x * 2, 3))
    assert detached.is_leaf and detached.requires_grad and number == 3
    # Torch 2.11 has a tuple of the two words as its message.
    words = r"Only tuple of tensors is supported\. Got Unsupported input type: (', ')?list"
    with pytest.raises(RuntimeError, match=words):
        module.detach_variable([x])
    with pytest.warns(UserWarning, match=r"None of the inputs have requires_grad=True\. Gradients will be None"):
        module.check_backward_validity((torch.ones(1), 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.check_backward_validity((x,))
    assert module.get_device_states(x) == ([], [])
    module.set_device_states([], [])


def test_the_function_of_the_reentrant_way_can_be_applied():
    x = leaf(64)
    dropout = nn.Dropout(0.5)

    assert same(lambda: ours.CheckpointFunction.apply(dropout, True, x), lambda: dropout(x), [x])
    assert not same(lambda: ours.CheckpointFunction.apply(dropout, False, x), lambda: dropout(x), [x])


@WAYS
def test_other_code_in_the_step_is_not_concerned(use_reentrant):
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
    x = leaf(8, 4)

    ran = result(lambda: ours.checkpoint(module, x.sin(), use_reentrant=use_reentrant).cos(), [x], [module])

    assert ran[-1] == 1  # `num_batches_tracked`


def test_under_transforms_of_torch_func_the_way_without_reentry_works():
    function = Counted(three)
    x = torch.randn(3)

    def loss(region):
        return lambda a: region(a).sum()

    ran = torch.func.grad(loss(lambda a: ours.checkpoint(function, a, use_reentrant=False)))(x)

    assert torch.equal(ran, torch.func.grad(loss(three))(x)) and function.calls == 2
    with pytest.raises(UnsupportedError, match=r"use_reentrant=True\) runs its own backward, .*=False"):
        torch.func.grad(loss(lambda a: ours.checkpoint(function, a, use_reentrant=True)))(x)


@BOTH
def test_a_recorded_graph_wants_contexts_that_are_modes(module):
    def gradient(x, contexts):
        y = module.checkpoint(three, x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(y.sum(), x)[0]

    with pytest.raises(AssertionError, match=r"`context_fn` arg .* must generate a tuple of two `TorchDispatchMode`s"):
        make_fx(lambda x: gradient(x, context_fn))(leaf(3))

    with preserve_node_meta():  # torch's contexts leave marks for the next graph, whosoever it is
        graph = make_fx(lambda x: gradient(x, selective([torch.ops.aten.exp.default])))(leaf(3))
    marks = {node.name: node.meta["recompute"] for node in graph.graph.nodes if "recompute" in node.meta}
    assert marks["exp"] is torchs.CheckpointPolicy.MUST_SAVE
    assert marks["sin"] is torchs.CheckpointPolicy.PREFER_RECOMPUTE
