"""Loops: many steps with a carried state, each a region. See NOTE [ What a loop is made of ].

In reading order:

carries.py     the state between two steps
stretches.py   which carries are in a slot, and the recompute of the others
slices.py      what is scanned
checking.py    what the body may return, and its outputs stacked
watching.py    what one step saves, and what the last one keeps
forward.py     steps as regions
transfers.py   what it takes to move a carry to a store, measured
requests.py    what the caller asks for
ways.py        plainly, with a known length, with one that is not known, within a budget
running.py     the function that users call
"""
