"""Saved tensors: what autograd, or a region, keeps between forward and backward.

metadata.py      what is known of one without looking at its values
fingerprints.py  numbers that stand for its values
structure.py     arguments taken apart into tensors and a template
tensor.py        autograd's saved tensor as a value
graphs.py        what a graph has saved already, slot by slot
held.py          one tensor that a region keeps for its recompute
copies.py        copies that stay views of one another
packed.py        what autograd holds in place of one, and how compiled autograd unpacks it
handles.py       what is asked of a store
sizes.py         bytes as people write them
"""
