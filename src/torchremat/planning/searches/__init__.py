"""The best tree for a profile and a limit: candidates from the solvers, judged by the exact interpreter.

chains.py            a profile as a chain of scalars
flows.py             the operators of a step or unit as a dataflow
replays.py           the bytes of a region that holds some operators' outputs
partial_backward.py  the bytes of its backward, in the midst of which it recomputes
options.py           ways of keeping a unit between all and nothing
granularity.py       units taken apart into the calls that they make
candidates.py        a tree that was judged
storing.py           which kept units go to a store, and when
loosening.py         what may stand in the place of a node, to recompute less
peak_bounds.py       the moments that decide whether a change fits
search_budget.py     how long it may take, and how far it is
progress.py          what is told of that
solving.py           the search
microbatches.py      the trees for a part of a model that holds several microbatches, and what one of them needs
"""
