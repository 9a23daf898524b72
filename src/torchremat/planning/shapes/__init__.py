"""Steps of changing shapes: each runs under a plan for the shape of its batch.

batches.py   how a batch looks
figures.py   what of a profile depends on shapes
fits.py      figures at a shape that nobody has run
families.py  shapes that take the same way through a model
choosers.py  the tree for a shape, in milliseconds
classes.py   classes of shapes, each with its tree
gauges.py    what a real step did
adaptive.py  `Adaptive`
"""
