"""Stores: where saved tensors wait between forward and backward, each behind the same two methods.

statistics.py  what a store counts, and the limit that it holds to
contents.py    what is known of a stored tensor, and how it is made anew
keep.py        where it is
host.py        in memory of the host
disk.py        in a file without a name
  spool.py       tensors on their way there and back
  slab.py        the file
  extents.py     which bytes of it are free
  checksums.py   whether what comes back is what was written
tiers.py       in the first of several stores that has room
"""
