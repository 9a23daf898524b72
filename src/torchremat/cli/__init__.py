"""The command line: measure, look into, plan, verify and fit the training step that a factory returns.

targets.py   the factory, and its result
options.py   the options of the commands
commands.py  the commands
"""
