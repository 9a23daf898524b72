"""Several processes that train one model: they profile the same steps, and get one plan.

peers.py      a result from each of them, or an error of one raised in all
agreement.py  one profile merged from those of all processes
"""
