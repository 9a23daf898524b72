"""The exact interpreter: a walk through a step under a tree of regions, on integers.

moments.py     the moments of a step, and what is known of units at them
cargo.py       what of a unit can go into a store, and what that takes
away.py        what is in stores meanwhile
graphs.py      which graphs there are, and how long
links.py       what a recompute passes on from unit to unit
memory.py      what is live at every moment
prediction.py  what a tree costs and needs
ahead.py       a backward for which all was recomputed before
parts.py       a backward in two parts, for inputs and for weights
"""
