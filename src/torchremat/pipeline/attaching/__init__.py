"""Sessions for the schedules of torch.distributed.pipelining, which run as they are.

stages.py    a session for each microbatch of a stage, and recomputes during a transfer
waits.py     where a schedule waits for a transfer
orders.py    the order of a schedule, and how many microbatches a stage holds
attached.py  the result of `attach`, how it is undone, and the records of all processes on one clock
"""
