import sys

import torch
from torch import nn

from torchremat.frames import running, running_modules, runs_in, steps_of, user_frame


class Inner(nn.Module):
    def forward(self, look):
        return look()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, look):
        return self.inner(look)


def frames():
    return list(running())


def test_the_innermost_frame_comes_first():
    innermost, caller, *_ = frames()

    assert innermost.f_code is frames.__code__
    assert caller.f_code is test_the_innermost_frame_comes_first.__code__


def test_frames_of_torch_are_not_the_users():
    seen = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(user_frame().f_code.co_filename)
            return func(*args, **(kwargs or {}))

    with Mode():
        nn.functional.gelu(torch.zeros(1))

    assert set(seen) == {__file__}


def test_the_modules_that_run():
    outer = Outer()

    assert outer(lambda: list(running_modules())) == [outer.inner, outer]


def test_whether_code_of_a_file_runs():
    assert Outer()(lambda: runs_in(__file__, ("Inner.",)))
    assert not Outer()(lambda: runs_in(__file__, ("Innermost.",)))
    assert not Outer()(lambda: runs_in(torch.__file__, ("Inner.",)))
    assert not runs_in(__file__, ("Inner.",))


def test_who_asks_for_each_operator_walks_the_stack_in_one_function():
    # A generator and a predicate took two functions a frame, and a model in a plan lies 35 frames deep.
    called = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename == runs_in.__code__.co_filename:
            called.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        Outer()(lambda: runs_in("nowhere", ()))
    finally:
        sys.setprofile(None)

    assert called == ["runs_in"]


def test_the_steps_of_a_traceback_are_outermost_first():
    def raises():
        raise ValueError

    try:
        raises()
    except ValueError as error:
        found = [step.tb_frame.f_code.co_name for step in steps_of(error.__traceback__)]

    assert found == ["test_the_steps_of_a_traceback_are_outermost_first", "raises"]
