"""The message for a recompute that is not its forward.

differences.py  what a check finds, as bare facts
paths.py        the paths of the modules that are running
operators.py    the operators that a region ran, where, and what they saved
captures.py     what calls reach, described by name
reruns.py       a region run once more, leaving no trace
causes.py       why, probably
message.py      the whole message
"""
