"""Plans against all placements of regions by hand: 200 random chains, models of transformers, and adapters of PEFT."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import peft
import transformers
from _steps import Make, Step
from _tables import bar, markdown, mib, publish
from torch import nn

import torchremat
import zoo
from planning.by_hand import against_by_hand, chain

CHAINS = 200
FLOORS = 5
SIZES = {"blocks": 3, "width": 64}
# An encoder and a decoder are as many units as all placements can be tried of with one block each.
ZOO: dict[str, Make] = {
    **{name: partial(make, **SIZES) for name, make in zoo.ZOO.items() if name != "t5"},
    "t5": partial(zoo.t5, blocks=1, width=64),
}
LINEAR = {"target_modules": ["q_proj", "v_proj"]}
WORDS = {"num_virtual_tokens": 8}
ADAPTERS: dict[str, Callable[[], peft.PeftConfig]] = {
    "LoRA": partial(peft.LoraConfig, **LINEAR),
    "DoRA": partial(peft.LoraConfig, use_dora=True, **LINEAR),
    "rsLoRA": partial(peft.LoraConfig, use_rslora=True, **LINEAR),
    "AdaLoRA": partial(peft.AdaLoraConfig, total_step=100, **LINEAR),
    "LoHa": partial(peft.LoHaConfig, **LINEAR),
    "LoKr": partial(peft.LoKrConfig, **LINEAR),
    "IA3": partial(peft.IA3Config, target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "VeRA": partial(peft.VeraConfig, r=8, target_modules=["q_proj", "o_proj"]),
    "OFT": partial(peft.OFTConfig, oft_block_size=8, **LINEAR),
    "BOFT": partial(peft.BOFTConfig, boft_block_size=8, **LINEAR),
    "HRA": partial(peft.HRAConfig, **LINEAR),
    "FourierFT": partial(peft.FourierFTConfig, n_frequency=50, **LINEAR),
    "LayerNorm tuning": partial(peft.LNTuningConfig, target_modules=["input_layernorm"]),
    "prompt tuning": partial(peft.PromptTuningConfig, **WORDS),
    "prefix tuning": partial(peft.PrefixTuningConfig, **WORDS),
    "P-tuning": partial(peft.PromptEncoderConfig, encoder_hidden_size=32, **WORDS),
}


def adapted(config: Callable[[], peft.PeftConfig]) -> tuple[nn.Module, Step]:
    """A Llama with an adapter."""
    model, step = zoo.llama(**SIZES)
    given = config()
    given.task_type = peft.TaskType.CAUSAL_LM
    return peft.get_peft_model(model, given), step


def run(smoke: bool) -> dict[str, object]:
    transformers.logging.set_verbosity_error()
    chains = [beside_hand("chain", partial(chain, seed)) for seed in range(2 if smoke else CHAINS)]
    makes = {**ZOO, **{name: partial(adapted, config) for name, config in ADAPTERS.items()}}
    if smoke:
        makes = {name: makes[name] for name in ("bert", "LoRA")}
    rows = [beside_hand(name, make) for name, make in makes.items()]
    floors = {name: [floor_of(makes[name]) for _ in range(2 if smoke else FLOORS)] for name in ZOO if name in makes}
    found = {
        "chains": len(chains),
        "chains_above": sum(one["floor_bytes"] > one["by_hand_bytes"] for one in chains),
        "chains_beaten": sum(one["beaten"] > 0 for one in chains),
        "budgets": sum(one["budgets"] for one in chains),
    }
    return {"random": found, "rows": rows, "floors": floors, "bars": bars(found, rows, floors)}


def beside_hand(name: str, make: Make) -> dict[str, object]:
    planner = torchremat.Planner(*make(), cost="flops")
    by_hand_bytes, beaten, budgets = against_by_hand(planner)
    return {
        "name": name,
        "units": len(planner.profile.units.units),
        "plain_bytes": planner.solver.plain.prediction.peak_bytes,
        "by_hand_bytes": by_hand_bytes,
        "floor_bytes": planner.solver.floor.prediction.peak_bytes,
        "beaten": beaten,
        "budgets": budgets,
    }


def floor_of(make: Make) -> int:
    return torchremat.Planner(*make()).floor_bytes


def bars(
    chains: dict[str, int], rows: list[dict[str, object]], floors: dict[str, list[int]]
) -> list[dict[str, object]]:
    above = [row["name"] for row in rows if row["floor_bytes"] > row["by_hand_bytes"]]
    beaten = [row["name"] for row in rows if row["beaten"]]
    moved = [name for name, own in floors.items() if len({*own}) > 1]
    return [
        bar(
            "no random chain has a placement by hand that is lower than the smallest plan, or cheaper than the plan "
            "for its peak",
            f"{chains['chains_above']} lower, {chains['chains_beaten']} cheaper, of {chains['chains']} with "
            f"{chains['budgets']} budgets",
            not chains["chains_above"] and not chains["chains_beaten"],
        ),
        bar(
            "nor has a model of transformers or an adapter of PEFT",
            f"{len(above)} lower, {len(beaten)} cheaper, of {len(rows)}",
            not above and not beaten,
        ),
        bar(
            "the smallest budget, by seconds, is equal in five runs",
            f"{len(floors) - len(moved)} of {len(floors)} models",
            not moved,
        ),
    ]


def tables(results: dict[str, object]) -> dict[str, str]:
    head = ["", "units", "plain, MiB", "lowest by hand", "smallest plan", "budgets", "cheaper by hand"]
    sizes = ("plain_bytes", "by_hand_bytes", "floor_bytes")
    rows = [
        [row["name"], row["units"], *(mib(row[size]) for size in sizes), row["budgets"], row["beaten"]]
        for row in results["rows"]
    ]
    return {"models": markdown(head, rows)}


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
