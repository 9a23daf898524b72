"""The command line: measure, look into, plan, verify and fit the training step that a factory returns.

targets.py    the factory, and what it returned
options.py    what commands can be told
commands.py   the commands
"""
