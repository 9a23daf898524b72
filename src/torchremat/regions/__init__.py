"""Regions: pieces of forward that can be recomputed.

NOTE [ Rules of a region ]

Semantics first; the mechanism obeys. 1 to 6 are those of `torch.utils.checkpoint`.

 1. A saved tensor belongs to the innermost region alone.
 2. The inputs of an inner region are saved tensors of its parent: to unpack a tensor, all the regions around it are
    recomputed. Tensors in keyword arguments and nested containers are inputs like any other.
 3. A recompute starts as if no region were active; regions met on the way are respected.
 4. Recomputed tensors belong to one session. Each is dropped when the node that unpacked it ends (`retain_graph=True`
    included); in a session of several backward passes, when the last declared pass has run that node, else when the
    session closes.
 5. A recompute stops as soon as everything needed has been recomputed (unless early stop is switched off).
 6. Backward inside a region works.
 7. A saved tensor may be unpacked any number of times until its node is done; an unpack outside any backward keeps
    nothing.
 8. A session may span several backward calls, overlapping ones too: one recompute serves them all.
 9. A recompute may be started before the gradient arrives.
10. An input, or a parameter that the recompute reads, changed in place since the forward is an error that names it. The
    watched version belongs to the tensor that the optimizer writes (under FSDP the shard). A change that the recompute
    does not read is no error. Writes that bypass versions (`.data`, NumPy) are a stated limit.
11. A recompute has no lasting side effect: however it ends (early stop, error, interrupt), all state is afterwards what
    it was before it began.
12. The library frees everything that autograd would free: no region, session or handle outlives its graph; nothing
    needs the cycle collector.
13. While a region is recomputed, everything that its forward could reach through Python has the state it had when that
    forward began. See NOTE [ The world of a call ] in `state`.

In reading order:

rules.py             when a region holds, stops and releases, as functions that planning calls as well
decisions.py         the policy protocol, and its answers
selective/           outputs that a policy keeps in a region: their cache, their watchers, the mode that sees operators
calls.py             one call in a region: everything needed to run it again
values.py            the check of values
recording.py         what a region noted of its forward: its first layer, which a recompute and its diagnosis read
slots.py             autograd's placeholders for saved tensors
settings.py          how a region behaves
threads.py           the current state of each thread around regions
hooks.py             the hooks that autograd calls, and how long recomputed tensors stay: the second layer of a region
sessions.py          the owner of recomputed tensors
restoring.py         the state that a call saw, shown to its recompute
refilling.py         the saved tensors of one recompute, compared and put into their slots
recompute.py         one recompute: the calls run again
differentiated.py    the call of a derivative: the forward of a region, and a backward through it, run again
derivatives.py       the derivative of a region, while the graph of a gradient is built: the third layer of a region
region.py            the region itself, with what runs it: calls, saving, unpacking
transforms.py        regions under torch.func and forward-mode differentiation
compiling.py         regions in compiled functions
offload_schedule.py  saved tensors of calls, on their way into stores and back
runs.py              several calls as one region, regions inside regions
doors.py             functions and modules as regions: `checkpoint`, `checkpointed`, `wrap`, `unwrap`
forwards.py          the forward of a wrapped module
patches.py           the attributes that wrapping puts on a module
reentrant.py         the reentrant region
runtime.py           queries and requests for code that runs in a region, and names by which a policy knows tensors
carriers.py          values that reach a region past its arguments
spilling.py          tensors that a graph has saved already, moved into a store
footprints.py        the bytes that a recompute adds, and their release where no backward will run
rehearsals.py        steps that the library runs itself, which are no steps of a training
diagnosis/           the message for a recompute that differs from its forward
"""
