"""A fingerprint is equal for equal bits, and another one for any other bits or order that programs make."""

import pytest
import torch
from torch import nn

from torchremat import UnsupportedError
from torchremat.tensors.fingerprints import fingerprint, hash_here

FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EIGHT_BITS = [torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES = [*FLOATING, *EIGHT_BITS, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128]


def some(dtype, *shape):
    torch.manual_seed(0)
    if dtype is torch.bool:
        return torch.rand(*shape) > 0.5
    return (torch.randn(*shape, dtype=torch.complex128 if dtype.is_complex else torch.float64) * 20).to(dtype)


def rows(tensor, order):
    """The rows of a tensor of any dtype in another order."""
    return torch.stack([tensor.unbind()[index] for index in order])


def alike(a, b):
    return torch.equal(fingerprint(a), fingerprint(b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_values_have_equal_fingerprints_whatever_the_strides(dtype):
    x = some(dtype, 6, 7)

    assert fingerprint(x).shape == (2,) and fingerprint(x).dtype is torch.int64
    assert alike(x, x.clone())
    assert alike(x, x.t().contiguous().t())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_columns_in_another_order_are_noticed(dtype):
    x = some(dtype, 6, 7)

    assert not alike(x, rows(x, [1, 0, 2, 3, 4, 5]))
    assert not alike(x, rows(x.t(), [1, 0, 2, 3, 4, 5, 6]).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("dimension", range(4))
@pytest.mark.parametrize("shape", [(6, 10, 12, 8), (6, 20, 32, 16), (5, 21, 33, 17)], ids=str)
def test_any_dimension_in_another_order_is_noticed(dtype, shape, dimension):
    x = some(dtype, *shape)
    places = torch.arange(x.shape[dimension])

    for order in (places.flip(0), places.roll(1), places[torch.randperm(len(places))]):
        assert not alike(x, x.index_select(dimension, order))
    assert alike(x, x.contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_one_bit_in_any_element_is_noticed(dtype):
    x = some(dtype, 4, 5)
    for index in range(x.numel()):
        y = x.clone()
        flat = y.view(-1)
        flat[index] = torch.nextafter(flat[index], torch.tensor(1e4, dtype=dtype))

        assert not alike(x, y)


def test_round_numbers_in_another_order_are_noticed():
    # Zeros and ones differ in the high bits of a word alone. Weights that grow from word to word shifted these out of
    # the sum where two words were a multiple of 256 apart.
    for numel in (1024, 2**15):
        x = torch.zeros(numel, dtype=torch.float64)
        x[0] = 1.0
        for place in range(256, 1024, 256):
            y = torch.zeros(numel, dtype=torch.float64)
            y[place] = 1.0

            assert not alike(x, y)


@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 8191, 8192, 9000])
def test_one_bit_in_a_long_tensor_is_noticed_and_words_need_not_be_aligned(place):
    x = some(torch.float32, 9001)
    y = x.clone()
    y[place] = torch.nextafter(y[place], torch.tensor(1e4))

    assert not alike(x, y)
    assert alike(torch.cat([torch.zeros(1), x])[1:], x)


def test_every_bit_of_a_mask_counts():
    mask = some(torch.bool, 3, 5)
    for index in range(15):
        other = mask.clone()
        other.view(-1)[index] ^= True

        assert not alike(mask, other)


def test_signs_of_zero_and_nans():
    assert not alike(torch.zeros(3), -torch.zeros(3))
    assert alike(torch.tensor([float("nan")]), torch.tensor([float("nan")]))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_any_shape(shape):
    assert alike(torch.ones(shape), torch.ones(shape))


def test_parameters_expanded_and_sparse_tensors():
    assert alike(nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2))
    assert alike(torch.ones(3, 1).expand(3, 4), torch.ones(3, 4))
    with torch.sparse.check_sparse_tensor_invariants():
        assert alike(torch.eye(3).to_sparse(), torch.eye(3))


@pytest.mark.parametrize("size", [1, 6])
def test_what_is_lazy_has_the_bits_of_the_materialised_copy(size):
    # A tensor that is lazily negated cannot be viewed as words, and a zero tangent has no memory to read.
    one = some(torch.complex64, size)
    lazy = [one.conj(), one.conj().imag, torch._neg_view(one.real.clone()), torch._efficientzerotensor(size, 2)]

    for tensor in lazy:
        assert torch.equal(fingerprint(tensor), fingerprint(tensor.clone().resolve_conj().resolve_neg()))


def test_nothing_is_saved_for_backward():
    x = torch.ones(3, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        found = fingerprint(x)

    assert saved == [] and not found.requires_grad


def test_a_class_whose_bits_cannot_be_read_is_refused():
    class Named(torch.Tensor):
        pass

    class Mine(torch.Tensor):
        """Says itself what its operators do, and does not say what is inside of it."""

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError

    # A class that has its elements in memory as any other tensor is compared.
    assert alike(torch.ones(2).as_subclass(Named), torch.ones(2))
    assert not alike(torch.ones(2).as_subclass(Named), torch.zeros(2))
    with pytest.raises(UnsupportedError, match="the values of a Mine that a region saves cannot be compared"):
        fingerprint(torch.ones(2).as_subclass(Mine))


# Python hashes the first two, NumPy adds up the words of the others; the last one has bytes left over.
@pytest.mark.parametrize("size", [3, 4_000, 40_000, 40_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_a_hash_on_the_host_notices_one_bit_and_another_order(dtype, size):
    x = some(dtype, size)
    for place in (0, size // 2, size - 1):
        y = x.clone()
        y.view(torch.uint8)[place * x.element_size()] ^= 1

        assert hash_here(y) != hash_here(x)
    assert hash_here(x.roll(1)) != hash_here(x) == hash_here(x.clone())
    assert hash_here(torch.cat([x[:1], x])[1:]) == hash_here(x)


def test_a_hash_on_the_host_is_of_dense_memory_in_its_order():
    x = some(torch.float32, 6, 7)

    assert hash_here(x.t()) == hash_here(x) == hash_here(nn.Parameter(x)) != hash_here(x.t().contiguous())
    assert hash_here(torch.ones(0, 3)) == hash_here(torch.ones(0))
    assert hash_here(torch.ones(())) == hash_here(torch.ones(1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hash_on_the_host_is_of_the_elements_of_a_tensor_with_gaps(dtype):
    x = some(dtype, 6, 7)
    y = x.clone()
    y.view(torch.uint8)[4, 5 * x.element_size()] ^= 1

    assert hash_here(x[1:, ::2]) == hash_here(x[1:, ::2].contiguous()) == hash_here(y[1:, ::2]) != hash_here(x[:5, ::2])
    assert hash_here(x[:, 3:6]) != hash_here(y[:, 3:6]) == hash_here(y[:, 3:6].contiguous())
    assert hash_here(x[0].expand(6, 7)) == hash_here(x[0].expand(6, 7).contiguous()) != hash_here(x)


def test_other_tensors_have_no_hash_on_the_host():
    one = some(torch.complex64, 6)
    others = [one.conj(), one.conj().imag, torch._neg_view(one.real.clone()), torch._efficientzerotensor(6, 2)]
    others += [torch.ones(400, 400)[:, :350], torch.ones(3, device="meta")]
    with torch.sparse.check_sparse_tensor_invariants():
        others.append(torch.eye(3).to_sparse())

    assert [hash_here(other) for other in others] == [None] * len(others)
    assert torch.vmap(lambda row: torch.ones(()) if hash_here(row) is None else row.sum())(torch.zeros(2, 3)).sum() == 2
