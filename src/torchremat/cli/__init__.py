"""The command line: measure, look into, plan, verify and fit the training step that a factory returns.

arguments.py  the factory and its result, and the options of the commands
commands.py   the commands
"""
