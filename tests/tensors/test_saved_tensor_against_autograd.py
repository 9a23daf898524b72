"""The same programs with a `SavedTensor` and with autograd's own saved tensors: every observation has to be the same.

A scenario is a tensor of some kind, hooks of some kind, and something that happens to the tensor between. Its program
saves the tensor, unpacks it, differentiates through what it has unpacked, registers hooks once more, frees it, and asks
again; what it sees, errors included, is a list. Autograd's side is the slot of a node that has really saved the tensor
as an input or as an output: of a custom Function, or of one of torch's own operations.
"""

import itertools
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from probes.regions import make_saved_tensor
from torchremat import SavedTensor
from turns import in_turn
from versions import NEEDS_SAVED_TENSORS

pytestmark = NEEDS_SAVED_TENSORS


class SavesInput(torch.autograd.Function):
    """Saves its first input; the second one lets the node exist where the first one has no gradient."""

    @staticmethod
    def forward(ctx, tensor, root):
        ctx.save_for_backward(tensor)
        return root.detach() * 1

    @staticmethod
    def backward(ctx, grad):
        return None, grad


class SavesOutput(torch.autograd.Function):
    """Returns two outputs and saves the one of that number, or none."""

    @staticmethod
    def forward(ctx, root, number):
        outputs = root.detach() * 2, root.detach() * 3
        if number is not None:
            ctx.save_for_backward(outputs[number])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


class OfFunction:
    """The slot of a custom Function's node."""

    def __init__(self, tensor, root, is_output):
        self.end = tensor if is_output else SavesInput.apply(tensor, root)
        self.node = self.end.grad_fn

    def unpack(self):
        return self.node.saved_tensors[0]

    def register_hooks(self, pack, unpack):
        self.node._raw_saved_tensors[0].register_hooks(pack, unpack)

    def free(self):
        self.end.backward(torch.ones_like(self.end))


class OfOperation:
    """The slot of `sin`, which saves its input, or of `exp`, which saves its output; its backward would unpack it."""

    def __init__(self, tensor, root, is_output):
        self.end = tensor if is_output else tensor.sin()
        self.name = "result" if is_output else "self"
        self.node = self.end.grad_fn

    def unpack(self):
        return getattr(self.node, f"_saved_{self.name}")

    def register_hooks(self, pack, unpack):
        getattr(self.node, f"_raw_saved_{self.name}").register_hooks(pack, unpack)


class OfNobody:
    """A saved tensor that torch makes without a node; it cannot be freed."""

    def __init__(self, tensor, *, is_output):
        raw = make_saved_tensor(tensor, is_output, is_output)
        self.unpack = raw.unpack
        self.register_hooks = raw.register_hooks


class Ours:
    """A `SavedTensor`, which is told `node` when it is unpacked."""

    def __init__(self, tensor, *, is_output, node, is_inplace_on_view=False, is_freed=True):
        self.saved = SavedTensor(tensor, is_output=is_output, is_inplace_on_view=is_inplace_on_view)
        self.register_hooks = self.saved.register_hooks
        self.node = node
        if is_freed:
            self.free = self.saved.reset_data

    def unpack(self):
        return self.saved.unpack(saved_for=self.node)


def shifted(root):
    return root * 2


def viewed(root):
    return shifted(root)[1:]


def written(root):
    return shifted(root).mul_(3)


def written_view(root):
    base = shifted(root)
    view = base[1:]
    view.mul_(3)
    return view


INPUTS = {
    "leaf": lambda root: root,
    "parameter": lambda root: nn.Parameter(root.detach().clone()),
    "without grad": lambda root: root.detach().clone(),
    "detached": lambda root: shifted(root).detach(),
    "scalar": lambda root: shifted(root).sum(),
    "no elements": lambda root: shifted(root)[:0],
    "computed": shifted,
    "view": viewed,
    "view of a leaf": lambda root: root[1:],
    "transposed": lambda root: shifted(root).reshape(2, 2).t(),
    "expanded": lambda root: shifted(root).expand(3, 4),
    "written in place": written,
    "view that was written": written_view,
    "base of a view that was written": lambda root: written_view(root)._base,
    "part of a list": lambda root: shifted(root).unbind()[2],
    "alias without graph of a leaf": lambda root: root.detach(),
}
NO_GRAD = ("without grad", "detached", "alias without graph of a leaf")

PAIRS = {
    "same": (lambda tensor: tensor, lambda packed: packed),
    "copy": (lambda tensor: tensor.clone(), lambda packed: packed.clone()),
    "numbers": (
        lambda tensor: (tensor.tolist(), tensor.dtype),
        lambda packed: torch.tensor(packed[0], dtype=packed[1]),
    ),
    "alias": (lambda tensor: tensor.detach(), lambda packed: packed),
    "other values": (lambda tensor: tensor.detach() * 2, lambda packed: packed),
    "no tensor": (lambda tensor: None, lambda packed: packed),
    "raises in unpack": (lambda tensor: tensor.detach(), lambda packed: packed.no_such_attribute),
    "with grad": (lambda tensor: tensor.detach().clone().requires_grad_(), lambda packed: packed),
}
# Which pairs are active when the tensor is saved, outermost first, and which are registered afterwards.
HOOKS = [
    ((), ()),
    (("same",), ()),
    (("copy",), ()),
    (("numbers",), ()),
    (("no tensor",), ()),
    (("raises in unpack",), ()),
    (("other values", "alias"), ()),
    (("with grad",), ()),
    ((), ("same",)),
    ((), ("copy",)),
    ((), ("numbers",)),
    ((), ("no tensor",)),
    ((), ("other values",)),
    ((), ("with grad",)),
    ((), ("alias", "copy")),
    (("copy",), ("alias",)),
]


def single(tensor):
    """What can be written to of a tensor: of an expanded one the first row, whose version is the same."""
    return tensor[0] if 0 in tensor.stride() else tensor


def write(tensor):
    with torch.no_grad():
        single(tensor).mul_(5)


def write_twice(tensor):
    write(tensor)
    write(tensor)


def write_to_alias(tensor):
    single(tensor.detach()).add_(1)


def write_to_data(tensor):
    single(tensor.data).add_(1)  # which no version sees


def detach_in_place(tensor):
    if tensor._is_view() or tensor.is_leaf:
        return
    tensor.detach_()


EVENTS = {
    "nothing": lambda tensor: None,
    "write": write,
    "two writes": write_twice,
    "write to an alias": write_to_alias,
    "write to .data": write_to_data,
    "detach_": detach_in_place,
}


def seen(tensor, original, node):
    """What can be seen of an unpacked tensor."""
    if tensor is None:
        return None
    grad_fn = tensor.grad_fn
    return {
        "values": tensor.tolist(),
        "metadata": (tensor.dtype, tensor.shape, tensor.stride(), type(tensor)),
        "graph": (tensor.requires_grad, tensor.is_leaf, None if grad_fn is None else grad_fn.name(), tensor.output_nr),
        "same node": grad_fn is node,
        "same object": tensor is original,
        "same memory": tensor.data_ptr() == original.data_ptr(),
        "version": tensor._version,
        "view": tensor._is_view(),
    }


def attempt(log, name, action, *args):
    try:
        log.append((name, action(*args)))
    except (RuntimeError, TypeError, AttributeError) as error:
        log.append((name, type(error), str(error)))


def gradient(unpack, root):
    """The gradient through what was unpacked, and whether it can be differentiated again."""
    tensor = unpack()
    (first,) = torch.autograd.grad(tensor.square().sum().abs(), root, create_graph=True, allow_unused=True)
    if first is None or not first.requires_grad:
        return None if first is None else first.tolist()
    (second,) = torch.autograd.grad(first.square().sum().abs(), root, retain_graph=True, allow_unused=True)
    return first.tolist(), None if second is None else second.tolist()


def observe(make_tensor, make_saved, hooks, event, moment, dtype, differentiates):
    """Run the program and return what it saw."""
    calls, log = [], []

    def pair(name):
        pack, unpack = PAIRS[name]

        def logged_pack(tensor):
            calls.append(("pack", name, tensor.tolist(), tensor.requires_grad, tensor.is_leaf, torch.is_grad_enabled()))
            return pack(tensor)

        def logged_unpack(packed):
            calls.append(("unpack", name))
            return unpack(packed)

        return logged_pack, logged_unpack

    root = torch.arange(1, 5).to(dtype).requires_grad_()
    during, after = hooks
    with ExitStack() as stack:
        for name in during:
            stack.enter_context(saved_tensors_hooks(*pair(name)))
        tensor, saved = make_saved(make_tensor, root)
    node = tensor.grad_fn

    if moment == "before hooks":
        event(tensor)
    for name in after:
        attempt(log, "register", saved.register_hooks, *pair(name))
    if moment == "after hooks":
        event(tensor)
    for _ in range(2):
        attempt(log, "unpack", lambda: seen(saved.unpack(), tensor, node))
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        attempt(log, "unpack", lambda: seen(saved.unpack(), tensor, node))
    if tensor.requires_grad and differentiates:
        attempt(log, "gradient", gradient, saved.unpack, root)
    attempt(log, "register again", saved.register_hooks, *pair("copy"))
    attempt(log, "unpack", lambda: seen(saved.unpack(), tensor, node))
    if hasattr(saved, "free") and event is not detach_in_place:
        saved.free()
        attempt(log, "unpack what is free", lambda: seen(saved.unpack(), tensor, node))
    return log, calls


MOMENTS = [
    ("nothing", "before hooks"),
    *itertools.product(list(EVENTS)[1:], ("before hooks", "after hooks")),
]
# Of an input that is detached in place before it has hooks a node makes an output of its own, which is of no use.
OF_NODES = tuple(event for event in EVENTS if event != "detach_")


def compare(make_tensor, of_torch, ours, hooks, dtype, events=tuple(EVENTS), *, differentiates=True):
    for event, moment in MOMENTS:
        if event not in events:
            continue
        expected = observe(make_tensor, of_torch, hooks, EVENTS[event], moment, dtype, differentiates)
        found = observe(make_tensor, ours, hooks, EVENTS[event], moment, dtype, differentiates)

        assert found == expected, (event, moment)
        assert [entry[0] for entry in found[0]].count("unpack") == 4


def other_node(root):
    return SavesOutput.apply(root, None)[0].grad_fn


@pytest.mark.parametrize("kind", INPUTS)
@in_turn("hooks", HOOKS)
def test_an_input_of_a_custom_function(kind, hooks):
    def of_torch(make, root):
        tensor = make(root)
        return tensor, OfFunction(tensor, root, is_output=False)

    def ours(make, root):
        tensor = make(root)
        return tensor, Ours(tensor, is_output=False, node=other_node(root))

    compare(INPUTS[kind], of_torch, ours, hooks, torch.float32, OF_NODES)


@pytest.mark.parametrize("kind", [kind for kind in INPUTS if kind not in NO_GRAD])
@in_turn("hooks", HOOKS)
def test_an_input_of_an_operation(kind, hooks):
    def of_torch(make, root):
        tensor = make(root)
        return tensor, OfOperation(tensor, root, is_output=False)

    def ours(make, root):
        tensor = make(root)
        return tensor, Ours(tensor, is_output=False, node=None, is_freed=False)

    compare(INPUTS[kind], of_torch, ours, hooks, torch.float64, OF_NODES)


@pytest.mark.parametrize("kind", INPUTS)
@in_turn("hooks", HOOKS)
def test_an_input_of_nobody(kind, hooks):
    def of_torch(make, root):
        tensor = make(root)
        return tensor, OfNobody(tensor, is_output=False)

    def ours(make, root):
        tensor = make(root)
        return tensor, Ours(tensor, is_output=False, node=None, is_freed=False)

    compare(INPUTS[kind], of_torch, ours, hooks, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("number", [0, 1])
@in_turn("hooks", HOOKS)
def test_an_output_of_a_custom_function(number, hooks, dtype):
    def of_torch(make, root):
        tensor = make(root, number)
        return tensor, OfFunction(tensor, root, is_output=True)

    def ours(make, root):
        tensor = make(root, None)  # whose node saves nothing, so that hooks are called as often
        return tensor, Ours(tensor, is_output=True, node=tensor.grad_fn)

    compare(lambda root, saved: SavesOutput.apply(root, saved)[number], of_torch, ours, hooks, dtype)


@in_turn("hooks", [hooks for hooks in HOOKS if not hooks[0]])
def test_an_output_of_an_operation(hooks):
    def of_torch(make, root):
        tensor = make(root)
        return tensor, OfOperation(tensor, root, is_output=True)

    def ours(make, root):
        tensor = make(root)
        return tensor, Ours(tensor, is_output=True, node=tensor.grad_fn, is_freed=False)

    # A gradient would run the node itself, which asks its own slot.
    compare(torch.exp, of_torch, ours, hooks, torch.float64, differentiates=False)


@in_turn("hooks", HOOKS)
@pytest.mark.parametrize("kind", ["computed", "view", "view that was written", "written in place"])
def test_an_output_that_was_written_into_a_view(kind, hooks):
    def of_torch(make, root):
        tensor = make(root)
        return tensor, OfNobody(tensor, is_output=True)

    def ours(make, root):
        tensor = make(root)
        return tensor, Ours(tensor, is_output=True, node=None, is_inplace_on_view=True, is_freed=False)

    compare(INPUTS[kind], of_torch, ours, hooks, torch.float32)


def test_an_input_that_was_detached_in_place():
    def look(unpack, tensor):
        log = []
        for _ in range(2):
            attempt(log, "unpack", lambda: seen(unpack(), tensor, None))
            write(tensor)
        return log[0], log[1][1]

    root = torch.ones(2, requires_grad=True)
    tensor = shifted(root)
    node = SavesInput.apply(tensor, root).grad_fn
    tensor.detach_()
    other = shifted(root)
    saved = SavedTensor(other)
    other.detach_()

    of_torch = look(lambda: node.saved_tensors[0], tensor)
    ours = look(lambda: saved.unpack(saved_for=node), other)

    assert of_torch == ours
    assert ours[0][1]["same object"] and ours[1] is RuntimeError


@pytest.mark.parametrize("make", [lambda: torch.ones(()), lambda: torch.ones(2, 0), lambda: torch.ones(2).to_sparse()])
def test_words_of_a_write_to_tensors_of_all_shapes(make):
    tensor = make()
    raw, saved = make_saved_tensor(tensor, False, False), SavedTensor(tensor)
    tensor.mul_(2)
    log = []

    attempt(log, "unpack", raw.unpack)
    attempt(log, "unpack", saved.unpack)

    assert log[0] == log[1] and "is at version 1; expected version 0" in log[0][2]


def test_nothing_is_saved_as_nothing():
    node = torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)).grad_fn
    saved = SavedTensor(None)
    log = []

    attempt(log, "register", node._raw_saved_mat2.register_hooks, *PAIRS["same"])
    attempt(log, "register", saved.register_hooks, *PAIRS["same"])

    assert saved.unpack() is node._saved_mat2 is None
    assert log[0] == log[1] and log[0][1] is RuntimeError
    saved.reset_data()
    assert saved.unpack() is None


def test_hooks_on_what_is_free():
    x = torch.ones(2, requires_grad=True)
    end, saved = x.sin(), SavedTensor(x)
    end.sum().backward()
    saved.reset_data()
    log = []

    attempt(log, "register", end.grad_fn._raw_saved_self.register_hooks, *PAIRS["same"])
    attempt(log, "register", saved.register_hooks, *PAIRS["same"])

    assert log[0] == log[1] and log[0][1] is RuntimeError


@pytest.mark.parametrize("moment", ["active", "registered"])
def test_a_pack_hook_that_writes(moment):
    def save(make, tensor):
        if moment == "active":
            with saved_tensors_hooks(lambda tensor: tensor.add_(1), lambda packed: packed):
                return make(tensor)
        saved = make(tensor)
        saved.register_hooks(lambda tensor: tensor.add_(1), lambda packed: packed)
        return saved

    log = []
    for make in (lambda tensor: make_saved_tensor(tensor, False, False), SavedTensor):
        attempt(log, "save", save, make, shifted(torch.ones(2, requires_grad=True)))

    assert log[0] == log[1] and log[0][1] is RuntimeError


def test_a_tensor_of_inference_mode():
    with torch.inference_mode():
        tensor = torch.ones(2)
    log = []

    attempt(log, "save", make_saved_tensor, tensor, False, False)
    attempt(log, "save", SavedTensor, tensor)

    assert log[0] == log[1] and "Inference tensors cannot be saved for backward" in log[0][2]


def test_a_number_that_torch_has_wrapped_is_not_shown_to_hooks():
    number = (torch.ones(2, requires_grad=True) * 3).grad_fn._saved_other
    calls = []
    with saved_tensors_hooks(lambda tensor: calls.append(tensor), lambda packed: packed):
        saved = SavedTensor(number)

    assert calls == [] and saved.unpack() is number
    assert saved.retrieve_unpack_hook_data() is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_a_tangent_is_saved_as_well():
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2, requires_grad=True) * 2, torch.full((2,), 3.0))
        for hooks in ([], [PAIRS["copy"]]):
            saved = SavedTensor(dual, is_output=True)
            for pair in hooks:
                saved.register_hooks(*pair)

            found = torch.autograd.forward_ad.unpack_dual(saved.unpack(dual.grad_fn))

            assert found.tangent.tolist() == [3.0, 3.0] and found.primal.tolist() == [2.0, 2.0]
