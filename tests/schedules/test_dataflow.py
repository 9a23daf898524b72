import pytest

from torchremat.errors import ScheduleError
from torchremat.schedules.dataflow import Dataflow, Operator, Value, walk


def test_all_that_is_wrong_is_listed():
    values = (Value(size_bytes=4), Value(size_bytes=-1))
    operators = (
        Operator(name="mm", inputs=(1,), outputs=(1,), cost=-1.0),
        Operator(name="add", inputs=(5,), outputs=(1,), cost=float("nan")),
    )

    with pytest.raises(ScheduleError) as error:
        Dataflow(operators=operators, values=values)

    assert str(error.value) == (
        "not a dataflow: value 1: size_bytes=-1 is negative; "
        "operator 0 (mm): cost=-1.0 is negative or not a number; "
        "operator 0 (mm): reads value 1, which operator 0 makes later; "
        "operator 1 (add): cost=nan is negative or not a number; "
        "operator 1 (add): value 5 of 2 does not exist; "
        "operator 1 (add): value 1 is made twice"
    )


def test_values_that_nobody_makes_are_inputs():
    flow = Dataflow(
        operators=(Operator(name="mm", inputs=(0, 0), outputs=(1,), cost=2.0),),
        values=(Value(size_bytes=4), Value(size_bytes=4, needed=True)),
    )

    assert flow.operators[0].inputs == (0, 0)


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
