"""The behaviour and the bytes of a step: one forward traced, one step watched.

traces.py          a traced forward as data, and how the events of its record show it
tracing.py         the calls of a forward, and what they save
units.py           the flat order of calls that a plan makes choices for
grain.py           which calls these are
watching.py        the step in which every unit is a region
backwards.py       the backward of one unit in the watched step
reading.py         figures, read out of the allocator's events
profile_pair.py    the profiles of a step over coarser and finer units
watched_step.py    that step, run and recorded
splitting.py       how it is watched in little memory, and which units are split in it then
scaling.py         seconds of a step that runs alone, from those of a watched one
optimizers.py      the bytes of the optimizer
step_runs.py       runs of a step that takes gradients itself, under any tree
run_profile.py     its profile
step_seconds.py    the seconds that ways of stepping add
profiling.py       all of it together: a profile
"""
