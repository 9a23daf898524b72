"""The references of each kind of object that a call may reach: one function per kind.

code.py     functions and classes
objects.py  tensors, modules, containers and everything else
"""
