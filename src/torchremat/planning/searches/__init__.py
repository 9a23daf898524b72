"""The best plan for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

loops.py             loops in the trace, whose steps are equal stages of the chain
chains.py            a profile as a chain of scalars
flows.py             the operators of a step or unit as a dataflow
replays.py           the bytes of a region that holds some operators' outputs
partial_backward.py  the bytes of its backward, in the middle of which it recomputes
unit_operators.py    the operators of a unit, and what holding some of them takes
options.py           ways of keeping a part of a unit
granularity.py       units split into the calls inside them
candidates.py        a tree with its prediction
storing.py           which kept units go to a store, and when
loosening.py         replacements for a node that recompute less
peak_bounds.py       lower bounds on the peak of a changed tree
search_budget.py     the time limit of the search, and its progress
progress.py          the progress that an observer is given
solver.py            the best tree for one profile
search.py            the search: whole units, units split, units stored
microbatches.py      the trees for a part of a model that holds several microbatches, and the bytes of one
"""
