"""What a recompute must see again, beside its arguments and its modules.

Everything here is captured before the forward of a region and restored around its recompute, and put back afterwards,
so that a recompute leaves no trace in the thread that runs it.

global_state.py  autocast, numeric flags, function and dispatch modes
generators.py    torch's random generators
locks.py         one recompute at a time exchanges what all threads share
registry.py      what users add: the random numbers of Python and NumPy, their own
hidden.py        operators that are ours, and that nobody is shown
"""
