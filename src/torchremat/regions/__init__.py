"""Regions: pieces of forward that can be recomputed.

In reading order:

settings.py     how a region behaves
threads.py      what each thread does with regions right now
contents.py     contents of mutable objects: read, compared, written back
guards.py       what a region changes in the objects among its arguments
visible.py      what a function can be seen to reach before it runs
optimizers.py   optimizers that write parameters without saying so
sharding.py     parameters that FSDP2 has sharded
modules.py      what a region sees of its modules: parameters, buffers, training flags
inputs.py       where the arguments of calls come from
calls.py        one call in a region: all that it takes to make it again
sessions.py     whom recomputed tensors belong to, and how long
differences.py  what a check finds, as bare facts
values.py       the check of values
recompute.py    one recompute
traits.py       what matters of an operator to whoever keeps its outputs
decisions.py    what a policy is, and what it answers
paths.py        the paths of the modules that are running
selection.py    what one call keeps of its operators' outputs, by a policy
selecting.py    what sees the operators of a region
choosing.py     a call whose outputs a policy chooses from
slots.py        what autograd holds in place of a saved tensor
region.py       the region itself: calls, saving, unpacking
transforms.py   regions under torch.func and forward-mode differentiation
compiling.py    regions in compiled functions
journeys.py     what calls have saved, on its way into stores and back
runs.py         several calls as one region, regions inside regions
functions.py    functions as regions
wrapping.py     modules as regions, by name
reentrant.py    the reentrant region
inside.py       what code that runs in a region can ask, and say
carriers.py     values that reach a region past its arguments
naming.py       names for tensors, by which a policy knows them
spilling.py     what a graph has saved already, moved into a store
abandoning.py   a graph through which no backward is to come

The message for a recompute that is not its forward:

diagnosis.py    the whole message
causes.py       why, probably
reruns.py       a region run once more, leaving no trace
operators.py    the operators that it ran, where, and what they saved
reach.py        what it can be seen to reach, by name
"""
