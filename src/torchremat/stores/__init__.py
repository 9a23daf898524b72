"""Stores: where saved tensors wait between forward and backward, each behind the same two methods.

statistics.py     what a store counts, and the limit that it holds to
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
release.py     when a store no longer reads what it was given
weak.py        bytes that others own
kept.py        tensors that are kept in place
parameters.py  tensors that the model keeps alive anyway
schedule.py    the order in which a backward is likely to ask
shared.py      what the records of a catalog share
stored.py      what autograd holds in place of a tensor
pieces.py      the pieces of a storage that a store has
records.py     what a store has of one storage at one version
catalog.py     what autograd saves, by storage and version
slots.py       saved tensors of which backward needs only the shape or a mask
narrowing.py   how such a tensor is recognised when it is saved
offloading.py  what autograd saves in a block of code, put into a store
"""
