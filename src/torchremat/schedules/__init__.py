"""Schedules: what is kept, recomputed and stored as data, what that takes, and the solvers.

Chains of stages:

chain.py        chains of stages, and trees of regions over them, also as written by hand
interpreter.py  the peak and the cost of a tree
rounding.py     bytes in slots
tables.py       the least cost of every end of every region, for every number of free slots
persistent.py   the cheapest schedule of a chain under a limit
store_queue.py  copies to and from a store

Operators:

dataflow.py            the operators of a forward, the values that they read and make, and live bytes of kernels
knapsacks.py           things of the greatest worth within a limit
linear_programs.py     linear programs, in which some variables may have to be integers
operator_selection.py  the outputs that a region holds
bounds.py              the least cost of recomputing under any schedule
joint.py               a forward and its backward as one list of operators
prices.py              the values worth saving at a price for each byte
recompute_spans.py     stretches that the backward can recompute by themselves
saved_values.py        the values to save for a peak within a limit

Loops:

binomial.py        equal steps, whose number is known or not
uneven.py          steps that take different times
hierarchies.py     carries that may wait in stores
mixtures.py        bytes that hold carries or recorded steps
loop_schedules.py  how many carries wait, and how many steps are recorded at once

Pipelines:

pipelines.py  the actions of each worker, and their order on a clock
"""
