"""Give a PyTorch model a memory budget.

The table of contents, in the order of the architecture.
"""

from torchremat.errors import (
    BudgetError,
    CheckpointError,
    MutationError,
    OrderWarning,
    PlanError,
    ScheduleError,
    ShapeWarning,
    StepError,
    TorchrematError,
    UnsupportedError,
    VersionError,
    WrapError,
)
from torchremat.regions.checkpoint import checkpoint, checkpointed
from torchremat.regions.session import Session, session
from torchremat.regions.wrapping import unwrap, wrap

__version__ = "0.1.0"

__all__ = [
    "BudgetError",
    "CheckpointError",
    "MutationError",
    "OrderWarning",
    "PlanError",
    "ScheduleError",
    "Session",
    "ShapeWarning",
    "StepError",
    "TorchrematError",
    "UnsupportedError",
    "VersionError",
    "WrapError",
    "checkpoint",
    "checkpointed",
    "session",
    "unwrap",
    "wrap",
]
