"""Real steps under a plan: one that is run to be measured, and those of a training.

verification.py  one step with the regions of a model and one without them, compared
outcomes.py      the results of both, bit for bit
report.py        what `verify` returns
fitting.py       plans made anew until a measured step keeps the budget
conditions.py    what decides which tensors a step saves
checks.py        whether the step of a training is the planned one, and within the planned bytes
trained.py       the optimizers that step on a model, found as they step
sounded.py       steps of the user's loop, measured
"""
