"""Random programs whose state changes, in the forward, between forward and backward, and in another region.

The same 240 run in every test run. `state_programs.py` says what a program is, and how to run many more.
"""

from collections import Counter

from regions.state_programs import CHANGES, FAILURES, READS, judged, made, smaller

_COUNT = 240


def test_random_programs_leave_the_world_of_the_plain_run():
    became, met, failing = Counter(), Counter(), []
    for seed in range(_COUNT):
        verdict = judged(made(seed))
        became[verdict.kind] += 1
        met += verdict.met
        if verdict.failed:
            failing.append((seed, verdict.kind))

    told = []
    for seed, kind in failing[:3]:
        program = smaller(made(seed), kind, most=60)
        told.append(f"seed {seed}: {kind}\n{program}\n  # {judged(program).text}")
    print(dict(became))
    assert failing == [], "\n\n".join([f"{dict(became)}: seeds {[seed for seed, _ in failing]}", *told])
    # Programs are of use only if they are legal, recompute, and meet all that there is.
    assert became["agrees"] > 0.9 * _COUNT
    assert met["recomputes"] > _COUNT
    assert {*CHANGES, *(f"reads: {name}" for name in READS)} - met.keys() == set()


def test_a_program_that_fails_is_made_smaller(monkeypatch):
    # One that fails if it reads a flag and goes backward, whatever else it does.
    def fails(program):
        reads = any("flag" in spec.reads for spec in program.nodes)
        return verdicts[reads and "loss.backward()" in str(program)]

    verdicts = {True: judged(made(0)), False: None}
    verdicts[False] = type(verdicts[True])("agrees")
    verdicts[True] = type(verdicts[True])("raises")
    monkeypatch.setattr("regions.state_programs.judged", fails)
    program = next(one for one in map(made, range(1000)) if fails(one).failed and len(one.steps) > 5)

    found = smaller(program, "raises")

    assert [spec.reads for spec in found.nodes if spec.reads] == [("flag",)]
    assert len(found.steps) == 1
    assert {"raises", "other gradients", "other state"} <= {*FAILURES}
