"""What a policy chooses in a region: what its operators make is kept, stored, or computed again.

op_info.py  what matters of an operator to the cache
kept.py     one output that is kept
cache.py    what one call keeps of its operators' outputs
mode.py     the dispatch mode that sees the operators
forward.py  a call under a policy: its forward, and its part in a recompute
draws.py    where generators are while kept random outputs are returned
"""
