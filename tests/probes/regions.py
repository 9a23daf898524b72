"""Regions as objects, the forwards that they are on, what a thread is in, and the hooks and modes it has."""

from torchremat._compat.autograd import current_graph_task, make_saved_tensor, top_saved_tensor_hooks
from torchremat._compat.modes import EagerMode, dispatch_modes
from torchremat.ambient.generators import drawn, generator_states
from torchremat.ambient.hidden import hidden
from torchremat.policies.ordinals import save_ordinals, windows_of
from torchremat.regions import calls
from torchremat.regions.calls import Call
from torchremat.regions.doors import matching
from torchremat.regions.patches import forward_under, is_wrapped, set_forward
from torchremat.regions.recompute import RegionRecompute
from torchremat.regions.region import Region
from torchremat.regions.rehearsals import is_rehearsing
from torchremat.regions.runs import CallDecision, RegionPlace, Scope
from torchremat.regions.selective.mode import Collecting, Replaying
from torchremat.regions.selective.op_info import op_info_of
from torchremat.regions.sessions import active_session, open_sessions
from torchremat.regions.settings import Observer, Settings
from torchremat.regions.slots import Slot
from torchremat.regions.threads import Now, plainly, thread
from torchremat.state.backups import Backups
from torchremat.state.containers import Dicts
from torchremat.state.following import objects
from torchremat.state.reach import reach
from torchremat.state.world import Reaching
from torchremat.tensors.graphs import nodes_of, slots_of
from torchremat.tensors.held import holding
