"""The compressing store: what it encodes, what it leaves alone, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F

from stores.conformance import filled, same
from torchremat import Compressed, Host, Keep, StoreError, UnsupportedError, codecs, offload
from torchremat.extend import Handle


class Watched:
    """A store that notes what it is given, and how often that is asked for."""

    def __init__(self):
        self.puts, self.gets, self.prefetches = [], 0, 0

    def put(self, tensor):
        self.puts.append((tensor.dtype, tensor.nbytes))
        return WatchedHandle(self, tensor.clone())


class WatchedHandle:
    def __init__(self, store, tensor):
        self.store, self.tensor, self.stored_bytes = store, tensor, tensor.nbytes

    def get(self):
        self.store.gets += 1
        return self.tensor.clone()

    def prefetch(self):
        self.store.prefetches += 1


class Full:
    def put(self, tensor):
        return None


def test_what_is_encoded_and_what_is_not():
    store = Watched()
    compressed = Compressed(store)
    tensors = [
        filled((8, 100), torch.bool),
        torch.arange(800),
        torch.rand(800) > 0.5,
        (torch.rand(800) > 0.5).float() * 2,
        torch.randn(800),
        torch.get_rng_state(),
        torch.randn(100, dtype=torch.complex64),
    ]

    handles = [compressed.put(tensor) for tensor in tensors]

    uint8 = torch.uint8
    assert store.puts == [
        (uint8, 100),
        (torch.int16, 1600),
        (uint8, 100),
        (uint8, 100),
        (torch.float32, 3200),
        (uint8, tensors[5].nbytes),
        (torch.complex64, 800),
    ]
    assert [handle.stored_bytes for handle in handles] == [size for _, size in store.puts]
    assert all(same(handle.get(), tensor) for handle, tensor in zip(handles, tensors, strict=True))
    assert store.gets == len(tensors)


def test_a_lossy_codec_takes_floats_alone():
    store = Watched()
    compressed = Compressed(store, lossy=codecs.Int8())
    exact = [
        filled((800,), torch.bool),
        torch.arange(800) * 2**30,
        torch.get_rng_state(),
        (torch.rand(800) > 0.5).float() * 1.1,
        torch.randn(100, dtype=torch.complex64),
    ]
    lossy = torch.randn(1280)

    exact_handles = [compressed.put(tensor) for tensor in exact]
    handle = compressed.put(lossy)

    assert all(same(one.get(), tensor) for one, tensor in zip(exact_handles, exact, strict=True))
    assert store.puts[-1] == (torch.uint8, 1280 + 40)
    errors = (handle.get() - lossy).abs().double()
    assert errors.max() > 0 and bool((errors <= codecs.Int8().bound(lossy)).all())


def test_a_codec_of_ones_own():
    class Halves:
        def encode(self, tensor):
            return codecs.Encoded(tensor.half(), codecs.Form(tensor.shape, tensor.dtype))

        def decode(self, payload, form):
            return payload.to(form.dtype)

        def bound(self, tensor):
            return tensor.abs().double() * 2**-11

    tensor = torch.randn(100)

    handle = Compressed(Host(), lossy=Halves()).put(tensor)

    assert handle.stored_bytes == 200
    assert torch.equal(handle.get(), tensor.half().float())


def test_gradients_are_those_of_what_was_decoded():
    x = torch.randn(1000, requires_grad=True)

    with offload(Compressed(Host(), lossy=codecs.BFloat16())) as offloaded:
        y = x.exp().sum()

    y.backward()
    assert torch.equal(x.grad, x.detach().exp().bfloat16().float())
    assert not torch.equal(x.grad, x.detach().exp())
    assert offloaded.copied_in_bytes == 4000


def test_what_a_lossy_codec_may_not_touch_is_exact():
    def gradient(store):
        torch.manual_seed(0)
        x = torch.randn(64, 64, requires_grad=True)
        with offload(store):
            y = F.max_pool2d(F.relu(F.dropout(x * 3, 0.4)).view(1, 1, 64, 64), 2).sum()
        y.backward()
        return x.grad

    lossy = Compressed(Host(), lossy=codecs.Float8())

    assert torch.equal(gradient(lossy), gradient(Keep()))
    # 4096 elements: a bit each for the dropout and for relu; 1024 indices below 4096, in 16 bits each.
    assert lossy.statistics.copied_out_bytes == 512 + 512 + 1024 * 2


def test_prefetches_go_on_to_the_inner_store():
    store = Watched()
    handle = Compressed(store).put(torch.arange(100))

    handle.prefetch()

    assert (store.prefetches, store.gets) == (1, 0)


def test_handles_are_handles():
    methods = [name for name in vars(Handle) if not name.startswith("_")]

    handle = Compressed(Host()).put(torch.arange(100))

    assert methods == ["stored_bytes", "get", "prefetch"]
    assert all(hasattr(handle, name) for name in methods)


def test_no_room_is_no_handle():
    assert Compressed(Full()).put(torch.arange(100)) is None
    assert Compressed(Full()).put(torch.randn(100)) is None


def test_a_strict_store_raises():
    store = Compressed(Host(100, strict=True))

    assert store.strict
    assert store.put(torch.arange(100)).stored_bytes == 100
    with pytest.raises(StoreError, match="no room"):
        store.put(torch.arange(300))


def test_by_default_what_is_encoded_stays_on_the_device():
    compressed = Compressed()
    mask, values = filled((800,), torch.bool), torch.randn(100)

    handles = [compressed.put(mask), compressed.put(values)]

    assert isinstance(compressed.store, Keep)
    assert compressed.statistics.stored_bytes == 100 + 400
    assert compressed.statistics.copied_out_bytes == 0
    assert handles[1].get().data_ptr() == values.data_ptr()


def test_a_store_without_statistics_has_none():
    assert Compressed(Watched()).statistics is None


@pytest.mark.parametrize("lossy", [codecs.MaskBits(), codecs.Int8, "int8", torch.int8, object()])
def test_what_is_no_lossy_codec_is_refused(lossy):
    with pytest.raises(UnsupportedError, match=r"is not a lossy codec: .*BFloat16\(\), Float8\(\) or Int8\(\)"):
        Compressed(lossy=lossy)


def test_what_is_no_store_is_refused():
    with pytest.raises(UnsupportedError, match="expected a store"):
        Compressed(codecs.Int8())


def test_it_names_itself():
    assert repr(Compressed()) == "Compressed(Keep())"
    assert repr(Compressed(lossy=codecs.Int8(group=64))) == "Compressed(Keep(), lossy=Int8(group=64))"


@pytest.mark.gpu
def test_what_comes_back_is_on_the_device():
    for store in (Compressed(), Compressed(Host())):
        for tensor in (filled((800,), torch.bool), torch.arange(800), torch.randn(800)):
            back = store.put(tensor.cuda()).get()
            assert back.is_cuda and same(back.cpu(), tensor)
