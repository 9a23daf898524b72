"""Whether the recompute of a unit repeats its forward: a plan may choose only units whose recompute does.

comparison.py      seen in the watched step, for all units at once
replayability.py   the units that do not, or of which that step cannot tell, each tried by itself
not_replayable.py  the message about those that do not
"""
