"""How many layers each stage of a pipeline gets, from given, timed or measured costs.

costs.py      the bytes and the seconds of each layer, run one by one on copies
partition.py  a row of costs, cut so that the most costly block costs as little as possible; the result as data
profiles.py   `balance`, `balance_by_time`, `balance_by_size`
"""

from torchremat.pipeline.balance.partition import Balance
from torchremat.pipeline.balance.profiles import balance, balance_by_size, balance_by_time

__all__ = ["Balance", "balance", "balance_by_size", "balance_by_time"]
