"""Stores: where saved tensors wait between forward and backward, each behind the same two methods.

statistics.py     the counts of a store, and the limit that it keeps to
contents.py       the metadata of a stored tensor, and how the tensor is rebuilt
keep.py           left in place
host.py           in host memory
  pinned.py       pinned memory, in exact sizes
  transfers.py    copies between a device and pinned memory
disk.py           in a file without a name
  disk_writer.py  tensors in transfer to the file and back
  patience.py     how long to wait for a disk that makes no progress
  entries.py      one tensor in transfer
  disk_file.py    the file
  extents.py      the free bytes of the file
  checksums.py    whether the bytes read are the bytes written
tiers.py          in the first of several stores that has room
compressed.py     in another store, encoded
codecs/           how a tensor is held in fewer bytes

geometry.py    where in its storage a tensor lies
release.py     when the memory of a stored tensor becomes free
weak.py        bytes that others own
kept.py        tensors that are kept in place
parameters.py  tensors that the model keeps alive anyway
schedule.py    the order in which a backward is likely to ask
shared.py      the state that the records of a catalog share
stored.py      the object that autograd holds in place of a tensor
pieces.py      the pieces of a storage that a store has
records.py     the stored bytes of one storage at one version
catalog.py     saved tensors by storage and version
slots.py       saved tensors of which backward needs only the shape or a mask
narrowing.py   how such a tensor is recognised when it is saved
offloading.py  the saved tensors of a block of code, put into a store
"""
