"""What leads where: one function for each kind of object that a call may reach.

code.py     functions and classes
tensors.py  tensors, parameters and generators
objects.py  modules, containers and everything else
"""
