"""The behaviour and the bytes of a step: one forward traced, one step watched.

interception.py    the forward of every module, routed through one function
traces.py          a traced forward as data
tracing.py         the calls of a forward, and what they save
saves.py           which of these saves still have a graph in the end
operators.py       the operators of each call
units.py           the flat order of calls that a plan makes choices for
roots.py           trees adapted to the roots of a step, and to sharded modules
watching.py        the step in which every unit is a region
comparison.py      whether each unit repeats its forward in that step
replayability.py   the units that do not, each tried by itself
not_replayable.py  the message about those that do not
events.py          the allocator's events of the watched step
backwards.py       the backward of one unit in the watched step
reading.py         figures, read out of the allocator's events
optimizers.py      the bytes of the optimizer
step_seconds.py    the seconds that ways of stepping add
overheads.py       the executor's own overheads
profiling.py       all of it together: a profile
store_sizes.py     payloads of stores from each unit
store_speeds.py    speeds of stores
peers.py           the processes that train one model together
agreement.py       one profile merged from those of all processes
"""
