"""Stores: where saved tensors wait between forward and backward, each behind the same two methods.

base.py            the parts of every store: counts and limit, metadata of tensors, copies of it, release of tensors
keep.py            left in place
host.py            in host memory
  pinned.py        pinned memory, in exact sizes
  transfers.py     copies between a device and pinned memory
disk.py            in a file without a name
  disk_writer.py   tensors in transfer to the file and back
  disk_entries.py  one tensor in transfer, and how long to wait for a disk that makes no progress
  disk_file.py     the file, and whether the bytes read are the bytes written
  extents.py       the free bytes of the file
tiers.py           in the first of several stores that has room
compressed.py      in another store, encoded
codecs/            how a tensor is held in fewer bytes

geometry.py    where in its storage a tensor lies
weak_bytes.py  memory that others own: bytes known weakly, parameters and buffers
in_catalog.py  the objects that autograd holds for a catalog, and tensors kept in place
stored.py      the object that autograd holds in place of a tensor, and the prefetch in the order of a backward
shared.py      the state that the records of a catalog share
pieces.py      the pieces of a storage that a store has
records.py     the stored bytes of one storage at one version
catalog.py     saved tensors by storage and version
needs.py       saved tensors of which backward needs only the shape or a mask
narrowing.py   how such a tensor is recognised when it is saved
offloading.py  the saved tensors of a block of code, put into a store

stored_parameters.py  a parameter whose values a store has
parameter_moves.py    marks around its moves, in a record of a step
"""
