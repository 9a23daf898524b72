"""Sessions for the schedules of torch.distributed.pipelining, which run as they are.

attached.py   the result of `attach`, and how it is undone
patches.py    one attribute of one object, replaced for a while
stages.py     a session for each microbatch of a stage
waits.py      where a schedule waits for a transfer
lookahead.py  recomputes during a transfer
orders.py     the order of a schedule, and how many microbatches a stage holds
gathering.py  the records of all processes, on one clock
"""
