"""`torch.compile` with a budget.

graphs.py        the joint graph of forward and backward, read as data
trials.py        operators that are run by themselves, to see what they allocate
workspaces.py    what the kernels of a joint graph allocate beside their results
programs.py      what Inductor writes of a graph, line by line
running.py       what lies in memory while its programs run
halves.py        the two graphs of a split, and what they need
aiming.py        a split whose programs fit
partitioning.py  `PeakPartitioner`
compilation.py   `compiled`
"""
