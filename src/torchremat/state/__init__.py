"""State that a call sees in addition to its arguments: captured before a forward, restored for its recompute, put back.

NOTE [ The world of a call ]

    While a region is recomputed, everything that its forward could reach through Python is as it was when that
    forward began. When the recompute has ended, in whatever way, everything is as it was before the recompute. A
    change that can be seen and cannot be undone is an error that names it. A change that is never read is ignored.
    (Rule 13)

In reading order:

containers.py        built-in containers, and the contents of many dicts in one piece: copied, compared, refilled
holders.py           the contents of every other mutable object
foreign.py           state outside of Python's: arrays, random numbers, scripted modules
guarded.py           objects that users name, which may manage their own state
code.py              the names that a piece of code reads, and whose code is followed
world.py             everything reachable from a function and its arguments
following/           the references of each kind of object
reach.py             all of these, from some roots
reached.py           what is reached now, as a structure finds it again
structure.py         what a root reaches, searched for once and compared by each call
roots.py             who keeps a structure: modules that are called again and again
world_state.py       what a world holds at one moment
plain.py             functions that obviously reach nothing that has state
backups.py           tensors that are copied before a forward, since it may write to them
stamps.py            tensors that are told by their bits, where code may write past their versions
reading.py           detecting a read of a tensor that was written
leaves.py            the version, the flag and the hooks of tensors; sharded parameters, and writes of optimizers
optimizer_steps.py   who hears that an optimizer steps
snapshot.py          the world as one forward saw it
exchange.py          swapping a snapshot in for the current world
naming.py            names for reached objects, as a reader of the code knows them
"""
