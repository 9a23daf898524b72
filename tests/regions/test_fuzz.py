"""Random programs, with regions and without.

Two hundred of them, always the same, run in every test run. A long run tries new ones each time:

    TORCHREMAT_FUZZ=5000 pytest tests/regions/test_fuzz.py --hypothesis-seed=1

prints how many programs it has run and what became of them (with `-s`). See `programs.py` for what a program is.
"""

import os
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from probes.regions import dispatch_modes, thread, top_saved_tensor_hooks
from regions.programs import BACKWARD, FILLS_LATER, differences, outcome, programs
from torchremat.errors import MutationError

_LONG = int(os.environ.get("TORCHREMAT_FUZZ", "0"))
_PROFILE = settings(
    max_examples=_LONG or 200,
    derandomize=not _LONG,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def judged(program):
    """Run a program in all modes; return what became of it in a word, or fail."""
    plain = outcome(program, "plain")
    ours = outcome(program, "ours")
    assert_nothing_is_left()
    if plain.error is None:
        if ours.error is not None:
            assert isinstance(ours.error, MutationError) and program.writes(), repr(ours.error)
            assert ours.when == "backward" or program.names() & BACKWARD.keys()
            return "refused"
        found = differences(ours, plain)
        if found and program.names() & FILLS_LATER and program.names() & {"hooks", "save_on_cpu"}:
            return "cannot be judged"  # the hooks copy memory that nothing has filled yet, in the plain run too
        if found and program.writes() and program.names() & {"hooks", "save_on_cpu"}:
            # Autograd does not check versions of what hooks have packed: there the plain run is wrong in silence.
            found = differences(ours, outcome(program, "reference"))
        assert found == []
        assert_recomputes(program, ours)
        return "agrees"
    if plain.when == "forward" and not program.names() & BACKWARD.keys():
        assert ours.when == "forward" and type(ours.error) is type(plain.error), repr(ours.error)
        return "raises in forward"
    if ours.error is not None:
        assert isinstance(ours.error, RuntimeError), repr(ours.error)
        return "refused as by plain autograd"
    reference = outcome(program, "reference")
    stores = program.names() & {"offload", "offload_kept", "policy"}
    if stores and (reference.error is not None or "hooks" in program.names()):
        return "cannot be judged"  # a copy in a store is right where autograd refuses, and nothing else says what is
    if program.names() & FILLS_LATER or reference.error is not None:
        assert reference.error is None, f"not refused: {plain.error!r}"
        return "cannot be judged"
    assert differences(ours, reference) == []
    return "agrees where plain autograd refuses"


def assert_recomputes(program, ours):
    reference = outcome(program, "reference")
    if reference.error is not None:
        return
    if program.names() & {"policy", "offload", "offload_kept"}:
        return  # some need none
    for part, forwards in ours.run.forwards.items():
        if part in reference.run.asked:
            assert ours.run.recomputes[part] > 0
        if not program.names() & BACKWARD.keys():
            backwards = 1 if "session" in program.ending else ours.run.backwards
            assert ours.run.recomputes[part] <= forwards * backwards


def assert_nothing_is_left():
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    assert top_saved_tensor_hooks(True) is None
    assert thread.now.recomputing == 0 and thread.now.calls == [] and thread.now.scopes == [] and not thread.now.frozen
    assert thread.now.selecting is None and dispatch_modes() == []


@pytest.mark.filterwarnings(
    "ignore:Use of masked_fill_ on expanded", "ignore:A saved_tensors_hooks context:FutureWarning"
)
def test_random_programs_agree_with_the_plain_run_or_are_refused():
    became = Counter()

    @_PROFILE
    @given(programs())
    def run(program):
        became[judged(program)] += 1

    run()

    print(dict(became))
    assert became["agrees"] > sum(became.values()) // 2
