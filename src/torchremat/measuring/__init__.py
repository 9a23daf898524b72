"""Live bytes, flops and the timeline of one training step.

A step of the user, run without a trace:

step.py             the step: its result, the objects that it holds, and steps that use these up
runs.py             the step with all that it touches, run under an observer and undone
arguments.py        which of two arguments is the model, and which the step
untouched.py        a run without side effects
writes.py           the tensors that a step writes
interrupts.py       no Ctrl-C while state is restored
optimizers.py       the optimizer of a step, and its step run alone
heap.py             the garbage collector kept off objects that are not ours
exhaustion.py       out-of-memory errors
tracebacks.py       errors of the step without our frames
callers.py          the line of user code that runs an operator

Allocations and frees:

traces.py        allocations and frees in order, with marks between
allocator.py     recorded on any device
profiled.py      those of the CPU, by torch's profiler
history.py       those of CUDA, by its allocator
storages.py      the storages of a tensor
simulation.py    the allocator and the clock of an absent device
store_speeds.py  the speed of a store, alone and beside compute

One step, measured:

before.py            live storages before the step
communication.py     memory of data parallelism
modules.py           the running module, and the calls of modules, all routed through one function
step_record.py       a step as one list of events
recorder.py          the dispatch mode that records it
flops.py             flops as operators run
lines.py             the running operator and its line of user code
timeline.py          live bytes over the step
observers.py         what is observed of a step, each in a run of its own; live bytes of tensors without the allocator
measurement.py       `measure`, and its figures as text, page and trace
curves.py            as a picture

The saved tensors of a forward:

dropping.py      forwards from which autograd keeps nothing
packed.py        the bytes behind the packed objects that autograd holds
saving.py        a watched forward
keeping.py       `saved`: the saved tensors at its end
freeing.py       the bytes that regions would free
saved_data.py    the saved tensors as data
saved_report.py  their totals as text, JSON and a page
"""
