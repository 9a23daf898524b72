"""A model spread over devices or machines, and a batch cut into microbatches.

pipe.py            a sequence of layers on several devices of one process, and the checks of it
microbatch.py      a batch cut into microbatches, and their results put together
runner.py          one forward, clock by clock
cells.py           one microbatch on one stage, and a recompute ahead of its gradient
dependency.py      edges of the graph that say "before"
ordering.py        the edges of a step: the order of its backward
copying.py         microbatches between devices, and the streams that copy and wait
workers.py         a thread for each device, with the state around the code that gives it work
skip/              tensors that bypass stages
batchnorm.py       running statistics of mini-batches
balance/           how many layers each stage gets
events.py          events of a step, and who owns the time when several overlap
event_recorder.py  records them
timeline.py        the events of each stage, their times, the idle share, and the predicted time of a step
gantt.py           stages over time as a picture
attaching/         sessions for the schedules of torch.distributed.pipelining
"""

from torchremat.pipeline.attaching.attached import Attached, attach, detach
from torchremat.pipeline.attaching.orders import in_flight, microbatch_budget
from torchremat.stages.stage_planner import StagePlanner, plan_stages
from torchremat.stages.stage_plans import DevicePlan, StagePlan, StagePlans

__all__ = [
    "Attached",
    "DevicePlan",
    "StagePlan",
    "StagePlanner",
    "StagePlans",
    "attach",
    "detach",
    "in_flight",
    "microbatch_budget",
    "plan_stages",
]
