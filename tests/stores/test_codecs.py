"""Codecs: lossless ones bit for bit, lossy ones within what they declare."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.stores import pack_bits, pack_bits_anywhere, spread_bits
from stores.conformance import filled, same
from torchremat import UnsupportedError, codecs
from turns import in_turn

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
LOSSY = [
    codecs.BFloat16(),
    codecs.Int8(),
    codecs.Int8(group=16),
    codecs.Int8(group=10**7),
    codecs.Float8(),
    codecs.Float8(group=32),
]


def round_trip(codec, tensor):
    before = tensor.clone()

    encoded = codec.encode(tensor)

    assert torch.equal(tensor.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))
    if encoded is None:
        return None
    assert encoded.payload.is_contiguous()
    assert encoded.payload.nbytes < tensor.nbytes
    back = codec.decode(encoded.payload, encoded.form)
    assert back.shape == tensor.shape and back.dtype == tensor.dtype and back.is_contiguous()
    return back


def test_masks_take_a_bit_for_each_element():
    mask = filled((3, 7, 5), torch.bool)

    encoded = codecs.MaskBits().encode(mask)

    assert encoded.payload.nbytes == 14  # 105 bits
    assert torch.equal(round_trip(codecs.MaskBits(), mask), mask)


@given(st.lists(st.booleans(), min_size=2, max_size=70))
def test_bits_are_the_same_however_they_are_packed(values):
    mask = torch.tensor(values)

    packed = pack_bits_anywhere(mask)

    assert torch.equal(packed, pack_bits(mask))
    assert torch.equal(spread_bits(packed, len(values), True, False, torch.bool), mask)
    assert torch.equal(spread_bits(packed, len(values), 2.5, -1.0, torch.float16), torch.where(mask, 2.5, -1.0).half())


@pytest.mark.parametrize(
    ("least", "most", "dtype", "width"),
    [
        (0, 0, torch.int64, 1 / 8),
        (-3, -2, torch.int16, 1 / 8),
        (0, 2, torch.int64, 1),
        (-5, 250, torch.int16, 1),
        (-5, 251, torch.int32, 2),
        (0, 65535, torch.int64, 2),
        (-1, 65535, torch.int64, 4),
        (2**63 - 2, 2**63 - 1, torch.int64, 1 / 8),
        (2**63 - 256, 2**63 - 1, torch.int64, 1),
        (2**63 - 65536, 2**63 - 1, torch.int64, 2),
        (-(2**63), -(2**63) + 2**32 - 1, torch.int64, 4),
        (-(2**31), 2**31 - 1, torch.int64, 4),
    ],
)
def test_indices_take_the_fewest_bytes_that_hold_them(least, most, dtype, width):
    ends = torch.tensor([least, most], dtype=dtype).repeat(40)

    encoded = codecs.NarrowIndices().encode(ends)

    assert encoded.payload.nbytes == 80 * width
    assert torch.equal(round_trip(codecs.NarrowIndices(), ends), ends)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9), st.sampled_from([0, 4, 8, 16, 32, 50]))
def test_indices_come_back(values, shift):
    tensor = torch.tensor([value >> shift for value in values])

    back = round_trip(codecs.NarrowIndices(), tensor)

    assert back is None or torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("ends", "dtype"), [([0, 2**32], torch.int64), ([0, 65536], torch.int32), ([-128, 256], torch.int16)]
)
def test_indices_that_need_their_bytes_stay(ends, dtype):
    assert codecs.NarrowIndices().encode(torch.tensor(ends, dtype=dtype).repeat(9)) is None


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@in_turn("pair", [(0.0, 2.0), (0.0, -0.0), (1.5, 1.5), (float("-inf"), 0.0), (float("nan"), 1.0), (float("nan"), -1.0)])
def test_two_values_take_a_bit_for_each_element(pair, dtype):
    mask = filled((7, 40), torch.bool)
    tensor = torch.where(mask, *torch.tensor(pair, dtype=dtype))

    encoded = codecs.TwoValues().encode(tensor)

    assert encoded.payload.nbytes == 35
    assert same(codecs.TwoValues().decode(encoded.payload, encoded.form), tensor)


def test_a_third_value_anywhere_is_not_lost():
    tensor = torch.zeros(1000)
    tensor[::2] = 1.0

    assert codecs.TwoValues().encode(tensor) is not None
    for where in (0, 1, 2, 17, 998, 999):
        third = tensor.clone()
        third[where] = -0.0 if third[where] == 0.0 else 1.0000001
        assert codecs.TwoValues().encode(third) is None


def test_a_second_value_that_comes_late():
    tensor = torch.ones(10_000)
    tensor[9_999] = 3.0

    assert same(round_trip(codecs.TwoValues(), tensor), tensor)


@pytest.mark.parametrize("codec", [codecs.MaskBits(), codecs.NarrowIndices(), codecs.TwoValues()], ids=repr)
@pytest.mark.parametrize(
    "dtype", [*FLOATS, torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_lossless_codecs_lose_nothing_or_decline(codec, dtype):
    for seed, shape in enumerate([(), (1,), (5, 7), (64, 64)]):
        tensor = filled(shape, dtype, seed)
        back = round_trip(codec, tensor)
        assert back is None or same(back, tensor)


def hard(dtype, count, seed):
    """Values of all magnitudes, with everything that is special about floats among them."""
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    low, high = {torch.float16: (-24, 15), torch.float64: (-1074, 1023)}.get(dtype, (-149, 127))
    exponents = torch.randint(low, high + 1, (count,), generator=generator).to(torch.float64)
    values = (torch.rand(count, generator=generator, dtype=torch.float64) * 2 - 1) * torch.exp2(exponents)
    tensor = values.to(dtype)
    special = [0.0, -0.0, info.max, info.min, info.smallest_normal, info.smallest_normal * info.eps]
    special += [float("inf"), float("-inf"), float("nan"), 1.0, -1.0]
    for value in special:
        if torch.rand((), generator=generator) < 0.5:
            where = torch.randint(count, (max(1, count // 50),), generator=generator)
            tensor[where] = value
    return tensor


def assert_within_bound(codec, tensor):
    back = round_trip(codec, tensor)
    if back is None:
        return 0
    finite = tensor.isfinite()
    assert torch.equal(back.isnan(), tensor.isnan())
    assert torch.equal(back[tensor.isinf()], tensor[tensor.isinf()])
    errors, bound = (back.to(torch.float64) - tensor.to(torch.float64)).abs(), codec.bound(tensor)
    assert bound.shape == tensor.shape and bound.dtype == torch.float64
    assert torch.equal(bound[~finite], torch.zeros_like(bound[~finite]))
    assert bool((errors[finite] <= bound[finite]).all())
    return 1


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FLOATS), st.integers(1, 700), st.integers(0, 2**32))
@pytest.mark.parametrize("codec", LOSSY, ids=repr)
def test_lossy_codecs_keep_to_their_bound(codec, dtype, count, seed):
    assert_within_bound(codec, hard(dtype, count, seed))


@pytest.mark.parametrize("codec", LOSSY, ids=repr)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_lossy_codecs_keep_to_their_bound_on_ordinary_numbers(codec, dtype):
    tensor = torch.randn(33, 127).to(dtype)

    encoded = assert_within_bound(codec, tensor)

    # bfloat16 is for float32 alone, and groups as large as this would be 4 MB of scales for nothing.
    assert encoded == (not isinstance(codec, codecs.BFloat16) or dtype is torch.float32)


@pytest.mark.parametrize("codec", [codecs.Int8(), codecs.Float8(), codecs.Float8(group=4_000_000)], ids=repr)
def test_tensors_that_are_encoded_in_parts(codec):
    # More than three parts of 2**21 elements, and groups that end inside a part.
    tensor = torch.randn(3 * 2**21 + 77)
    tensor[-1] = 100.0

    assert_within_bound(codec, tensor)


@pytest.mark.parametrize(
    ("codec", "bytes_of_float32"),
    [
        (codecs.BFloat16(), 2048),
        (codecs.Int8(), 1024 + 8 * 4),
        (codecs.Int8(group=512), 1024 + 2 * 4),
        (codecs.Float8(), 1028),
    ],
)
def test_bytes_of_lossy_codecs(codec, bytes_of_float32):
    assert codec.encode(torch.randn(32, 32)).payload.nbytes == bytes_of_float32


def test_bounds_that_are_written_down():
    tensor = torch.tensor([1.0, -100.0, 0.0]).repeat(200)

    # To six digits; beyond them are the roundings of the arithmetic.
    assert codecs.BFloat16().bound(tensor)[:3].tolist() == pytest.approx([2**-8, 100 * 2**-8, 0], rel=1e-6)
    assert codecs.Int8().bound(tensor)[:3].tolist() == pytest.approx([100 / 252] * 3, rel=1e-3)
    assert codecs.Float8().bound(tensor)[:3].tolist() == pytest.approx([1 / 16, 100 / 16, 100 / 425984], abs=1e-3)


def test_finite_numbers_stay_finite_in_bfloat16():
    largest = torch.tensor([torch.finfo(torch.float32).max, torch.finfo(torch.float32).min, float("inf")] * 9)

    back = round_trip(codecs.BFloat16(), largest)

    assert back[:3].tolist() == [torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).min, float("inf")]


@pytest.mark.parametrize(
    "make", [lambda: codecs.Int8(group=15), lambda: codecs.Int8(group=0), lambda: codecs.Float8(group=1)]
)
def test_groups_that_save_nothing_are_refused(make):
    with pytest.raises(UnsupportedError, match=r"group=\d+ saves no bytes, .* Use 16 or more"):
        make()


def test_a_codec_is_what_has_its_methods():
    assert all(
        isinstance(codec, codecs.Codec)
        for codec in [codecs.MaskBits(), codecs.NarrowIndices(), codecs.TwoValues(), *LOSSY]
    )
    assert [isinstance(codec, codecs.LossyCodec) for codec in [codecs.MaskBits(), *LOSSY]] == [False] + [True] * len(
        LOSSY
    )
    assert codecs.Form(torch.Size([2]), torch.float32) == codecs.Form(torch.Size([2]), torch.float32, ())


@pytest.mark.gpu
@pytest.mark.parametrize("codec", [codecs.MaskBits(), codecs.NarrowIndices(), *LOSSY], ids=repr)
def test_codecs_on_a_device_agree_with_those_on_the_host(codec):
    dtype = {codecs.MaskBits: torch.bool, codecs.NarrowIndices: torch.int64}.get(type(codec), torch.float32)
    tensor = hard(torch.float32, 5000, 0) if dtype is torch.float32 else filled((5000,), torch.bool).to(dtype)

    encoded = codec.encode(tensor.cuda())
    back = codec.decode(encoded.payload, encoded.form)

    assert encoded.payload.is_cuda and back.is_cuda
    if dtype is torch.float32:
        finite = tensor.isfinite()
        errors = (back.cpu().double() - tensor.double()).abs()
        assert bool((errors[finite] <= codec.bound(tensor)[finite]).all())
        assert torch.equal(back.cpu().isnan(), tensor.isnan())
    else:
        assert torch.equal(back.cpu(), tensor)
