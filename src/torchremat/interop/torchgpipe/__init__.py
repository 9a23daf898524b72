"""torchgpipe's public names over torchremat's pipelines.

    - from torchgpipe import GPipe
    + from torchremat.interop.torchgpipe import GPipe

    gpipe       the model, as strict as torchgpipe's and with its messages
    skip        the modules that stash and pop
    balance     how many layers each partition gets

fairscale's `Pipe` and `torch.distributed.pipeline.sync.Pipe`, which torch had until 2.3, are made of the same parts.

Missing on purpose: undocumented names of torchgpipe: its trackers, portals, workers and microbatches, for example.
Intended differences: docs/from-torchgpipe.md.
"""

from torchremat.interop.torchgpipe import balance, skip
from torchremat.interop.torchgpipe.gpipe import GPipe
from torchremat.regions.runtime import is_checkpointing, is_recomputing

__all__ = ["GPipe", "balance", "is_checkpointing", "is_recomputing", "skip"]
