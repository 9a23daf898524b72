"""Stores: where saved tensors wait between forward and backward, each behind the same two methods."""
