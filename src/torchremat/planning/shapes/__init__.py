"""Steps of changing shapes: each runs under a plan for the shape of its batch.

batches.py    the sizes of a batch
figures.py    the numbers of a profile that depend on shapes
fits.py       figures at a shape that never ran
families.py   shapes with the same control flow through a model
choosers.py   the tree for a shape, in milliseconds
classes.py    classes of shapes, each with its tree
decisions.py  what a step runs under, decided by one process for all
gauges.py     the peak and the calls of a real step
adaptive.py   `Adaptive`
"""
