"""Regions: pieces of forward that can be recomputed.

guards.py       what a region changes in the objects among its arguments
modules.py      what it sees of its modules: parameters, buffers, training flags
sessions.py     whom recomputed tensors belong to, and how long
recompute.py    one recompute
region.py       the region itself: calls, slots, unpacking
transforms.py   regions under torch.func and forward-mode differentiation
compiling.py    regions in compiled functions
runs.py         several calls as one region, regions inside regions
functions.py    functions as regions
wrapping.py     modules as regions, by name
"""
