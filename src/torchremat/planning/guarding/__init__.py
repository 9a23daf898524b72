"""A step that is run again when memory runs out.

settings.py    the user's settings, checked
attempts.py    the failure of one attempt, as data and in words; several processes all repeat, or none
gradients.py   gradients from before the step: additions of a failed attempt are not repeated
snapshots.py   objects that have advanced by the next attempt, and all other state that a step changes
tightening.py  the next plan, smaller than the one that failed
steps.py       `guard`
"""
