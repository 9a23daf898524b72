"""Runs programs that communicate, each in a crew of processes that is replaced when one hangs or dies.

    PYTHONPATH=src:tests python -m distributed.communicating 2 experts tensor_parallel --seeds 0 1 2

runs these two on two processes with three seeds, and prints what is wrong; without names it runs all.
"""

import argparse
import sys
import time

from distributed.communicating.cases import PROGRAMS, tried_by
from distributed.communicating.crews import Crew


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("world", type=int)
    parser.add_argument("names", nargs="*", metavar="name", help=", ".join(PROGRAMS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--patience", type=float, default=60, metavar="SECONDS")
    options = parser.parse_args()
    wrong = 0
    with Crew(options.world, options.patience) as crew:
        for name in options.names or PROGRAMS:
            for seed in options.seeds:
                began_s = time.perf_counter()
                found = tried_by(crew, name, seed)
                took_s = time.perf_counter() - began_s
                counts = [
                    f"{one.budget}: {one.recomputes} calls" for one in found.plans[: len(found.plans) // crew.world]
                ]
                print(f"{name} {seed}: {found.how}, {took_s:.1f} s, {', '.join(counts)}", flush=True)
                if found.words:
                    print("  " + "\n  ".join(found.words.splitlines()), flush=True)
                wrong += found.how not in ("equal", "refused") or bool(found.words)
    return wrong


if __name__ == "__main__":
    sys.exit(bool(main()))
