"""Trees as data, what planning makes of a model on the way to them, and what it predicts."""

from torchremat._compat.inductor import partitioner_for_inductor
from torchremat.measuring.store_speeds import Bandwidth, Speed
from torchremat.planning import bars, profiled_step
from torchremat.planning import store_profiles as store_sizes
from torchremat.planning.compiling import partitioning
from torchremat.planning.compiling.trials import measured_workspaces
from torchremat.planning.devices.device import MeasuredKernel, device_of
from torchremat.planning.devices.machines import ForwardSeconds, Here
from torchremat.planning.devices.overheads import Overheads
from torchremat.planning.exactness.not_replayable import told
from torchremat.planning.layout import (
    Calls,
    HeldOperators,
    PlannedCall,
    applied_scopes,
    calls_of,
    install,
    installed,
)
from torchremat.planning.parameter_bytes import room_bytes
from torchremat.planning.peers import messages
from torchremat.planning.peers.agreement import profiled_together
from torchremat.planning.plan_options import PlanOptions
from torchremat.planning.profiles import profiling, step_seconds
from torchremat.planning.profiles.grain import find_units
from torchremat.planning.profiles.profile_pair import ProfilePair
from torchremat.planning.profiles.profiling import profile_subject
from torchremat.planning.profiles.reading import UnitCosts
from torchremat.planning.profiles.scaling import scaled
from torchremat.planning.profiles.step_seconds import SteppingSeconds
from torchremat.planning.profiles.tracing import trace
from torchremat.planning.profiles.watching import UnitObserver, every_unit, halves
from torchremat.planning.results.descriptions import held_of, plan_of
from torchremat.planning.results.plan_views import described
from torchremat.planning.roots import fitted
from torchremat.planning.searches import options
from torchremat.planning.searches.cuts import cut_options
from torchremat.planning.searches.dividing import with_parts
from torchremat.planning.searches.flows import flow_of, pooled_seconds, unit_seconds
from torchremat.planning.searches.granularity import divisible, mix
from torchremat.planning.searches.loops import FoundLoop, loops_in
from torchremat.planning.searches.loosening import PeakBounds
from torchremat.planning.searches.options import options_of, options_with
from torchremat.planning.searches.search import Search
from torchremat.planning.searches.search_budget import SearchBudget
from torchremat.planning.searches.solver import Solver
from torchremat.planning.shapes import gauges
from torchremat.planning.shapes.figures import figures_of, form_of, with_figures
from torchremat.planning.shapes.fits import cover
from torchremat.planning.simulator.holding import OffloadedBytes
from torchremat.planning.simulator.offload_choices import OffloadChoice, StoredUnit
from torchremat.planning.simulator.points import Live, ProgramPoint, RanForward
from torchremat.planning.simulator.prediction import over_bytes, predict
from torchremat.planning.simulator.simulator import MemorySimulator
from torchremat.planning.simulator.split_backward import InputPassSimulator, recomputed_ahead
from torchremat.planning.stepping import ways_of_stepping
from torchremat.planning.store_profiles import weighed
from torchremat.planning.training import fitting
from torchremat.planning.training.fitting import fit_with
from torchremat.regions.offload_schedule import OffloadSchedule
from torchremat.schedules.chain import DEEPEST, KeepNode, RegionNode, depth, kept
from torchremat.schedules.operator_selection import choices, evaluate
