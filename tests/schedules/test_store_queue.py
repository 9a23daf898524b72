"""Waiting for copies: against a simulation in small steps of time, which shares no code with it."""

import random

from torchremat.schedules.store_queue import (
    QueuedCopy,
    earliest_dues,
    latest_begins,
    reading_wait_s,
    writing_wait_s,
)
from turns import in_turn


def simulated(rows, asked, due, *, at_end):
    """How many ticks are waited for, with whole numbers: computing or waiting and copying go on in ticks."""
    queue, left, waited = [], {}, 0

    def tick():
        if queue:
            left[queue[0]] -= 1
            if not left[queue[0]]:
                queue.pop(0)

    def compute(count):
        for _ in range(count):
            tick()

    for position, count in enumerate(rows):
        if at_end:
            compute(count)
        for number, ticks in asked.get(position, ()):
            left[number] = ticks
            queue.append(number)
        while any(left[number] for number in due.get(position, ())):
            tick()
            waited += 1
        if not at_end:
            compute(count)
    return waited


def random_moves(rng, count):
    """Positions at which each is asked for and due, and how long it takes, in the order of the queue."""
    moves = []
    for _ in range(rng.randint(0, 6)):
        asked = rng.randrange(count)
        moves.append((asked, rng.randint(asked, count - 1), rng.randint(1, 7)))
    return sorted(moves, key=lambda move: move[0])


@in_turn("seed", range(200))
def test_waiting_is_that_of_a_queue(seed):
    rng = random.Random(seed)
    rows = [rng.randint(0, 5) for _ in range(rng.randint(1, 7))]
    moves = random_moves(rng, len(rows))
    asked, due = {}, {}
    for number, (a, d, ticks) in enumerate(moves):
        asked.setdefault(a, []).append((number, ticks))
        due.setdefault(d, []).append(number)

    writing = writing_wait_s(rows, [QueuedCopy(asked=a, due=d, seconds=ticks) for a, d, ticks in moves])
    reading = reading_wait_s(rows, [QueuedCopy(asked=a, due=d, seconds=ticks) for a, d, ticks in moves])

    assert writing == simulated(rows, asked, due, at_end=True)
    assert reading == simulated(rows, asked, due, at_end=False)


@in_turn("seed", range(100))
def test_no_earlier_due_and_no_later_begin_goes_without_waiting(seed):
    rng = random.Random(seed)
    rows = [rng.randint(1, 5) for _ in range(rng.randint(2, 7))]
    count = len(rows)
    made = sorted(rng.sample(range(count), rng.randint(1, count)))
    sizes = [rng.randint(0, 4) for _ in made]

    dues = earliest_dues(rows, list(zip(made, sizes, strict=True)))
    begins = latest_begins(rows, list(zip(made, sizes, strict=True)))

    def writing(dues):
        return writing_wait_s(
            rows, [QueuedCopy(asked=m, due=d, seconds=s) for m, d, s in zip(made, dues, sizes, strict=True)]
        )

    def reading(begins):
        return reading_wait_s(
            rows, [QueuedCopy(asked=b, due=m, seconds=s) for m, b, s in zip(made, begins, sizes, strict=True)]
        )

    # What is not done at the end, or has not enough time from the beginning on, is waited for whatever is chosen.
    least_writing, least_reading = writing([count - 1] * len(made)), reading([0] * len(made))
    assert writing(dues) == least_writing
    assert reading(begins) == least_reading
    for place, due in enumerate(dues):
        if due > made[place] and not least_writing:
            assert writing([*dues[:place], due - 1, *dues[place + 1 :]]) > 0
    for place, begin in enumerate(begins):
        is_last_of_its_position = begins[place + 1 : place + 2] != [begin]
        if begin < made[place] and is_last_of_its_position and not least_reading:
            assert reading([*begins[:place], begin + 1, *begins[place + 1 :]]) > 0


def test_a_window_that_is_too_small_is_waited_for():
    # Two reads of 3 s are due where 2 s and then 1 s of backward have run: 6 s of copies, 3 s beside them.
    reads = [QueuedCopy(asked=0, due=1, seconds=3.0), QueuedCopy(asked=0, due=2, seconds=3.0)]

    assert reading_wait_s([2.0, 1.0, 1.0], reads) == 3.0
