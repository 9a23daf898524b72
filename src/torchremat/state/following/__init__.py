"""The references of each kind of object that a call may reach: one function per kind.

code.py     functions and classes
tensors.py  tensors, parameters and generators
objects.py  modules, containers and everything else
"""
