"""A model spread over devices or machines, and a batch cut into microbatches."""

from torchremat.pipeline.attaching.attached import Attached, attach, detach
from torchremat.pipeline.attaching.orders import in_flight, microbatch_budget
from torchremat.stages.planner import StagePlanner, plan_stages
from torchremat.stages.plans import DevicePlan, StagePlan, StagePlans

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
