"""Skips: tensors that bypass the modules between the one that stashes them and the one that pops them.

In reading order:

layouts.py     namespaces for names, and source and target stage of each skip
trackers.py    where skips wait between their stash and their pop
skippables.py  modules that stash and pop
inspection.py  whether the stashes and pops of a model match, and the routes of the skips
portals.py     how a skip gets from one stage to another, and which object holds it when
"""

from torchremat.pipeline.skip.inspection import inspect_skip_layout, verify_skippables
from torchremat.pipeline.skip.layouts import Namespace, SkipLayout
from torchremat.pipeline.skip.portals import Portal, PortalTracker
from torchremat.pipeline.skip.skippables import Skippable, pop, skippable, stash
from torchremat.pipeline.skip.trackers import CellTracker, SkipTracker, current_skip_tracker, use_skip_tracker

__all__ = [
    "CellTracker",
    "Namespace",
    "Portal",
    "PortalTracker",
    "SkipLayout",
    "SkipTracker",
    "Skippable",
    "current_skip_tracker",
    "inspect_skip_layout",
    "pop",
    "skippable",
    "stash",
    "use_skip_tracker",
    "verify_skippables",
]
