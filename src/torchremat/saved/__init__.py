"""Saved tensors: what autograd, or a region, keeps between forward and backward."""
