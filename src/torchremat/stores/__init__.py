"""Stores: where saved tensors wait between forward and backward, each behind the same two methods.

statistics.py     what a store counts, and the limit that it holds to
contents.py       what is known of a stored tensor, and how it is made anew
keep.py           where it is
host.py           in memory of the host
  pinned.py       pinned memory, in exact sizes
  transfers.py    copies between a device and pinned memory
disk.py           in a file without a name
  disk_writer.py  tensors on their way there and back
  patience.py     how long to wait for a disk on which nothing moves
  entries.py      one of them
  disk_file.py    the file
  extents.py      which bytes of it are free
  checksums.py    whether what comes back is what was written
tiers.py          in the first of several stores that has room
compressed.py     in another store, encoded
codecs/           how a tensor is held in fewer bytes

geometry.py    where in its storage a tensor lies
release.py     when a store no longer reads what it was given
weak.py        bytes that are held by others
kept.py        what is kept where it is
parameters.py  tensors that a model holds anyway
schedule.py    the order in which a backward is likely to ask
shared.py      what the records of a catalog share
stored.py      what autograd holds in place of a tensor
pieces.py      the pieces of a storage that a store has
records.py     what a store has of one storage at one version
catalog.py     what autograd saves, by storage and version
slots.py       of which saved tensors backward needs only the shape or a mask
narrowing.py   how it is known, when a tensor is saved, that it is one of these
offloading.py  what autograd saves in a block of code, put into a store
"""
