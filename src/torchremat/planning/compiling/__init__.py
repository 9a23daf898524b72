"""`torch.compile` with a budget.

graphs.py        the joint graph of forward and backward, read as data
workspaces.py    what kernels allocate beside their results
partitioning.py  `PeakPartitioner`
compilation.py   `compiled`
"""
