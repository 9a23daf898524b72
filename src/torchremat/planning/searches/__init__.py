"""The best plan for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

loops.py           loops in the trace, whose steps are equal stages of the chain
chains.py          a profile as a chain of scalars, and the tables of its schedules
flows.py           the operators of a step or unit as a dataflow
replays.py         the bytes of a region that holds some operators' outputs, and of its backward
unit_operators.py  the operators of a unit, and what holding some of them takes
options.py         ways of keeping a part of a unit
cuts.py            where a unit's recompute is cut into parts, and what each part needs
granularity.py     units split into the calls inside them, and what their own code saves between these
storing.py         which kept units go to a store, and when
loosening.py       replacements for a node that recompute less, and lower bounds on the peak of the changed tree
placements.py      all placements of regions by hand in a short chain
search_budget.py   the time limit of the search, and the progress that an observer is given
solver.py          the best tree for one profile
dividing.py        the best tree with recomputes in parts
search.py          the search: whole units, units split, units stored, recomputes in parts
trials.py          the search over runs of a step that takes gradients itself
microbatches.py    the trees for a part of a model that holds several microbatches, and the bytes of one
"""
