"""Regions: pieces of forward that can be recomputed.

    guards.py       state that a region changes: buffers of its modules, objects among its arguments
    session.py      whom recomputed tensors belong to, and how long
    region.py       the region itself: calls, slots, recompute
    runs.py         several calls as one region, regions inside regions
    checkpoint.py   functions as regions
    wrapping.py     modules as regions, by name
"""
