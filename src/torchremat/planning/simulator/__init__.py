"""The exact interpreter: a step simulated under a tree of regions, on integers.

points.py           the program points of a step, and what is known of units at them
offload_choices.py  what of a unit can go into a store, and what that takes
offloaded.py        what is in stores meanwhile
graphs.py           which graphs there are, and how long
links.py            what a recompute passes on from unit to unit
simulator.py        what is live at every moment
prediction.py       what a tree costs and needs
ahead.py            a backward for which all was recomputed before
parts.py            a backward in two parts, for inputs and for weights
"""
