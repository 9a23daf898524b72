"""Splits aimed at a limit by what their programs need, with programs that are made up: a list, and more beside it."""

import random
from dataclasses import replace

from schedules.joint_chains import best, chain
from torchremat.planning.compiling.halves import Halves, aimed
from torchremat.schedules.joint import Adjustments, adjustments_of, live, split
from torchremat.schedules.saved_values import Saver
from turns import in_turn


class Programs:
    """What a compiler makes of the splits of a list: as the list with something beside it, and some bytes more."""

    def __init__(self, joint, beside, *, odd=lambda _: 0, is_silent=False):
        self.joint = joint
        self.true = replace(joint, adjustments=beside)
        self.odd = odd
        self.is_silent = is_silent
        self.made = 0

    def of(self, found):
        self.made += 1
        more = self.odd(found)
        peak_bounds = [
            {name: size + more for size, name in one}
            for one in live(self.true, found.saved, found.forward, found.backward)
        ]
        known = {} if self.is_silent else {"beside": adjustments_of(self.joint, found, *peak_bounds)}
        peak = max(max(one.values()) for one in peak_bounds)
        return Halves(split=found, forward=None, backward=None, peak_bytes=peak, **known)

    def plain(self):
        return self.of(split(self.joint, self.joint.asked))


def made_up(seed, steps=8):
    """A chain, and copies that lie there from an operator of the forward until its reader in the backward has run."""
    random.seed(seed)
    joint = chain(*([random.randrange(2, 9) for _ in range(steps)] for _ in range(2)))
    first = dict.fromkeys(range(2 * steps), 0)
    for _ in range(3):
        begin, size = random.randrange(steps), random.randrange(1, 7)
        for index in range(begin, 2 * steps - begin):
            first[index] += size
    return joint, Adjustments(first=first)


@in_turn("seed", range(8))
def test_the_split_is_the_best_by_what_programs_need(seed):
    joint, beside = made_up(seed)
    programs = Programs(joint, beside)
    plain = programs.plain()
    limit = plain.peak_bytes - 9

    found = aimed(Saver(joint), limit, plain, programs.of)

    least = best(programs.true, limit)
    assert found.peak_bytes <= limit
    # The plain split has told all: the first try is right. One that costs less and nearly fits may be tried beside it.
    assert found.split.cost == least
    assert programs.made <= 3
    assert found.split.cost > best(joint, limit)  # which the list alone would have taken, and does not fit


def test_where_nothing_is_known_of_operators_the_peak_tells():
    joint, beside = made_up(0)
    programs = Programs(joint, beside, is_silent=True)
    plain = programs.plain()
    limit = plain.peak_bytes - 9

    assert aimed(Saver(joint), limit, plain, programs.of).peak_bytes <= limit


def test_a_candidate_that_nearly_fits_by_prediction_is_tried():
    # What lies beside {2, 4} is less than for others by two, which is known only once its programs are written.
    joint = chain([40, 40, 40, 40], [5, 9, 1, 9])
    programs = Programs(joint, Adjustments(), odd=lambda found: -2 * (found.saved == {1, 2, 4}))
    plain = programs.plain()
    cheap = split(joint, {1, 2, 4})
    limit = cheap.peak_bytes - 1

    found = aimed(Saver(joint, [cheap.saved]), limit, plain, programs.of)

    assert found.split.saved == cheap.saved
    assert found.peak_bytes == limit - 1


def test_what_does_not_fit_after_all_is_left_for_what_does():
    # Whatever saves value 2 needs more than can be known before.
    joint = chain([8] * 8, [1] * 8)
    programs = Programs(joint, Adjustments(), odd=lambda found: 9 * (2 in found.saved and len(found.saved) < 8))
    plain = programs.plain()

    found = aimed(Saver(joint), plain.peak_bytes - 8, plain, programs.of)

    assert found.peak_bytes <= plain.peak_bytes - 8
    assert programs.made <= 6


@in_turn("seed", range(4))
def test_the_lowest_where_nothing_fits_is_found_again_when_it_is_asked_for(seed):
    joint, beside = made_up(seed)
    programs = Programs(joint, beside, odd=lambda found: hash(found.saved) % 3)
    plain = programs.plain()

    lowest = aimed(Saver(joint), 1, plain, programs.of)
    again = aimed(Saver(joint), lowest.peak_bytes, plain, programs.of)

    assert 1 < lowest.peak_bytes < plain.peak_bytes
    assert again.peak_bytes <= lowest.peak_bytes
