"""How far a plan can be from the best possible.

relaxation.py    a profile as a chain that takes no more than it does
plain_step.py    what a plain step computes and reads back, operator by operator
executing.py     what the executor takes for them
certificates.py  two lower bounds, and the words for what they rest on
"""
