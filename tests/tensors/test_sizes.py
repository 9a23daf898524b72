from __future__ import annotations

import pytest

from torchremat.errors import BudgetError
from torchremat.tensors.sizes import format_bytes, parse_bytes
from turns import in_turn


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (1, 1),
        (28_313_608, 28_313_608),
        ("1B", 1),
        ("6GiB", 6_442_450_944),
        ("800MB", 800_000_000),
        ("1.5 GiB", 1_610_612_736),
        (" 2 kB ", 2000),
        ("2KB", 2000),
        ("3TB", 3_000_000_000_000),
        ("1TiB", 1_099_511_627_776),
        (".5KiB", 512),
        ("6G", 6_000_000_000),  # what SI says, and the smaller of both
        ("6gb", 6_000_000_000),
        ("6Gi", 6_442_450_944),
        ("6gib", 6_442_450_944),
        ("800m", 800_000_000),
        ("0.1TiB", 109_951_162_777),  # 109951162777.6, and a budget does not grow
    ],
)
def test_sizes(size: int | str, count: int):
    assert parse_bytes(size) == count


@in_turn(
    "size",
    [True, False, float("nan"), 6.0, -1, 0, "0B", "0.5 B", "-6GiB", "6GB/s", "", " ", "6", "6Gib it", "6b b", "nan GiB",
     "inf GB", "1e3 MB", "6 Gi B", "60%", "٦GiB", None, b"6GiB", [6]],
)  # fmt: skip
def test_what_is_no_size_is_named_with_what_is_allowed(size: object):
    with pytest.raises(BudgetError) as raised:
        parse_bytes(size)  # type: ignore[arg-type]

    assert repr(size) in str(raised.value)
    assert '"6GiB"' in str(raised.value)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (28_313_608, "27.00 MiB"),
        (6_442_450_944, "6.00 GiB"),
        (3 * 2**40, "3.00 TiB"),
        (-2048, "-2.00 KiB"),
        (5000 * 2**40, "5000.00 TiB"),
    ],
)
def test_formats(count: int, text: str):
    assert format_bytes(count) == text
