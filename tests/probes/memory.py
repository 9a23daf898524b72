"""What the allocator, the counters of flops and the trackers of storages tell, and a step as planning runs it."""

import gc

import torch

from torchremat._compat import accelerators
from torchremat.frames import OURS, PACKAGES
from torchremat.measuring import heap, profiled
from torchremat.measuring.allocator import record_allocations
from torchremat.measuring.before import bytes_before
from torchremat.measuring.flops import FlopCounter, formula_of
from torchremat.measuring.heap import heap_set_aside
from torchremat.measuring.modules import has_compiled, module_stack, visible_modules
from torchremat.measuring.observers import StorageTracker, observe_allocations, observe_storages
from torchremat.measuring.optimizers import with_wrapped
from torchremat.measuring.profiled import profiler_is_active
from torchremat.measuring.runs import Subject, subject_of, unobserved
from torchremat.measuring.step import run_backward
from torchremat.measuring.storages import StorageMap, StorageNumbers, address_of, tensors_in
from torchremat.measuring.tracebacks import without_our_frames
from torchremat.measuring.untouched import untouched
from torchremat.tensors.versioned import Versioned


def peaks_on_device(model, step):
    """The peaks of the second of two steps by the counters of the CUDA device, by kind; no gradients before."""
    for _ in range(2):
        for one in model.parameters():
            one.grad = None
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        step(model).backward()
        torch.cuda.synchronize()
    counted = torch.cuda.memory_stats()
    return {kind: counted[f"{kind}_bytes.all.peak"] for kind in ("requested", "allocated", "reserved")}


class FlopsByOperator(FlopCounter):
    """A counter that also has the flops of each operator by its name."""

    def __init__(self):
        super().__init__()
        self.by_operator = {}

    def _add(self, func, flops):
        super()._add(func, flops)
        name = str(getattr(func, "_overloadpacket", func))
        self.by_operator[name] = self.by_operator.get(name, 0) + flops
