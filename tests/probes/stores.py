"""The parts of stores that tests break, and what stands for a stored tensor in a graph."""

from torchremat.stores import disk_entries, disk_writer, transfers
from torchremat.stores.codecs.lossless import pack_bits, pack_bits_anywhere, spread_bits
from torchremat.stores.disk_writer import DiskWriter
from torchremat.stores.pieces import ByteSpan
from torchremat.stores.pinned import PinnedBlock
from torchremat.stores.stored import Stored
