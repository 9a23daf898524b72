"""Loops: many steps with a carried state, each a region. See NOTE [ What a loop is made of ].

In reading order:

step_inputs.py  what a step is given: the state between two steps, and a slice of what is scanned
stretches.py    which carries are in a slot, and the recompute of the others
first_run.py    steps as regions
requests.py     what the caller asks for, and what it takes to move a carry to a store
ways.py         plainly, with a known length, with one that is not known, within a budget; what one step saves
loop_call.py    the function that users call, and what the body may return
"""
