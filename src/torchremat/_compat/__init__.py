"""What exists only because of one torch version or of `torch.compile`.

Every private name of torch that the library uses is bound here, once, so that a torch that lacks one says so when the
part that needs it is imported, by name, and not in the middle of a training step.

Supported: torch 2.11 to 2.14; developed and tested on 2.13.

binding.py       how a private name is bound
autograd.py      hooks for saved tensors, nodes, backward calls
thread_locals.py  what the threads of a backward see of the one that calls it
functions.py     which custom Function saves a tensor
counts.py        how many hold a tensor or a storage
checkpoints.py   what torch's own checkpoint keeps to itself
containers.py    types that torch's pytree takes apart
operators.py     operators by name
attention.py     flops of attention with groups of heads
flags.py         settings that decide by which kernel a number is computed
norms.py         the class that batch norms have in common
modes.py         function and dispatch modes
fakes.py         tensors without data
transforms.py    torch.func, forward-mode differentiation, batched gradients
graphs.py        what keeps dynamo out, or lets it in
compiled_code.py  the frames by which compiled code is entered
compiled_autograd.py  objects and operators that go into the graph of a backward
inductor.py      where compilers let others split a joint graph
wrappers.py      the program that Inductor writes around its kernels
sharding.py      what FSDP2 keeps to itself
collectives.py   who frees what gloo has worked on
profiler_lines.py  what the profiler and allocators write to stderr
fabric.py        what Lightning Fabric keeps to itself
pipelining.py    what schedules of pipelines keep to themselves
"""
