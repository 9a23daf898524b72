import gc
import threading

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from logs import Log
from probes.regions import nodes_of, slots_of
from stores.operations import OPERATIONS
from torchremat import BudgetError, Disk, Host, StoreError, UnsupportedError, checkpoint, spill, wrap

SIDE = 32
BYTES = SIDE * SIDE * 4


class Handle:
    def __init__(self, shelf, tensor):
        self.shelf = shelf
        self.tensor = tensor.clone()
        self.stored_bytes = tensor.nbytes
        shelf.handles += 1

    def get(self):
        self.shelf.gets += 1
        return self.tensor.clone()

    def prefetch(self):
        raise AssertionError("nothing is brought back ahead")

    def __del__(self):
        self.shelf.handles -= 1


class Shelf:
    """A store that counts, and can fail at its n-th tensor."""

    def __init__(self, fails_at=None):
        self.handles = self.gets = 0
        self.seen = Log()
        self.fails_at = fails_at

    def put(self, tensor):
        self.seen.append(tensor.flatten()[0].item())
        if self.fails_at is not None and len(self.seen) > self.fails_at:
            raise OSError("the shelf is broken")
        return Handle(self, tensor)


class NoRoom:
    def put(self, tensor):
        return None


@pytest.fixture(autouse=True)
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def leaf(seed=0):
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def watched(*losses):
    """The storages that are in a graph's slots, with their bytes."""
    found = {}
    for node in nodes_of(losses):
        for slot in slots_of(node):
            tensor = slot.raw.data
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes() >= 1024:
                    found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
    return list(found.values())


def gone(storages):
    return sum(size for storage, size in storages if storage.expired())


def steps(x, count=6):
    """A graph that saves `count` storages; each node asks for another one."""
    for _ in range(count):
        x = x.mul(0.9).sin()
    return x.sum()


def gradients(loss, inputs, *, second):
    first = torch.autograd.grad(loss, inputs, create_graph=second, retain_graph=True, allow_unused=True)
    if not second:
        return [*first, *torch.autograd.grad(loss, inputs, allow_unused=True)]
    total = sum(one.square().sum() for one in first if one is not None and one.requires_grad)
    return [*first, *(torch.autograd.grad(total, inputs, allow_unused=True) if torch.is_tensor(total) else ())]


def same(found, expected):
    return len(found) == len(expected) and all(
        one is other is None or torch.equal(one, other) for one, other in zip(found, expected, strict=True)
    )


# ---------------------------------------------------------------------------------------------------- exact, and freed


# Torch has no second derivative of the attention of CPUs, with hooks or without.
CASES = [(name, second) for name in OPERATIONS for second in (False, True) if (name, second) != ("attention", True)]


@pytest.mark.parametrize(("name", "second"), CASES)
def test_every_operation(name, second):
    def loss():
        torch.manual_seed(1)
        return OPERATIONS[name](x).float().square().sum()

    x = leaf()
    expected = gradients(loss(), [x], second=second)
    end, shelf = loss(), Shelf()
    storages = watched(end)

    freed = spill(end, None, shelf)

    assert gone(storages) == freed
    assert freed > 0
    assert same(gradients(end, [x], second=second), expected)
    assert shelf.gets > 0
    del end
    assert shelf.handles == 0


def test_what_is_needed_last_goes_first():
    x = leaf()
    end, shelf = steps(x), Shelf()
    with torch.no_grad():
        first, second = (x * 0.9), (x * 0.9).sin() * 0.9

    freed = spill(end, BYTES + 1, shelf)

    assert freed == 2 * BYTES
    assert shelf.seen == [first[0, 0].item(), second[0, 0].item()]


def test_sizes_can_be_written():
    end = steps(leaf())

    assert spill(end, "4KiB", Shelf()) == 4096
    with pytest.raises(BudgetError, match="is not a size"):
        spill(end, "much", Shelf())


def test_aliases_of_a_storage_go_together_and_are_stored_once():
    def loss(x):
        h = x * 2
        return (h.sin().sum() + h.t().cos().sum() + h[3:].sinh().sum() + (h @ h.t()).sum()).square()

    x = leaf()
    expected = gradients(loss(x), [x], second=True)
    end, shelf = loss(x), Shelf()
    storages = watched(end)

    freed = spill(end, BYTES, shelf)

    assert freed == BYTES == gone(storages)
    assert shelf.handles == 1
    assert same(gradients(end, [x], second=True), expected)


def test_calls_add_up():
    x = leaf()
    expected = gradients(steps(x), [x], second=False)
    end, shelf = steps(x), Shelf()
    storages = watched(end)

    found = [spill(end, 1, shelf) for _ in range(6)]

    assert found == [BYTES] * 6 and gone(storages) == 6 * BYTES
    with pytest.raises(BudgetError, match="only 0 bytes"):
        spill(end, 1, shelf)
    assert same(gradients(end, [x], second=False), expected)


def test_several_losses_share_a_storage():
    h = leaf() * 2
    ends = [h.sin().sum(), h.cos().sum()]
    del h
    storages = watched(*ends)

    with pytest.raises(BudgetError, match=r"4\.00 KiB are held elsewhere"):
        spill(ends[0], 1, Shelf())

    assert spill(ends, 1, Shelf()) == BYTES == gone(storages)


def test_the_store_is_emptied_when_the_graph_is_dropped():
    end, shelf = steps(leaf()), Shelf()
    spill(end, None, shelf)

    assert shelf.handles == 6
    del end
    assert shelf.handles == 0


def test_a_backward_that_does_not_retain_the_graph_empties_the_store():
    x, shelf = leaf(), Shelf()
    end = steps(x)
    spill(end, None, shelf)

    end.backward()

    assert shelf.handles == 0 and shelf.gets == 6


def test_batched_gradients():
    x, batch = leaf(), torch.stack([torch.ones(SIDE, SIDE), torch.zeros(SIDE, SIDE)])
    outputs = [x.sin().exp().tanh() for _ in range(2)]
    ends = [output * 1 for output in outputs]
    del outputs
    (expected,) = torch.autograd.grad(ends[0], x, batch, is_grads_batched=True)

    spill(ends[1], None, Shelf())

    assert torch.equal(torch.autograd.grad(ends[1], x, batch, is_grads_batched=True)[0], expected)


def test_a_backward_in_another_thread():
    x = leaf()
    expected = gradients(steps(x), [x], second=True)
    end, found = steps(x), []
    spill(end, None, Shelf())

    thread = threading.Thread(target=lambda: found.extend(gradients(end, [x], second=True)))
    thread.start()
    thread.join()

    assert same(found, expected)


@pytest.mark.parametrize(
    "ambient_state",
    [torch.no_grad, torch.inference_mode, lambda: saved_tensors_hooks(lambda _: 1 / 0, lambda _: None)],
    ids=["no_grad", "inference_mode", "hooks"],
)
def test_what_surrounds_the_call_does_not_matter(ambient_state):
    x = leaf()
    expected = gradients(steps(x), [x], second=True)
    end = steps(x)

    with ambient_state():
        freed = spill(end, None, Shelf())

    assert freed == 6 * BYTES
    assert same(gradients(end, [x], second=True), expected)


@pytest.mark.parametrize("kind", [None, Host, Disk])
def test_our_stores(kind):
    # A parameter lives as long as the process, and with a disk its threads, which tests of threads took for their own.
    store = None if kind is None else kind()
    x = leaf()
    expected = gradients(steps(x), [x], second=True)
    end = steps(x)

    assert spill(end, None, store) == 6 * BYTES
    assert same(gradients(end, [x], second=True), expected)


@pytest.mark.gpu
def test_memory_of_a_device_is_freed():
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    expected = gradients(steps(x), [x], second=False)
    end = steps(x)
    before = torch.cuda.memory_allocated()

    freed = spill(end, None)
    torch.cuda.synchronize()

    assert freed == 6 * x.nbytes
    assert before - torch.cuda.memory_allocated() >= freed
    assert same(gradients(end, [x], second=False), expected)


# ------------------------------------------------------------------------------------------------------- what stays


def test_too_little_is_an_error_that_says_how_much_there_is():
    model, x = nn.Linear(SIDE, SIDE), leaf()
    h = (x * 2).sin()
    end = model(h).tanh().sum()
    shelf = Shelf()

    with pytest.raises(BudgetError) as caught:
        spill(end, 10**6, shelf)

    # `x * 2` and the result of tanh can go; `h` is a variable here, and the gradient of it needs the weight.
    assert "bytes=1000000 (976.56 KiB)" in str(caught.value)
    assert "only 8192 bytes (8.00 KiB) can be freed" in str(caught.value)
    assert "4.00 KiB are parameters or leaves; 4.00 KiB are held elsewhere" in str(caught.value)
    assert shelf.seen == []
    assert spill(end, 8192, shelf) == 8192


def test_parameters_and_their_views_stay():
    # `nn.Linear` saves `weight.t()`, which is no leaf and no Parameter.
    model, x = nn.Sequential(nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.ReLU(), nn.Linear(SIDE, SIDE)), leaf()
    end, shelf = model(x).square().sum(), Shelf()

    spill(end, None, shelf)

    held = {tensor.flatten()[0].item() for tensor in (x, *model.parameters(), *model.buffers())} - {0.0}
    assert shelf.seen and not held & set(shelf.seen)


@pytest.mark.parametrize(
    "holds",
    [
        lambda h: h,
        lambda h: h.detach(),
        lambda h: h[1:],
        lambda h: h.untyped_storage(),
        lambda h: h.numpy(force=True),
        lambda h: (h.tanh(), h.cos()),
        lambda h: h.grad_fn._raw_saved_self.data if False else [h],
    ],
    ids=["variable", "detached", "view", "storage", "array", "another graph", "list"],
)
def test_what_somebody_else_holds_stays_until_it_is_let_go(holds):
    h = leaf() * 2
    end = h.sin().sum()
    holder = holds(h)
    del h
    storages = watched(end)

    with pytest.raises(BudgetError, match="are held elsewhere"):
        spill(end, 1, Shelf())

    del holder
    assert spill(end, 1, Shelf()) == BYTES == gone(storages)


def test_so_autograd_still_sees_writes_to_it():
    h = leaf() * 2
    end = h.sin().sum()
    end = end + steps(leaf(1))

    spill(end, 6 * BYTES, Shelf())
    h.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        end.backward()


def test_what_was_written_before_is_the_error_that_it_was():
    # `register_hooks` itself checks no version: what was written would be stored as if it had been saved.
    x = leaf()
    h = x * 2
    end = h.sin().sum() + steps(x)
    h.add_(1)
    del h
    storages = watched(end)

    with pytest.raises(BudgetError, match=r"4\.00 KiB were written in place since they were saved"):
        spill(end, 7 * BYTES, Shelf())
    freed = spill(end, None, Shelf())

    assert freed == 6 * BYTES == gone(storages)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        end.backward()


def test_an_output_that_was_written_stays():
    h = leaf().exp()
    end = h.sum()
    h.mul_(2)
    del h

    with pytest.raises(BudgetError, match="were written in place"):
        spill(end, 1, Shelf())
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        end.backward()


def test_what_has_hooks_already_stays():
    x, calls = leaf(), []
    with saved_tensors_hooks(lambda tensor: tensor.clone(), lambda copy: calls.append(None) or copy):
        end = steps(x)
    with save_on_cpu():
        end = end + steps(x)

    with pytest.raises(BudgetError, match="only 0 bytes"):
        spill(end, 1, Shelf())

    assert calls == []


def test_small_tensors_stay():
    end = torch.ones(8, requires_grad=True).mul(2).sin().sum()

    with pytest.raises(BudgetError, match="only 0 bytes"):
        spill(end, 1, Shelf())


def test_a_graph_is_needed():
    for wrong in (torch.ones(1), leaf(), [], [leaf() * 2, torch.ones(1)], None):
        with pytest.raises((UnsupportedError, TypeError)):
            spill(wrong, 1, Shelf())


# ----------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("fails_at", range(5))
def test_a_store_that_fails_leaves_the_graph_as_usable_as_before(fails_at):
    # Autograd empties a slot whose pack hook raises.
    def loss(x):
        h = x * 2
        return steps(x, 3) + (h @ h.t()).sum() + h.tanh().sum()

    def attempt(end):
        try:
            spill(end, None, shelf)
        except OSError as error:  # whose traceback would hold the graph
            return error.__notes__
        return None

    x = leaf()
    expected = gradients(loss(x), [x], second=True)
    end, shelf = loss(x), Shelf(fails_at)
    storages = watched(end)

    (note,) = attempt(end)

    assert shelf.handles == fails_at and gone(storages) == fails_at * BYTES
    assert note.startswith(f"spill: Before, {fails_at * 4}{'.00 KiB' if fails_at else ' B'} of 20.00 KiB were moved")
    assert same(gradients(end, [x], second=True), expected)
    del end
    assert shelf.handles == 0


def test_no_room():
    x = leaf()
    expected = gradients(steps(x), [x], second=False)
    end = steps(x)

    with pytest.raises(StoreError, match=r"has no room for 4\.00 KiB more") as caught:
        spill(end, None, Host(3 * BYTES))

    assert "12.00 KiB of 24.00 KiB were moved" in caught.value.__notes__[0]
    with pytest.raises(StoreError, match="NoRoom"):
        spill(end, None, NoRoom())
    assert same(gradients(end, [x], second=False), expected)


# ------------------------------------------------------------------------------------------------ while backward runs


@pytest.mark.parametrize("retain_graph", [False, True])
def test_while_backward_runs(retain_graph):
    x = leaf()
    expected = gradients(steps(x), [x], second=False)
    end, shelf, freed = steps(x), Shelf(), []
    storages = watched(end)
    node = end.grad_fn.next_functions[0][0].next_functions[0][0].next_functions[0][0]
    assert node.name() == "SinBackward0"
    node.register_prehook(lambda _: freed.append((spill(end, None, shelf), gone(storages))))
    del node

    first = torch.autograd.grad(end, x, retain_graph=retain_graph)

    # The last node has run; without `retain_graph` its slot is free.
    stored = 6 if retain_graph else 5
    assert freed == [(stored * BYTES, 6 * BYTES)]
    assert same(first, expected[:1])
    if retain_graph:
        assert same(torch.autograd.grad(end, x), expected[:1])


def test_what_a_running_node_holds_stays():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * a

        @staticmethod
        def backward(ctx, grad):
            (a,) = ctx.saved_tensors
            with pytest.raises(BudgetError, match=r"4\.00 KiB are held elsewhere"):
                spill(ends, 1, shelf)
            return 2 * a * grad

    x, shelf = leaf(), Shelf()
    ends = [Square.apply(x * 3).sum()]

    ends[0].backward()

    assert torch.equal(x.grad, 2 * (x * 3).detach() * 3)


# ------------------------------------------------------------------------------------------------------------- shapes


def test_custom_functions_one_slot_after_the_other():
    # All that a custom Function has saved is unpacked at once, also to check the version of one output.
    class Outputs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            b, c = a.sin(), a.cos()
            ctx.save_for_backward(b, None, c, a)
            return b, c

        @staticmethod
        def backward(ctx, grad_b, grad_c):
            b, nothing, c, a = ctx.saved_tensors
            assert nothing is None and torch.equal(a.sin(), b)
            return grad_b * c - grad_c * b

    def loss(x):
        b, c = Outputs.apply(x * 2)
        return (b * 2 + c * 3).sum()

    x = leaf()
    expected = gradients(loss(x), [x], second=True)
    end, shelf = loss(x), Shelf()
    storages = watched(end)

    freed = [spill(end, 1, shelf) for _ in range(3)]

    assert freed == [BYTES] * 3 and gone(storages) == 3 * BYTES and shelf.handles == 3
    assert same(gradients(end, [x], second=True), expected)


def test_lists_of_tensors():
    def loss(x):
        rows, columns = (torch.arange(SIDE * 8) * n % SIDE for n in (1, 3))
        return (x * 2)[rows, columns].square().sum() + torch.cat([x * 2, x.sin()]).exp().sum()

    x = leaf()
    expected = gradients(loss(x), [x], second=True)
    end, shelf = loss(x), Shelf()
    storages = watched(end)

    freed = spill(end, None, shelf)

    assert freed == gone(storages) == 2048 * 2 + 1024 + 2 * BYTES
    assert same(gradients(end, [x], second=True), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_dtypes(dtype):
    def loss(x):
        return (x.to(dtype) * 2).sin().conj().exp().abs().sum().float()

    x = leaf()
    expected = gradients(loss(x), [x], second=True)
    end = loss(x)
    storages = watched(end)

    freed = spill(end, None, Shelf())

    assert freed == gone(storages) > 0
    assert same(gradients(end, [x], second=True), expected)


# ------------------------------------------------------------------------------------------------------------ regions


def body(t):
    return t.sin().exp().tanh()


@pytest.mark.parametrize("second", [False, True], ids=["twice", "double"])
def test_inputs_of_regions_are_moved(second):
    runs = Log()

    def counted(t):
        runs.append(None)
        return body(t)

    def loss(x):
        h = x * 2
        for _ in range(3):
            h = checkpoint(counted, h)
        return h.sum()

    x = leaf()
    expected = gradients(loss(x), [x], second=second)
    plain, end, shelf = len(runs), loss(x), Shelf()

    freed = spill(end, None, shelf)

    assert freed == 3 * BYTES and shelf.handles == 3
    assert same(gradients(end, [x], second=second), expected)
    assert len(runs) == 2 * plain
    del end
    assert shelf.handles == 0


def test_storages_of_regions_inputs_are_gone():
    storages = []

    def loss(x):
        h = x * 2
        storages.append(StorageWeakRef(h.untyped_storage()))
        return checkpoint(body, h).sum() + h.cos().sum()  # in the region and in a slot

    end, shelf = loss(leaf()), Shelf()

    assert not storages[0].expired()
    assert spill(end, None, shelf) == BYTES
    assert storages[0].expired() and shelf.handles == 1


def test_regions_in_regions():
    def outer(t):
        return checkpoint(body, checkpoint(body, t) * 2)

    x = leaf()
    loss = lambda: (checkpoint(outer, x * 2) * checkpoint(outer, x * 3)).sum()  # noqa: E731
    expected = gradients(loss(), [x], second=False)
    end = loss()

    freed = spill(end, None, Shelf())

    assert freed == 4 * BYTES  # the inputs of two outer regions, and their outputs, which the product saves
    assert same(gradients(end, [x], second=False), expected)


def test_a_wrapped_model():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(SIDE, SIDE), nn.GELU(), nn.Dropout(0.3)) for _ in range(4)])
    wrap(model, "*", every=2)
    x = leaf()

    def loss():
        torch.manual_seed(5)
        return model(x).square().sum()

    inputs = [x, *model.parameters()]
    expected = gradients(loss(), inputs, second=False)
    end, shelf = loss(), Shelf()
    storages = watched(end)

    freed = spill(end, None, shelf)

    assert freed >= gone(storages) > 0
    assert same(gradients(end, inputs, second=False), expected)


def test_an_input_of_a_region_that_was_written_is_the_error_that_it_was():
    h = leaf() * 2
    end = checkpoint(body, h).sum() + steps(leaf(1))
    h.data_ptr()
    with torch.no_grad():
        h.add_(1)
    del h

    spill(end, 6 * BYTES, Shelf())

    with pytest.raises(RuntimeError, match="was changed in place between forward and recompute"):
        end.backward()


def test_an_input_of_a_region_that_somebody_holds_stays_watched():
    h = leaf() * 2
    end = checkpoint(body, h).sum()

    with pytest.raises(BudgetError, match="are held elsewhere"):
        spill(end, 1, Shelf())
    with torch.no_grad():
        h.add_(1)

    with pytest.raises(RuntimeError, match="was changed in place between forward and recompute"):
        end.backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_function():
    compiled = torch.compile(lambda t: (t.sin() @ t.cos()).exp(), backend="aot_eager")
    x = leaf()
    expected = gradients(compiled(x * 2).sum(), [x], second=False)
    end = compiled(x * 2).sum()
    storages = watched(end)

    freed = spill(end, None, Shelf())

    assert freed == gone(storages) > 0
    assert same(gradients(end, [x], second=False), expected)
