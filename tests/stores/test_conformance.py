"""Every store does what is asked of a store."""

import copy
import pickle
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import ref

import pytest
import torch

from stores.conformance import DTYPES, PLACES, PROGRAMS, SHAPES, STORES, filled, same
from torchremat import MutationError, StoreError, checkpointed, policies
from turns import in_turn

pytestmark = pytest.mark.usefixtures("no_collector")

ALL = list(STORES)
WITH_LIMIT = [name for name, maker in STORES.items() if maker.has_limit]
COPYING = [name for name, maker in STORES.items() if maker.copies]


@pytest.mark.parametrize("name", ALL)
@in_turn("dtype", DTYPES)
def test_what_comes_back_is_equal_bit_for_bit(name, dtype):
    store = STORES[name]()
    tensors = [filled(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    expected = [tensor.clone() for tensor in tensors]

    handles = [store.put(tensor) for tensor in tensors]

    assert all(same(handle.get(), value) for handle, value in zip(handles, expected, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_contiguous_part_of_a_storage(name):
    store = STORES[name]()
    whole = filled((9, 5), torch.float32)
    rows = whole[3:7]

    handle = store.put(rows.detach())

    assert same(handle.get(), rows.clone())


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_times_in_any_order(name):
    store = STORES[name]()
    tensors = [filled((300, seed + 1), torch.float32, seed) for seed in range(5)]
    handles = [store.put(tensor) for tensor in tensors]

    for index in [4, 0, 0, 3, 2, 4, 1, 1, 0]:
        handles[index].prefetch()
        assert same(handles[index].get(), tensors[index])
        assert same(handles[index].get(), tensors[index])


@pytest.mark.parametrize("name", COPYING)
def test_the_memory_is_fresh(name):
    store = STORES[name]()
    tensor = filled((40,), torch.int64)
    expected = tensor.clone()
    handle = store.put(tensor)

    first = handle.get()
    second = handle.get()
    first.zero_()

    assert same(second, expected)
    assert same(handle.get(), expected)
    assert same(tensor, expected)


@pytest.mark.parametrize("name", COPYING)
def test_the_tensor_itself_is_not_held_for_long(name):
    store = STORES[name]()
    tensor = filled((5000,), torch.float32)
    expected, storage = tensor.clone(), ref(tensor.untyped_storage())
    handle = store.put(tensor)
    settled(handle)

    del tensor

    assert storage() is None
    assert same(handle.get(), expected)


@pytest.mark.parametrize("name", ALL)
def test_a_tensor_that_is_written_afterwards_is_right_or_an_error(name):
    store = STORES[name]()
    tensor = filled((1000,), torch.int32)
    expected = tensor.clone()
    handle = store.put(tensor)

    tensor.add_(1)

    try:
        got = handle.get()
    except MutationError as error:
        got, message = None, str(error)
    if got is None:
        assert (
            "modified by an inplace operation: [torch.IntTensor [1000]] is at version 1; expected version 0" in message
        )
    else:
        assert same(got, expected)


@pytest.mark.parametrize("name", ALL)
def test_a_tensor_that_is_written_after_its_handle_was_told_is_what_was_put(name):
    # Such a write need not move any version: chunks count apart, and so does `.data`.
    store = STORES[name]()
    tensors = [filled((50, seed + 1), torch.float32, seed) for seed in range(5)]
    expected = [tensor.clone() for tensor in tensors]
    handles = [store.put(tensor) for tensor in tensors]

    for handle, tensor in zip(handles, tensors, strict=True):
        handle.before_write()
        tensor.data.fill_(7)
        tensor.add_(1)
    assert all(same(handle.get(), value) for handle, value in zip(handles, expected, strict=True))

    # Who has it back may say so before writing to it, and the others have what was put.
    for handle, value in zip(handles, expected, strict=True):
        settled(handle)
        found = handle.get()
        handle.before_write()
        found.data.fill_(8)
        assert same(handle.get(), value)
    assert store.statistics.stored_bytes == sum(handle.stored_bytes for handle in handles)


@pytest.mark.parametrize("name", ALL)
def test_a_handle_that_is_told_too_late_gives_no_other_data(name):
    store = STORES[name]()
    tensor = filled((1000,), torch.int32)
    expected = tensor.clone()
    handle = store.put(tensor)

    tensor.add_(1)
    handle.before_write()
    tensor.add_(1)

    refusal = None
    try:
        assert same(handle.get(), expected)
    except MutationError as error:
        refusal = str(error)
    assert refusal is None or "modified by an inplace operation" in refusal


KEEP = (policies.save_matmuls, policies.everything_saved, policies.save_larger_than(64))


@pytest.mark.filterwarnings("ignore::torchremat.StoreWarning")  # some are full
@pytest.mark.parametrize("program", PROGRAMS)
@in_turn("name", PLACES)
def test_what_a_policy_keeps_may_be_written_in_place(name, program):
    # What was stored still pointed at the memory: gradients of a GRU were 17% off, and a ReLU in place was an error.
    torch.manual_seed(0)
    model, x = PROGRAMS[program](), torch.randn(8, 16)

    def gradients(function):
        leaf = x.clone().requires_grad_()
        loss = function(leaf).square().sum()
        return [
            one for _ in range(2) for one in torch.autograd.grad(loss, [leaf, *model.parameters()], retain_graph=True)
        ]

    expected = gradients(model), gradients(lambda x: model(x).cos())
    # Each program and each place meets each of them.
    keep = KEEP[(list(PROGRAMS).index(program) + list(PLACES).index(name)) % len(KEEP)]
    policy = keep.into(PLACES[name]())
    region = checkpointed(model, policy=policy)
    nested = checkpointed(lambda x: region(x).cos(), policy=policy)
    found = gradients(region), gradients(nested)
    for ours, plain in zip(found, expected, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(ours, plain, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_strides_come_back(name):
    # By them kernels choose: gradients of channels_last differed, where hooks put by hand.
    store = STORES[name]()
    surrogate = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    one_channel = torch.randn(2, 1, 4, 5).contiguous(memory_format=torch.channels_last)
    signs = torch.where(surrogate > 0, 1.0, -1.0)
    matrix = torch.randn(6, 8)
    for tensor in (
        surrogate,
        one_channel,
        signs,
        surrogate > 0,
        (surrogate * 9).long(),
        matrix.t(),
        matrix[0].expand(4, 8),
        torch.ones(()).expand(3, 1),
    ):
        handle = store.put(tensor)

        assert handle.get().stride() == tensor.stride()
        assert torch.equal(handle.get(), tensor)

    # What has gaps comes back without, in the same order; by sliding windows each element comes as often as it does.
    column = matrix[:, :1].expand(6, 5)
    for tensor in (matrix[:, 1:4], matrix.t()[2:5], surrogate[:, :2], column, matrix.unfold(1, 3, 2)):
        got = store.put(tensor).get()

        assert torch.equal(got, tensor)
        order = [sorted(range(one.dim()), key=lambda place, one=one: one.stride(place)) for one in (got, tensor)]
        assert order[0] == order[1]


@pytest.mark.parametrize("name", ALL)
def test_channels_last_by_hand(name):
    torch.manual_seed(0)
    store = STORES[name]()
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GELU(), torch.nn.Conv2d(8, 4, 3), torch.nn.GELU())
    layers = layers.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=torch.channels_last)
    expected = torch.autograd.grad(layers(x).square().sum(), list(layers.parameters()))

    with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
        loss = layers(x).square().sum()
    found = torch.autograd.grad(loss, list(layers.parameters()))

    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ALL)
def test_a_dropped_handle_frees_its_bytes(name):
    store = STORES[name]()
    handles = [store.put(filled((100,), torch.float32)) for _ in range(3)]

    assert store.statistics.stored_bytes == sum(handle.stored_bytes for handle in handles) > 0
    if STORES[name].exact_bytes:
        assert store.statistics.stored_bytes == 1200

    del handles[1]
    if STORES[name].exact_bytes:
        assert store.statistics.stored_bytes == 800

    handles.clear()
    assert store.statistics.stored_bytes == 0
    assert store.statistics.peak_stored_bytes > 0


@pytest.mark.parametrize("name", COPYING)
def test_what_is_copied_is_counted(name):
    store = STORES[name]()
    tensor = filled((100,), torch.float32)
    handle = store.put(tensor)
    settled(handle)
    del tensor

    handle.get()
    handle.get()

    if STORES[name].exact_bytes:
        assert store.statistics.copied_out_bytes == 400
        assert store.statistics.copied_in_bytes == 800


@pytest.mark.parametrize("name", WITH_LIMIT)
def test_the_limit_is_exact(name):
    store = STORES[name](1200)
    handles = [store.put(filled((100,), torch.float32, seed)) for seed in range(3)]

    assert None not in handles
    assert store.put(filled((1,), torch.uint8)) is None
    assert store.statistics.refused == 1
    assert store.statistics.stored_bytes == store.statistics.peak_stored_bytes == 1200

    handles[1] = None
    assert store.put(filled((101,), torch.float32)) is None
    handles[1] = store.put(filled((100,), torch.float32, 1))
    assert handles[1] is not None
    assert store.statistics.refused == 2
    assert all(same(handle.get(), filled((100,), torch.float32, seed)) for seed, handle in enumerate(handles))


@pytest.mark.parametrize("name", WITH_LIMIT)
def test_pieces_that_were_freed_make_room_for_a_larger_one(name):
    store = STORES[name](1000)
    handles = [store.put(filled((100,), torch.uint8, seed)) for seed in range(10)]
    del handles[::2]

    handle = store.put(filled((500,), torch.uint8, 77))

    assert same(handle.get(), filled((500,), torch.uint8, 77))
    assert all(same(one.get(), filled((100,), torch.uint8, 2 * index + 1)) for index, one in enumerate(handles))


@pytest.mark.parametrize("name", WITH_LIMIT)
def test_a_strict_store_without_room_raises(name):
    store = STORES[name](1000, strict=True)
    handle = store.put(filled((250,), torch.float32))

    with pytest.raises(StoreError, match=r"no room for a tensor of shape \(3, 4\), bfloat16, 24 B, from cpu: .*1000 B"):
        store.put(filled((3, 4), torch.bfloat16))

    assert same(handle.get(), filled((250,), torch.float32))


@pytest.mark.parametrize("name", ALL)
def test_many_threads_at_once(name):
    store = STORES[name]()
    barrier = threading.Barrier(4)

    def work(seed):
        chance = random.Random(seed)
        barrier.wait()
        mine = {}
        for turn in range(60):
            value = filled((chance.randrange(1, 4000),), torch.uint8, 1000 * seed + turn)
            mine[turn] = store.put(value), value
            if len(mine) > 5:
                handle, value = mine.pop(chance.choice(list(mine)))
                if chance.random() < 0.5:
                    handle.prefetch()
                if not same(handle.get(), value):
                    return False
        return all(same(handle.get(), value) for handle, value in mine.values())

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4

    assert store.statistics.stored_bytes == 0


@pytest.mark.parametrize("name", ALL)
def test_one_handle_from_many_threads(name):
    store = STORES[name]()
    value = filled((20_000,), torch.float32)
    handle = store.put(value.clone())
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        handle.prefetch()
        return all(same(handle.get(), value) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4


@pytest.mark.parametrize("name", ALL)
@in_turn("seed", range(5))
def test_against_a_dictionary(name, seed):
    limit = 20_000 if STORES[name].has_limit else None
    store = STORES[name](limit)
    chance = random.Random(seed)
    model, bytes_now, refused = {}, 0, 0

    for turn in range(300):
        action = chance.choice(["put", "put", "put", "get", "prefetch", "drop", "drop"])
        if action == "put":
            dtype = chance.choice(DTYPES)
            value = filled((chance.randrange(1, 40), chance.randrange(1, 40)), dtype, turn)
            expected = value.clone()
            handle = store.put(value)
            if STORES[name].exact_bytes and limit is not None:
                assert (handle is None) == (bytes_now + value.nbytes > limit)
            if handle is None:
                refused += 1
                continue
            model[turn] = handle, expected
            bytes_now += handle.stored_bytes
            if chance.random() < 0.5:
                settled(handle)
        elif model:
            key = chance.choice(list(model))
            handle, expected = model[key]
            if action == "get":
                assert same(handle.get(), expected)
            elif action == "prefetch":
                handle.prefetch()
            else:
                bytes_now -= handle.stored_bytes
                del model[key]
        handle = None
        assert store.statistics.stored_bytes == bytes_now
        assert limit is None or bytes_now <= limit

    assert store.statistics.refused == refused
    assert all(same(handle.get(), expected) for handle, expected in model.values())
    handle = None
    model.clear()
    assert store.statistics.stored_bytes == 0


@pytest.mark.parametrize("name", ALL)
def test_behind_autograd(name):
    # Once, again, twice over, batched, and in a thread of its own.
    store = STORES[name]()
    x = torch.linspace(-1, 1, 50, dtype=torch.float64).requires_grad_()
    towards = torch.eye(50, dtype=torch.float64)

    def function(x):
        return (x.exp() * x.sin()).tanh()

    def gradients(y):
        found = [torch.autograd.grad(y, x, towards[3], retain_graph=True)[0]]
        found += torch.autograd.grad(y, x, towards[4], retain_graph=True)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        found += [first, *torch.autograd.grad(first.sum(), x, retain_graph=True)]
        found += torch.autograd.grad(y, x, towards, retain_graph=True, is_grads_batched=True)
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(y, x, towards[5])))
        thread.start()
        thread.join(60)
        return found

    with torch.autograd.graph.saved_tensors_hooks(store.put, lambda handle: handle.get()):
        y = function(x)
    ours = gradients(y)
    plain = gradients(function(x))

    assert len(ours) == len(plain) == 6
    assert all(torch.equal(left, right) for left, right in zip(ours, plain, strict=True))
    del y, ours
    assert store.statistics.stored_bytes == 0


@pytest.mark.parametrize("name", ALL)
def test_a_store_and_its_handles_may_be_dropped_in_any_order(name):
    store = STORES[name]()
    handle = store.put(filled((100,), torch.float32))
    gone = ref(store)

    del store

    assert gone() is None
    assert same(handle.get(), filled((100,), torch.float32))


@pytest.mark.parametrize("name", ALL)
def test_a_copy_is_the_store_itself_and_another_process_makes_one_like_it(name):
    store = STORES[name]()
    handle = store.put(filled((100,), torch.float32))

    assert copy.deepcopy({"store": store})["store"] is copy.copy(store) is store
    there = pickle.loads(pickle.dumps(store))
    assert type(there) is type(store)
    assert repr(there) == repr(store)
    assert there.statistics.stored_bytes == 0
    assert same(there.put(filled((7,), torch.float32)).get(), filled((7,), torch.float32))
    assert same(handle.get(), filled((100,), torch.float32))


def settled(handle):
    """Wait until a store that works behind the scenes has written a tensor."""
    getattr(handle, "settle", lambda: None)()
