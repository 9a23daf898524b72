"""What a call sees beside its arguments: taken before a forward, shown to its recompute, and left as it was.

NOTE [ The world of a call ]

    While a region is recomputed, everything that its forward could reach through Python is what it was when that
    forward began. When the recompute has ended, by whatever way, everything is what it was before the recompute. What
    can be seen to have changed and cannot be given back is an error that names it. What changed and is not read is
    nobody's business. (Rule 13)

In reading order:

watching.py   what only looks on
containers.py built-in containers: copied, compared, filled again
dicts.py      what many dicts hold, in one piece
holders.py    what every other mutable object holds
code.py       which names a piece of code reads, and whose code is followed
world.py      what can be reached from a function and its arguments
following/    what leads where
reach.py      all of it, from some roots
sharding.py   parameters that FSDP2 has sharded
optimizers.py optimizers that write parameters without saying so
backups.py    tensors that are copied before a forward, since it may write to them
reading.py    who reads a tensor that was written
leaves.py     the version, the flag and the hooks of tensors
guarded.py    what users name, and what looks after itself
snapshot.py   the world as one forward saw it
exchange.py   a snapshot in the place of today's world
naming.py     what is reached, by the name that a reader of the code knows it by
"""
