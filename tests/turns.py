"""Cases of a millisecond, run in turn by one test: pytest takes longer than that for a test of its own."""

import functools
import inspect

import torch


def in_turn(name, values):
    """As `pytest.mark.parametrize`, in one test that ends with the first case that fails, and says which it was.

    Fixtures are the test's, and shared by its cases; each begins with the seed that a test begins with.
    """
    values = list(values)

    def decorate(function):
        signature = inspect.signature(function)
        others = [one for one in signature.parameters.values() if one.name != name]

        @functools.wraps(function)
        def test(**given):
            for value in values:
                torch.manual_seed(0)
                try:
                    function(**{name: value}, **given)
                except BaseException as error:
                    error.add_note(f"in the case {name} = {value!r}")
                    raise

        test.__signature__ = signature.replace(parameters=others)
        return test

    assert values
    return decorate
