"""Bounds on how far a plan is from the best possible.

plain_step.py    the operators of a plain step, forward and backward, and their reads
certificates.py  two lower bounds, what they are computed from, and their assumptions in words
"""
