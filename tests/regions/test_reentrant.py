import warnings

import pytest
import torch
from torch import nn

from logs import Log
from regions.comparing import Counted, Watched, leaf, same, three
from torchremat import MutationError, UnsupportedError, is_checkpointing, is_recomputing
from torchremat.interop.torch_checkpoint import CheckpointFunction


def reentrant(function, *args, preserve=True):
    return CheckpointFunction.apply(function, preserve, *args)


def test_gradients_are_the_plain_ones_and_the_function_runs_twice():
    function = Counted(three)
    x = leaf(4)

    assert same(lambda: reentrant(function, x), lambda: three(x), [x])
    assert function.calls == 2


def test_nothing_is_saved_in_the_forward_but_the_inputs():
    watched = Watched()
    x = leaf(4)

    y = reentrant(watched, x)

    assert len(watched.alive) == 0
    y.sum().backward()
    assert watched.calls == 2
    assert len(watched.alive) == 0


def test_the_node_has_the_name_of_torchs():
    assert reentrant(three, leaf(2)).grad_fn.name() == "CheckpointFunctionBackward"


def test_several_inputs_and_outputs_and_what_is_no_tensor():
    x, y = leaf(3), leaf(3)

    def function(a, factor, b, nothing):
        assert nothing is None
        return a * b * factor, "words", a.detach() + 1, b.exp()

    def summed(result):
        return result[0] + result[3] * 2

    assert same(lambda: summed(reentrant(function, x, 3.0, y, None)), lambda: summed(function(x, 3.0, y, None)), [x, y])
    assert reentrant(function, x, 3.0, y, None)[1] == "words"


def test_dropout_draws_the_same_numbers_and_leaves_the_generator_alone():
    x = leaf(64)

    assert same(lambda: reentrant(nn.Dropout(0.5), x), lambda: nn.Dropout(0.5)(x), [x])


def test_without_preserving_it_draws_others():
    x = leaf(64)

    assert not same(lambda: reentrant(nn.Dropout(0.5), x, preserve=False), lambda: nn.Dropout(0.5)(x), [x])


def test_a_generator_among_the_arguments_is_put_back():
    generator = torch.Generator().manual_seed(3)
    seen = Log()
    x = leaf(3)

    def function(a, source):
        seen.append(torch.rand(2, generator=source))
        return a.exp()

    reentrant(function, x, generator).sum().backward()

    assert torch.equal(seen[0], seen[1])
    assert torch.equal(torch.rand(2, generator=generator), torch.rand(4, generator=generator.manual_seed(3))[2:])


def test_buffers_are_updated_once():
    module = nn.BatchNorm1d(4)
    x = leaf(8, 4)

    assert same(lambda: reentrant(module, x), lambda: module(x), [x], [module])
    assert module.num_batches_tracked == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_the_forwards(dtype):
    module = nn.Linear(4, 4)
    x = leaf(2, 4)

    def run(call):
        with torch.autocast("cpu", dtype=dtype):
            return call(module, x).float()

    assert same(lambda: run(reentrant), lambda: run(lambda f, a: f(a)), [x], [module])


def test_a_use_outside_after_it_under_autocast_still_gives_its_weight_a_gradient():
    # The forward runs without grad, and autocast keeps its cast of the weight for the second use. In older torch
    # this was a tensor without a graph, and the gradient was lost.
    module = nn.Linear(4, 4)
    x = leaf(2, 4)

    def run(call):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first = call(module, x)
            return module(x.detach()).float() + 0 * first.float()

    assert same(lambda: run(reentrant), lambda: run(lambda f, a: f(a)), [x], [module])


def test_casts_from_before_the_region_are_still_in_the_cache_after_it():
    weight = leaf(4, 4)
    x = leaf(2, 4)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        before = x.detach() @ weight
        reentrant(torch.mm, x, weight.detach())
        after = x.detach() @ weight

    casts = [one.grad_fn.next_functions[1][0] for one in (before, after)]
    assert casts[0] is casts[1]


def test_code_inside_can_ask_where_it_runs():
    seen = Log()

    def function(a):
        seen.append((is_checkpointing(), is_recomputing()))
        return a.exp()

    reentrant(function, leaf(2)).sum().backward()

    assert seen == [(True, False), (False, True)]
    assert (is_checkpointing(), is_recomputing()) == (False, False)


def test_a_graph_that_is_retained_recomputes_again():
    function = Counted(three)
    x = leaf(3)
    y = reentrant(function, x).sum()

    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()

    assert function.calls == 3
    assert torch.equal(x.grad, 2 * first)


def test_a_second_backward_without_it_is_refused_by_autograd():
    y = reentrant(three, leaf(3)).sum()
    y.backward()

    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_reentrant_regions_nest():
    inner = Counted(three)
    x = leaf(3)

    def function(a):
        return reentrant(inner, a).cos()

    assert same(lambda: reentrant(function, x), lambda: three(x).cos(), [x])
    assert inner.calls == 3  # in the forward, in the outer recompute, in its own


def test_no_input_that_requires_grad_is_a_warning():
    with pytest.warns(UserWarning, match=r"^None of the inputs have requires_grad=True\. Gradients will be None$"):
        y = reentrant(three, torch.ones(3))

    assert not y.requires_grad


def test_it_says_so_when_parameters_lose_their_gradients_by_that():
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))

    with pytest.warns(
        UserWarning,
        match=r"^None of the inputs have requires_grad=True\. Gradients will be None, also those of 3 parameters of "
        r"the checkpointed function \(`0\.weight`, \.\.\.\), which do require grad\. Pass use_reentrant=False",
    ):
        reentrant(module, torch.ones(3))


def test_runtime_the_forward_of_another_one_they_do_not():
    inner = nn.Linear(3, 3)

    with pytest.warns(UserWarning, match=r"Gradients will be None$"):
        y = reentrant(lambda a: reentrant(inner, a.sin()), leaf(3))
    y.sum().backward()

    assert inner.weight.grad is not None


def test_an_input_that_requires_grad_is_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reentrant(nn.Linear(3, 3), leaf(3))


def test_outputs_without_grad_in_the_recompute_are_an_error():
    y = reentrant(lambda a: a.detach() * 2, leaf(3))

    with pytest.raises(
        RuntimeError, match=r"none of output has requires_grad=True, this checkpoint\(\) is not necessa"
    ):
        y.sum().backward()


@pytest.mark.parametrize("backward", [lambda y, x: torch.autograd.grad(y, x), lambda y, x: y.backward(inputs=[x])])
def test_asking_for_some_gradients_only_is_an_error(backward):
    x = leaf(3)
    y = reentrant(three, x).sum()

    with pytest.raises(
        RuntimeError, match=r"use_reentrant=True, .* incompatible with \.grad\(\) or passing an `inputs`"
    ):
        backward(y, x)


@pytest.fixture
def _warning_each_time():
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


@pytest.mark.usefixtures("_warning_each_time")  # a warning that torch gives once in a process, maybe in another test
def test_a_gradient_that_is_differentiated_again_is_an_error_and_not_zero():
    x = leaf(3)
    with pytest.warns(UserWarning, match="create a reference cycle"):
        reentrant(torch.exp, x).sum().backward(create_graph=True)

    with pytest.raises(UnsupportedError, match=r"gradient of a reentrant region .* cannot be differentiated again"):
        x.grad.sum().backward()
    x.grad = None  # a cycle: the graph of the gradient holds its leaf


def test_an_input_written_after_the_forward_is_refused_by_autograd():
    x = leaf(3)
    h = x * 1
    y = reentrant(three, h)
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_input_written_by_the_forward_is_an_error_that_names_it():
    # Autograd keeps the input as it is after the forward: the recompute would start from another value.
    def function(a, b):
        b.add_(1)
        return (a * b).exp()

    y = reentrant(function, leaf(3), torch.zeros(3))

    with pytest.raises(
        MutationError,
        match=r"reentrant region of .*function: its input args\[1\] was changed .* version 0 then, 1 now",
    ):
        y.sum().backward()


def test_a_tensor_in_a_container_written_after_the_forward_is_an_error_that_names_it():
    scales = {"scale": torch.ones(3)}
    y = reentrant(lambda a, more: a * more["scale"], leaf(3), scales)
    scales["scale"].mul_(2)

    with pytest.raises(MutationError, match=r"its input args\[1\]\['scale'\] was changed"):
        y.sum().backward()


def test_a_parameter_written_after_the_forward_is_an_error_that_names_it():
    module = nn.Linear(3, 3)
    y = reentrant(module, leaf(3))
    with torch.no_grad():
        module.weight.mul_(2)

    with pytest.raises(
        MutationError, match=r"reentrant region of Linear: its parameter or buffer `weight` was changed"
    ):
        y.sum().backward()


def test_a_cache_among_the_arguments_grows_once():
    cache = []
    x = leaf(3)

    def function(a, kept):
        kept.append(a.detach())
        return a * len(kept)

    reentrant(function, x, cache).sum().backward()

    assert len(cache) == 1
    assert x.grad.tolist() == [1, 1, 1]


def test_what_a_recompute_raises_arrives_and_leaves_no_trace():
    x = leaf(3)

    def function(a):
        if is_recomputing():
            raise KeyError("in the recompute")
        return a.exp()

    y = reentrant(function, x).sum()

    with pytest.raises(KeyError, match="in the recompute"):
        y.backward()
    assert not is_recomputing()
    assert same(lambda: reentrant(three, x), lambda: three(x), [x])


def test_what_is_no_function_is_an_error():
    with pytest.raises(TypeError, match=r"function: expected a callable, got int"):
        reentrant(3, leaf(2))
