"""A plan for each stage of a pipeline, from a budget for each device.

samples.py     one microbatch of each stage, and the bytes on a device under any plan
pipes.py       the samples of a `Pipe`
schedules.py   the samples of a schedule of torch.distributed.pipelining
loads.py       how many microbatches a device holds at each of its actions
parts.py       the bytes of a microbatch whose backward runs in two parts
optimizers.py  the bytes of the optimizer of a device's stages
choosing.py    the cheapest trees for the stages of a device
plans.py       plans of stages as data
planner.py     `plan_stages`
"""
