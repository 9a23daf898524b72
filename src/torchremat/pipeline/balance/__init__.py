"""How many layers each stage of a pipeline gets, from given, timed or measured costs."""

from torchremat.pipeline.balance.partition import Balance
from torchremat.pipeline.balance.profiles import balance, balance_by_size, balance_by_time

__all__ = ["Balance", "balance", "balance_by_size", "balance_by_time"]
