import pytest

from torchremat.errors import ScheduleError
from torchremat.schedules.dataflow import Dataflow, Operator, Value


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
