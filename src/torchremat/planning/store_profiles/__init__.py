"""What stores do with the saved tensors of each unit, measured with real ones.

sizes.py   the bytes that go into a store and stay, by unit
speeds.py  how fast they go and come back
"""
