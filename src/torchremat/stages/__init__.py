"""A plan for each stage of a pipeline, from a budget for each device.

samples.py     one microbatch of each stage, and what lies on a device whatever the plan is
pipes.py       those of a `Pipe`
schedules.py   those of a schedule of torch.distributed.pipelining
loads.py       how many microbatches a device holds at each of its actions
parts.py       what a microbatch needs whose backward runs in two parts
optimizers.py  what the optimizer of a device's stages needs
choosing.py    the cheapest trees for the stages of a device
plans.py       plans of stages as data
planner.py     `plan_stages`
"""
