"""`torch.compile` with a budget.

graphs.py        the joint graph of forward and backward, read as data
trials.py        operators run by themselves, to see their allocations: the workspaces of a joint graph's kernels
programs.py      the programs that Inductor writes for it, line by line, and the live bytes while they run
halves.py        the two graphs of a split, their peak, and a split whose programs fit
partitioning.py  `PeakPartitioner`
compilation.py   `compiled`
"""
