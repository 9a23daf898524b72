"""State that a recompute must see again, in addition to its arguments and its modules.

The state is captured before the forward of a region, restored for its recompute, and put back afterwards, so that a
recompute leaves no trace in the thread that runs it.

global_state.py  autocast, numeric flags, modes and observers, and the lock around what all threads share
generators.py    torch's random generators
registry.py      state that users add: the random numbers of Python and NumPy, their own
hidden.py        our own operators, which are hidden from observers of a region
"""
