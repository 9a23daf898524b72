"""Bounds on how far a plan is from the best possible.

relaxation.py    a profile as a chain that needs no more than it does, and the executor's overhead for operators
plain_step.py    the operators of a plain step, forward and backward, and their reads
certificates.py  two lower bounds, and their assumptions in words
"""
