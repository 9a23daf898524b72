"""What stores do with the saved tensors of each unit: the bytes that go into a store and stay, measured in sizes.py."""
