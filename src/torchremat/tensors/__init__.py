"""Saved tensors: the tensors that autograd, or a region, keeps between forward and backward.

metadata.py      the metadata of a tensor, without its values
versioned.py     a tensor at a version
fingerprints.py  numbers that stand for its values
structure.py     arguments split into tensors and a template
tensor.py        autograd's saved tensor as a value
graphs.py        the tensors that a graph has saved, slot by slot
parts.py         the plain tensors that make up a tensor
held.py          one tensor that a region keeps for its recompute
copies.py        copies that stay views of one another
packed.py        the object that autograd holds in place of a tensor, and how compiled autograd unpacks it
handles.py       the interface of a store
sizes.py         bytes as people write them
"""
