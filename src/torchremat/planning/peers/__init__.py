"""Several processes that train one model: they profile the same steps, and get one plan.

peers.py      a result from each of them, or an error of one raised in all
messages.py   what they leave for each other in the store of torch.distributed
agreement.py  one profile merged from those of all processes
"""
