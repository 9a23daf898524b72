"""A policy's choices in a region: each operator output is kept, stored, or computed again.

op_info.py   the facts about an operator that the cache needs
kept.py      one output that is kept
cache.py     the operator outputs that one call keeps
windows.py   when a watcher sees, and when the mode is on
watching.py  the watchers of the operators, in the forward and in a recompute
mode.py      the dispatch mode that shows them the operators
forward.py   a call under a policy: its forward, and its part in a recompute
"""
