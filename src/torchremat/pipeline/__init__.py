"""A model spread over devices or machines, and a batch cut into microbatches."""

from torchremat.pipeline.attaching.attached import Attached, attach, detach
from torchremat.pipeline.attaching.orders import in_flight, microbatch_budget

__all__ = ["Attached", "attach", "detach", "in_flight", "microbatch_budget"]
