"""The parts of releasing gradients that tests look at: what waits, what is left of a gradient, what scales a loss."""

from torchremat.optimizing import scaled_losses
from torchremat.optimizing.tombstones import ReleasedGradient
from torchremat.optimizing.waiting_gradients import counted, share_of

__all__ = ["ReleasedGradient", "counted", "scaled_losses", "share_of"]
