"""The exact interpreter: a step simulated under a tree of regions, on integers.

points.py           the program points of a step, and what the profile knows of units at them
live_bytes.py       the bytes that are held, counted by storage
offload_choices.py  which saved tensors of a unit can go into a store, and at what cost
offloaded.py        which bytes are in stores during the simulation
graphs.py           which graphs exist, and how long they live
links.py            outputs that a recompute passes on from unit to unit
simulator.py        the live bytes at every program point
prediction.py       the cost and the peak of a tree
ahead.py            a backward for which all regions were recomputed ahead
parts.py            a backward in two parts, for inputs and for weights
"""
