"""Programs that communicate, on two and four processes: planned together and trained, against their plain training."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
from _tables import bar, markdown, publish

from distributed.communicating.cases import PROGRAMS, Ran, tried_by
from distributed.communicating.crews import Crew
from distributed.communicating.fuzz import FINE, verdict
from distributed.communicating.programs import MAY_BE_REFUSED

RUNS = 10
RANDOM = 300
WORLDS = {"two": 2, "four": 4}
ABOVE = "equal, above the budget"
WORDS = {
    "equal": "equal",
    "wrong": "wrong",
    "refused": "refused",
    "failed": "failed",
    "hang": "hangs",
    "abort": "aborts",
}


def run(smoke: bool, only: str | None = None) -> dict[str, object]:
    earlier = json.loads(Path(__file__).with_name("results.json").read_text()) if only else {"rows": []}
    rows, random = earlier["rows"], earlier.get("random")
    for name, world in WORLDS.items():
        if only in (None, name) and not (smoke and rows):
            rows = [*(row for row in rows if row["world"] != world), *rows_of(world, smoke)]
    if only in (None, "random"):
        random = random_programs(1 if smoke else RANDOM)
    return {"rows": sorted(rows, key=lambda row: row["world"]), "random": random, "bars": bars(rows, random)}


def rows_of(world: int, smoke: bool) -> list[dict[str, object]]:
    rows = []
    with Crew(world, patience_s=120) as crew:
        for name in ["averaged_by_hooks"] if smoke else PROGRAMS:
            rows.append(row_of(name, world, [tried_by(crew, name, seed) for seed in range(1 if smoke else RUNS)]))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def random_programs(count: int) -> dict[str, object]:
    with Crew(WORLDS["two"], patience_s=120) as crew:
        found = [verdict(crew, seed) for seed in range(count)]
    return {
        "counts": dict(Counter(how for how, _ in found)),
        "not_fine": {seed: words for seed, (how, words) in enumerate(found) if how not in FINE},
    }


def row_of(name: str, world: int, runs: list[Ran]) -> dict[str, object]:
    plans = [one for own in runs for one in own.plans]
    return {
        "name": name.replace("_", " "),
        "world": world,
        "may_be_refused": name in MAY_BE_REFUSED,
        "runs": len(runs),
        **{how: sum(one.how == how for one in runs) for how in WORDS},
        "differing": sum(any(one.differs for one in own.plans) for own in runs),
        "plans": len(plans),
        "above": sum(one.peak_bytes > one.budget_bytes for one in plans),
        "recomputing": sum(one.recomputes > 0 for one in plans),
        "peak_share": max((one.peak_bytes / one.budget_bytes for one in plans), default=0.0),
        "recomputed_share": max((one.recomputed_share for one in plans), default=0.0),
        "words": list(dict.fromkeys(one.words for one in runs if one.words)),
    }


def bars(rows: list[dict[str, object]], random: dict[str, object]) -> list[dict[str, object]]:
    runs, trained = sum(row["runs"] for row in rows), sum(row["equal"] + row["wrong"] for row in rows)
    differing, refused = sum(row["differing"] for row in rows), sum(row["refused"] for row in rows)
    unplanned = runs - trained - sum(row["refused"] for row in rows if row["may_be_refused"])
    plans, above = sum(row["plans"] for row in rows), sum(row["above"] for row in rows)
    wrong = sum(row["wrong"] for row in rows)
    hangs, aborts = sum(row["hang"] for row in rows), sum(row["abort"] for row in rows)
    counts = random["counts"]
    above_random = counts.get(ABOVE, 0)
    fine = sum(counts.get(how, 0) for how in (*FINE, ABOVE))
    return [
        bar(
            "losses, gradients and parameters of three steps are those of the plain training in each process",
            f"{trained - differing} of {runs} runs, and {refused} refused before they train",
            not differing and not unplanned,
        ),
        bar("measured peaks within the budget of each process", f"{above} of {plans} above", not above and plans > 0),
        bar(
            "one plan in all processes, nothing found by `verify`, nothing warned of, and something recomputed",
            f"{trained - wrong} of {trained} runs that train",
            not wrong,
        ),
        bar("no hang, no abort", f"{hangs} hangs, {aborts} aborts", not hangs and not aborts),
        bar(
            f"{RANDOM} random programs: equal, or refused before they train",
            f"{fine} of {sum(counts.values())}",
            fine == sum(counts.values()) == RANDOM,
        ),
        bar(
            "their measured peaks within the budget",
            f"{above_random} of {sum(counts.values())} above",
            not above_random and sum(counts.values()) == RANDOM,
        ),
    ]


def tables(results: dict[str, object]) -> dict[str, str]:
    head = ["", *WORDS.values(), "highest peak, of budget", "most recomputed, of a step", "plans that recompute"]
    made = {}
    for name, world in WORLDS.items():
        rows = [row for row in results["rows"] if row["world"] == world]
        made[name] = markdown(head, map(cells, rows))
    counts = results["random"]["counts"]
    made["random"] = markdown(["programs", *counts], [[sum(counts.values()), *counts.values()]])
    return made


def cells(row: dict[str, object]) -> list[object]:
    return [
        row["name"],
        *(row[how] for how in WORDS),
        f"{100 * row['peak_share']:.1f}%",
        f"{100 * row['recomputed_share']:.0f}%",
        f"{row['recomputing']} of {row['plans']}",
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--only", choices=[*WORLDS, "random"])
    own, rest = parser.parse_known_args()
    sys.exit(publish(Path(__file__).parent, partial(run, only=own.only), tables, rest))
