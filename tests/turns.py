"""Fewer tests for as much: cases of a millisecond that one test runs in turn, and pairs in the place of all pairs."""

import functools
import inspect

import torch


def in_turn(name, values):
    """As `pytest.mark.parametrize`, in one test that ends with the first case that fails, and says which it was.

    pytest takes longer than a millisecond for a test of its own. Fixtures are the test's, and shared by its cases; each
    begins with the seed that a test begins with.
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


def meetings(these, those, *, each):
    """Return pairs in which each of `these` meets that many of `those`, and each of those about as many of these.

    For two lists of kinds whose code does not know the other's kind: what fails for a pair fails for another one too.
    """
    these, those = list(these), list(those)
    return [
        (one, those[(each * number + turn) % len(those)]) for number, one in enumerate(these) for turn in range(each)
    ]
