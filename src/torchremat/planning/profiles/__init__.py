"""What a step does and needs: one forward traced, one step watched.

interception.py    the forward of every module, routed through one function
traces.py          a traced forward as data
tracing.py         the calls of a forward, and what they save
saves.py           which of that has a graph in the end
operators.py       the operators of each call
units.py           the flat order of calls that a plan chooses among
roots.py           trees made fit for the roots of a step, and for what is sharded
watching.py        the step in which every unit is a region
replayability.py   the units that do in a recompute what they do in their forward: each is tried
not_replayable.py  the words for those that do not
events.py          the allocator's events of it
backwards.py       the backward of one unit in it
reading.py         figures, read out of the allocator's events
optimizers.py      what the optimizer needs
overheads.py       what the executor takes by itself
profiling.py       all of it: a profile
store_sizes.py     what stores take from each unit
store_speeds.py    how fast stores are
peers.py           the processes that train one model together
agreement.py       one profile of all of theirs
"""
