"""What exists only because of one torch version or of `torch.compile`.

Every private name of torch that the library uses is bound here, once, so that a torch that lacks one says so when the
part that needs it is imported, by name, and not in the middle of a training step.

Supported: torch 2.11 and newer; developed and tested on 2.13.

binding.py       how a private name is bound
autograd.py      hooks for saved tensors, nodes, backward calls
counts.py        how many hold a tensor or a storage
collectives.py   who frees what gloo has worked on
containers.py    types that torch's pytree takes apart
compiled_autograd.py  objects and operators that go into the graph of a backward
fakes.py         tensors without data
flags.py         settings that decide by which kernel a number is computed
modes.py         function and dispatch modes
norms.py         the class that batch norms have in common
checkpoints.py   what torch's own checkpoint keeps to itself
graphs.py        what keeps dynamo out, or lets it in
sharding.py      what FSDP2 keeps to itself
transforms.py    torch.func, forward-mode differentiation, batched gradients
"""
