"""A step that is run again when memory runs out.

settings.py    what was asked for, checked
attempts.py    what one attempt failed at, as data and in words
gradients.py   gradients from before the step: what an attempt added to them is not added again
sources.py     what another attempt would find further on: iterators, optimizers
snapshots.py   all else that a step changes, so that the next attempt begins as the first did
tightening.py  the next plan, smaller than the one that failed
agreement.py   several processes: all repeat, or none
steps.py       `guard`
"""
