"""Give a PyTorch model a memory budget.

The table of contents, in the order of the architecture.
"""

from torchremat import extend
from torchremat.errors import (
    BudgetError,
    BudgetWarning,
    CheckpointError,
    CompileWarning,
    DeprecatedWarning,
    DeviceError,
    DeviceWarning,
    GuardError,
    MutationError,
    OrderWarning,
    PipelineError,
    PlanError,
    PlanWarning,
    PolicyError,
    RepeatWarning,
    ScheduleError,
    ShapeWarning,
    SkipError,
    SkippableError,
    StepError,
    StoreError,
    StoreWarning,
    TorchrematError,
    UnsupportedError,
    VersionError,
    WrapError,
)
from torchremat.interop.installing import Installation, install, uninstall
from torchremat.loops.loop_call import loop
from torchremat.measuring.freeing import Freed
from torchremat.measuring.keeping import saved
from torchremat.measuring.measurement import Measurement, measure
from torchremat.measuring.saved_data import Saved
from torchremat.measuring.saved_report import SavedReport
from torchremat.optimizing.parameter_offload import ParameterOffload, offload_parameters
from torchremat.optimizing.release import GradientRelease, last_microbatch, release_gradients
from torchremat.optimizing.stored_state import OptimizerOffload, offload_optimizer
from torchremat.pipeline.pipe import Pipe
from torchremat.planning.bounds.certificates import Certificate
from torchremat.planning.compiling.compilation import Compiled, compiled
from torchremat.planning.compiling.partitioning import PeakPartitioner
from torchremat.planning.devices.device import Device
from torchremat.planning.guarding.attempts import Attempt
from torchremat.planning.guarding.steps import GuardedStep, guard
from torchremat.planning.planner import Planner, frontier, plan
from torchremat.planning.results.frontiers import Frontier, FrontierPoint
from torchremat.planning.results.plans import Plan
from torchremat.planning.searches.search_budget import Progress
from torchremat.planning.shapes.adaptive import Adaptive
from torchremat.planning.training.fitting import fit
from torchremat.planning.training.report import Report
from torchremat.planning.training.verification import verify
from torchremat.regions.doors import checkpoint, checkpointed, unwrap, wrap
from torchremat.regions.runtime import frozen, is_checkpointing, is_recomputing, name, run_once
from torchremat.regions.sessions import Session, session
from torchremat.regions.spilling import spill
from torchremat.schedules.loop_schedules import LoopSchedule
from torchremat.stores import codecs
from torchremat.stores.base import StoreStatistics
from torchremat.stores.compressed import Compressed
from torchremat.stores.disk import Disk
from torchremat.stores.host import Host
from torchremat.stores.keep import Keep
from torchremat.stores.offloading import Offload, offload
from torchremat.stores.tiers import Tiers
from torchremat.tensors.tensor import SavedTensor

__version__ = "0.2.0"

__all__ = [
    "Adaptive",
    "Attempt",
    "BudgetError",
    "BudgetWarning",
    "Certificate",
    "CheckpointError",
    "CompileWarning",
    "Compiled",
    "Compressed",
    "DeprecatedWarning",
    "Device",
    "DeviceError",
    "DeviceWarning",
    "Disk",
    "Freed",
    "Frontier",
    "FrontierPoint",
    "GradientRelease",
    "GuardError",
    "GuardedStep",
    "Host",
    "Installation",
    "Keep",
    "LoopSchedule",
    "Measurement",
    "MutationError",
    "Offload",
    "OptimizerOffload",
    "OrderWarning",
    "ParameterOffload",
    "PeakPartitioner",
    "Pipe",
    "PipelineError",
    "Plan",
    "PlanError",
    "PlanWarning",
    "Planner",
    "PolicyError",
    "Progress",
    "RepeatWarning",
    "Report",
    "Saved",
    "SavedReport",
    "SavedTensor",
    "ScheduleError",
    "Session",
    "ShapeWarning",
    "SkipError",
    "SkippableError",
    "StepError",
    "StoreError",
    "StoreStatistics",
    "StoreWarning",
    "Tiers",
    "TorchrematError",
    "UnsupportedError",
    "VersionError",
    "WrapError",
    "checkpoint",
    "checkpointed",
    "codecs",
    "compiled",
    "extend",
    "fit",
    "frontier",
    "frozen",
    "guard",
    "install",
    "is_checkpointing",
    "is_recomputing",
    "last_microbatch",
    "loop",
    "measure",
    "name",
    "offload",
    "offload_optimizer",
    "offload_parameters",
    "plan",
    "release_gradients",
    "run_once",
    "saved",
    "session",
    "spill",
    "uninstall",
    "unwrap",
    "verify",
    "wrap",
]
