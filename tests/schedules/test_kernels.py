import pytest

from torchremat.schedules.dataflow import Operator
from torchremat.schedules.kernels import walk

BYTES = 100


def operator(name: str, reads: tuple[int, ...], makes: int, *, fuses: bool = True) -> Operator:
    return Operator(name=name, inputs=reads, outputs=(makes,), cost=1.0, fuses=fuses)


def live(operators: list[Operator], keep: tuple[int, ...]) -> dict[str, int]:
    """What is live in each kernel, in hundreds of bytes, beside value 0, which is there all the time."""
    found = walk(operators, [BYTES] * 10, begin=(), keep=keep, other_bytes=0)
    return {name: size // BYTES for size, name in found}


def test_what_only_one_reader_reads_is_never_in_memory_if_both_fuse():
    chain = [operator("sin", (0,), 1), operator("cos", (1,), 2), operator("sum", (2,), 3)]

    assert live(chain, keep=(3,)) == {"sum": 1}


def test_what_an_inlined_value_is_made_of_lives_until_its_reader_has_run():
    # The matrix products do not fuse. Until "add" has run, "mm" is there, though "sin" comes long before.
    operators = [
        operator("mm", (0,), 1, fuses=False),
        operator("sin", (1,), 2),
        operator("other mm", (0,), 3, fuses=False),
        operator("add", (2, 3), 4),
    ]

    assert live(operators, keep=(4,)) == {"mm": 1, "other mm": 2, "add": 3}


@pytest.mark.parametrize(
    ("second", "keep"),
    [
        pytest.param(operator("mm", (1,), 2, fuses=False), (2,), id="its reader does not fuse"),
        pytest.param(operator("cos", (1,), 2), (1, 2), id="it is kept"),
    ],
)
def test_a_value_stays_in_memory_if(second: Operator, keep: tuple[int, ...]):
    assert live([operator("sin", (0,), 1), second], keep) == {"sin": 1, second.name: 2}


def test_a_value_with_two_readers_stays_in_memory():
    operators = [operator("sin", (0,), 1), operator("cos", (1,), 2), operator("mul", (1, 2), 3)]

    # "cos" has one reader, and runs in it.
    assert live(operators, keep=(3,)) == {"sin": 1, "mul": 2}
