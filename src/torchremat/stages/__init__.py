"""A plan for each stage of a pipeline, from a budget for each device.

samples.py           one microbatch of each stage, and the bytes on a device under any plan
pipes.py             the samples of a `Pipe`, and the bytes on a device of it at each of its actions
schedules.py         the samples of a schedule of torch.distributed.pipelining
loads.py             how many microbatches a device holds at each of its actions
split_microbatch.py  the bytes of a microbatch whose backward is split into an input and a weight pass
losses.py            the bytes of the loss, and of the optimizer of a device's stages
sums.py              the bytes of a microbatch among several in one backward
choosing.py          the cheapest trees for the stages of a device
stage_plans.py       plans of stages as data
stage_planner.py     `plan_stages`
"""
