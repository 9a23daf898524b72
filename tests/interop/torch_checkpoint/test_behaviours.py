"""Programs that are run over torch's module and over the drop-in, and do the same: results, calls, errors."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torchs

from regions.comparing import Counted, equal, leaf, three
from torchremat.interop import torch_checkpoint as ours

PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def one_output_is_detached(module):
    x = leaf(3)
    detached, attached = module.checkpoint(lambda a: (a.detach(), a * 2), x, use_reentrant=False)
    attached.sum().backward()
    assert not detached.requires_grad
    return [x.grad]


@program
def one_output_of_two_is_used(module):
    x = leaf(3)
    module.checkpoint(lambda a: (a.exp(), a.sin()), x, use_reentrant=False)[0].sum().backward()
    return [x.grad]


@program
def an_output_of_a_reentrant_one_that_is_passed_through(module):
    x = leaf(3)
    used, passed = module.checkpoint(lambda a, b: (a * a, b), x, torch.ones(3), use_reentrant=True)
    used.sum().backward()
    assert passed.requires_grad  # as every output of a Function
    return [x.grad]


@program
def only_a_parameter_requires_grad(module):
    linear = nn.Linear(3, 3)
    module.checkpoint(linear, torch.ones(2, 3), use_reentrant=False).sum().backward()
    return [linear.weight.grad]


@program
def a_parameter_is_used_inside_and_outside(module):
    weight, x = leaf(3, 3), leaf(3, 3)
    (module.checkpoint(lambda a: a @ weight, x, use_reentrant=False) @ weight).sum().backward()
    return [weight.grad, x.grad]


@program
def no_arguments(module):
    x = leaf(3)
    module.checkpoint(lambda: three(x), use_reentrant=False).sum().backward()
    return [x.grad]


@program
def a_result_that_is_no_tensor(module):
    assert module.checkpoint(lambda a: None, leaf(3), use_reentrant=False) is None
    assert module.checkpoint(lambda a: None, leaf(3), use_reentrant=True) is None
    assert module.checkpoint(lambda a: {"a": [a]}, leaf(3), use_reentrant=False)["a"][0].requires_grad
    return []


@program
def a_result_that_is_the_input(module):
    x = leaf(3)
    assert module.checkpoint(lambda a: a, x, use_reentrant=False) is x
    module.checkpoint(lambda a: a, x, use_reentrant=True).sum().backward()
    return [x.grad]


@program
def a_view_of_a_reentrant_one_is_written(module):
    x = leaf(4)
    y = module.checkpoint(lambda a: a.view(2, 2), x, use_reentrant=True)
    # It is `CheckpointFunctionBackward` in torch 2.11.
    words = r"Output 0 of CheckpointFunction(Backward)? is a view and is being modified inplace"
    with pytest.raises(RuntimeError, match=words):
        y.mul_(2)
    return []


@program
def gradients_by_grad(module):
    x, y = leaf(3), leaf(3)
    z = module.checkpoint(lambda a, b: three(a * b), x, y, use_reentrant=False)
    return list(torch.autograd.grad(z.sum(), [x, y]))


@program
def a_second_derivative(module):
    x = leaf(3)
    y = module.checkpoint(lambda a: (a**3).sin(), x, use_reentrant=False).sum()
    torch.autograd.grad(y, x, create_graph=True)[0].sum().backward()
    return [x.grad]


@program
def a_backward_inside_that_keeps_its_graph(module):
    x = leaf(3)

    def function(a):
        y = a.sin().cos()
        return y * torch.autograd.grad(y.sum(), a, retain_graph=True)[0]

    module.checkpoint(function, x, use_reentrant=False).sum().backward()
    return [x.grad]


@program
def a_backward_inside_that_frees_its_graph(module):
    x = leaf(3)

    def function(a):
        return a.cos() * torch.autograd.grad(a.sin().cos().sum(), a)[0]

    module.checkpoint(function, x, use_reentrant=False).sum().backward()
    return [x.grad]


@program
def a_reentrant_one_after_a_backward_that_it_refused(module):
    x = leaf(3)
    with pytest.raises(RuntimeError, match="incompatible with"):
        torch.autograd.grad(module.checkpoint(three, x, use_reentrant=True).sum(), x)
    module.checkpoint(three, x, use_reentrant=True).sum().backward()
    return [x.grad]


@program
def hooks_around_see_the_inputs_alone(module):
    packed = []

    def pack(tensor):
        packed.append(tensor.detach().clone())
        return tensor

    x = leaf(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = module.checkpoint(three, x, use_reentrant=False)
        z = module.checkpoint(three, x, use_reentrant=True)
    (y + z).sum().backward()
    inputs = [one for one in packed if one.numel()]  # torch 2.11 saves an empty tensor of its own as well
    assert len(inputs) == 2
    return [x.grad, *inputs]


@program
def hooks_are_disabled(module):
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"),
        pytest.raises(RuntimeError, match="no hooks here"),
    ):
        module.checkpoint(three, leaf(3), use_reentrant=False)
    return []


@program
def an_exception_in_the_forward(module):
    def function(a):
        raise KeyError("in the forward")

    for use_reentrant in (True, False):
        with pytest.raises(KeyError, match="in the forward"):
            module.checkpoint(function, leaf(3), use_reentrant=use_reentrant)
    x = leaf(3)
    module.checkpoint(three, x, use_reentrant=False).sum().backward()
    return [x.grad]


@program
def a_second_backward_without_the_graph(module):
    for use_reentrant in (True, False):
        y = module.checkpoint(three, leaf(3), use_reentrant=use_reentrant).sum()
        y.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward()
    return []


@program
def backward_in_another_thread(module):
    x = leaf(3)
    y = module.checkpoint(three, x, use_reentrant=False) + module.checkpoint(three, x, use_reentrant=True)
    thread = threading.Thread(target=y.sum().backward)
    thread.start()
    thread.join()
    return [x.grad]


@program
def under_anomaly_detection(module):
    x = leaf(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is on
        with torch.autograd.detect_anomaly():
            module.checkpoint(three, x, use_reentrant=False).sum().backward()
    return [x.grad]


@program
def autocast(module):
    linear, x = nn.Linear(4, 4), leaf(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module.checkpoint(linear, x, use_reentrant=False) + module.checkpoint(linear, x, use_reentrant=True)
    y.float().sum().backward()
    return [y.detach(), x.grad, linear.weight.grad]


@program
def inference_mode(module):
    with torch.inference_mode():
        return [module.checkpoint(three, torch.ones(3), use_reentrant=False)]


def nested(outer, inner):
    @program
    def two_deep(module):
        x = leaf(3)
        body = Counted(three)

        def function(a):
            return module.checkpoint(body, a, use_reentrant=inner).cos()

        module.checkpoint(function, x, use_reentrant=outer).sum().backward()
        assert body.calls == 3
        return [x.grad]

    two_deep.__name__ = f"{'reentrant' if inner else 'region'}_inside_{'reentrant' if outer else 'region'}"


for outer in (True, False):
    for inner in (True, False):
        nested(outer, inner)


def three_deep(early_stop):
    @program
    def three_regions_deep(module):
        x = leaf(3)
        sin, exp, tanh = Counted(torch.sin), Counted(torch.exp), Counted(torch.tanh)

        def region(function):
            return lambda a: module.checkpoint(function, a, use_reentrant=False)

        innermost = region(sin)
        inner = region(lambda a: tanh(innermost(a)))
        with module.set_checkpoint_early_stop(early_stop):
            y = region(lambda a: inner(exp(a)).cos())(x)
        y.sum().backward()
        return [x.grad, torch.tensor([sin.calls, exp.calls, tanh.calls])]

    three_regions_deep.__name__ = f"three_regions_deep_{'stopping' if early_stop else 'to_the_end'}"


three_deep(True)
three_deep(False)


@pytest.mark.parametrize("run", PROGRAMS, ids=lambda run: run.__name__)
def test_the_drop_in_does_as_torch_does(run):
    torch.manual_seed(1)
    expected = run(torchs)
    torch.manual_seed(1)

    assert equal(run(ours), expected)
