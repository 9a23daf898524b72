"""The exact interpreter: a step simulated under a tree of regions, on integers.

points.py           the program points of a step, and what the profile knows of units at them
holding.py          what is held: bytes by storage, graphs and how long they live, outputs that a recompute passes on,
                    and what is in stores meanwhile
offload_choices.py  which saved tensors of a unit can go into a store, and at what cost
simulator.py        the live bytes at every program point
prediction.py       the cost and the peak of a tree, and a tree that was judged by them
split_backward.py   a backward with all regions recomputed ahead, and one split into an input and a weight pass
"""
