"""Code that exists only because of one torch version, of one Python or of `torch.compile`.

Every private name of torch that the library uses is bound here, once. If a torch lacks one, the import of the part that
needs it fails and gives the name, rather than a training step failing in the middle.

Supported: torch 2.11 to 2.14; developed and tested on 2.13.

binding.py            how a private name is bound, and an attribute replaced for a while
memory.py             where Python's objects lie
autograd.py           hooks for saved tensors, nodes, backward calls and their threads, which custom Function saves
tensors.py            reference counts of tensors and storages, subclasses, and containers of tensors
checkpoints.py        private state of torch's own checkpoint
operators.py          operators by name, and flops of attention with groups of heads
accelerators.py       the capabilities of each kind of device, and the devices that this process uses
streams.py            the stream that the caller works on, and how one waits for another
flags.py              settings that decide which kernel computes a number
modules.py            the class of batch norms, state of modules outside of them, and a dict for notes about modules
modes.py              function and dispatch modes
fakes.py              tensors without data
transforms.py         torch.func, forward-mode differentiation, batched gradients
dynamo.py             keeping dynamo out of a function, or letting it in; the frames that enter compiled code
compiled_autograd.py  objects and operators that go into the graph of a backward
inductor.py           hooks of compilers for splitting a joint graph
wrappers.py           the program that Inductor writes around its kernels
sharding.py           private state of FSDP2
collectives.py        in which groups code communicates, and collectives that do not run again
gloo.py               who frees what gloo has worked on
data_parallel.py      private state of DistributedDataParallel
profiler.py           the profiler of memory events, what it writes to stderr, and when a user's profiler starts
fabric.py             private state of Lightning Fabric
pipelining.py         private state of pipeline schedules
"""
