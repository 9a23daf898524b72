"""A plan for each stage of a pipeline, from a budget for each device.

sampling.py    one microbatch of each stage, and what lies on a device whatever the plan is
loads.py       how many microbatches a device holds at each of its actions
choosing.py    the cheapest trees for the stages of a device
plans.py       plans of stages as data
planner.py     `plan_stages`
"""
