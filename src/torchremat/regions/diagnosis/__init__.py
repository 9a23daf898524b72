"""The message for a recompute that differs from its forward.

differences.py  the findings of a check, as bare facts
captures.py     objects that calls reach, described by name, and the paths of the modules that are running
operators.py    the operators that a region ran, where, and the tensors that they saved
reruns.py       a region run once more, leaving no trace
causes.py       likely causes
message.py      the whole message
"""
