"""What each store costs in time and leaves in memory: against plain, torch's `save_on_cpu`, and recomputing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from weakref import ref

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import computed, differing, ratio, seconds_in_turn, training_step
from _tables import MIB, bar, markdown, mib, publish, yes
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import torchremat
from torchremat import Compressed, Disk, Host, Keep, Tiers, offload

ROUNDS = 9
# What a chain of sines saves, and the most that may be left of it in memory when the forward has ended.
SAVED_MIB, MOST_MIB = 384, 64
PIECE_MIB = 8


class Model(nn.Module):
    """Blocks of a transformer; their calls may be regions."""

    def __init__(self, blocks: int, width: int, *, recomputes: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="relu", batch_first=True)
            for _ in range(blocks)
        )
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torchremat.checkpoint(block, x) if self.recomputes else block(x)
        return x


class Way:
    """One way to run a step.

    Args:
        context: Makes what the forward runs in.
        store: What it puts into, if that is a store of ours.
        recomputes: Whether each block is a region.
    """

    def __init__(
        self,
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        store: object = None,
        *,
        recomputes: bool = False,
    ) -> None:
        self.context = context
        self.store = store
        self.recomputes = recomputes

    def step(self, x: Tensor) -> Callable[[nn.Module], Tensor]:
        def step(model: nn.Module) -> Tensor:
            with self.context():
                return model(x).square().mean()

        return step


def into(store: object, *, recomputes: bool = False) -> Way:
    context = offload(store)
    return Way(lambda: context, store, recomputes=recomputes)


def ways(limit: int) -> dict[str, Way]:
    """All ways; `limit` is what the first of two tiers may hold, in bytes."""
    return {
        "plain": Way(),
        "recompute every block": Way(recomputes=True),
        "torch's `save_on_cpu`": Way(save_on_cpu),
        "`Keep()`": into(Keep()),
        "`Host()`": into(Host()),
        "`Compressed(Host())`": into(Compressed(Host())),
        "`Disk()`": into(Disk()),
        "`Tiers(Host(limit), Disk())`": into(Tiers(Host(limit), Disk())),
        "recompute, inputs to `Disk()`": into(Disk(), recomputes=True),
    }


def steps(*, blocks: int, width: int, tokens: int, rounds: int) -> dict[str, object]:
    torch.manual_seed(1)
    x = torch.randn(4, tokens, width)
    saved = 4 * tokens * width * blocks * 40  # about a third of what is saved
    all_ways = ways(saved)
    models = {name: Model(blocks, width, recomputes=way.recomputes) for name, way in all_ways.items()}
    plain = computed(models["plain"], all_ways["plain"].step(x))
    rows: dict[str, object] = {}
    for name, way in all_ways.items():
        differs = differing(computed(models[name], way.step(x)), plain)
        measured = torchremat.measure(models[name], way.step(x))
        rows[name] = {
            "peak_bytes": measured.tracker_peak_bytes - measured.before_bytes,
            "kept_bytes": measured.tracker_kept_bytes,
            "differs": differs,
        }
    runs = {name: training_step(models[name], way.step(x)) for name, way in all_ways.items()}
    seconds = seconds_in_turn(runs, rounds)
    for name, took in seconds.items():
        rows[name]["seconds"] = sorted(took)[len(took) // 2]
        rows[name]["ratio"] = asdict(ratio(took, seconds["plain"]))
    for name, way in all_ways.items():
        if way.store is not None:
            with way.context():
                loss = models[name](x).square().mean()
            rows[name]["stored_bytes"] = way.store.statistics.stored_bytes
            del loss
    return rows


def left_in_memory(store: object, pieces: int, piece_mib: int) -> dict[str, object]:
    """Run a chain of sines, each of which saves its input; return what is left of it, and what goes out per second."""
    x = torch.rand(piece_mib * MIB // 4, requires_grad=True)
    storages = []
    context = offload(store)
    start_s = time.perf_counter()
    with context:
        y = x.sin()
        for _ in range(pieces):
            storages.append(ref(y.untyped_storage()))
            y = y.sin()
    end_s = time.perf_counter()
    left = sum(alive.nbytes() for one in storages if (alive := one()) is not None)
    y.backward(torch.ones_like(y))
    done_s = time.perf_counter()
    return {
        "saved_bytes": pieces * piece_mib * MIB,
        "left_bytes": left,
        "forward_s": end_s - start_s,
        "backward_s": done_s - end_s,
    }


def run(smoke: bool) -> dict[str, object]:
    if smoke:
        sizes, rounds, pieces, piece = {"blocks": 2, "width": 32, "tokens": 16}, 2, 4, 1
    else:
        sizes, rounds, pieces, piece = (
            {"blocks": 6, "width": 256, "tokens": 128},
            ROUNDS,
            SAVED_MIB // PIECE_MIB,
            PIECE_MIB,
        )
    found: dict[str, object] = {"steps": steps(**sizes, rounds=rounds)}
    disk = left_in_memory(Disk(), pieces, piece)
    plain = left_in_memory(Keep(), pieces, piece)
    found["chain"] = {"`Keep()`": plain, "`Disk()`": disk}
    left = disk["left_bytes"] / MIB
    wrong = [name for name, one in found["steps"].items() if one["differs"]]
    found["bars"] = [
        bar(
            f"at most {MOST_MIB} MiB of {SAVED_MIB} in memory after a forward with a disk",
            f"{left:.0f} MiB",
            left <= MOST_MIB,
        ),
        bar("loss and gradients are those of the plain step, bit for bit", ", ".join(wrong) or "all equal", not wrong),
    ]
    return found


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = []
    for name, one in results["steps"].items():
        spread = one["ratio"]
        rows.append(
            [
                name,
                f"{1e3 * one['seconds']:.0f}",
                f"{spread['median']:.2f} ({spread['low']:.2f}-{spread['high']:.2f})",
                mib(one["peak_bytes"]),
                mib(one["kept_bytes"]),
                mib(one["stored_bytes"]) if "stored_bytes" in one else "",
                yes(not one["differs"]),
            ]
        )
    head = ["", "ms", "ratio to plain", "peak, MiB", "after forward, MiB", "in the store, MiB", "equal"]
    chain = [
        [name, mib(one["saved_bytes"]), mib(one["left_bytes"]), f"{one['forward_s']:.2f}", f"{one['backward_s']:.2f}"]
        for name, one in results["chain"].items()
    ]
    return {
        "steps": markdown(head, rows),
        "chain": markdown(["", "saved, MiB", "in memory after forward, MiB", "forward, s", "backward, s"], chain),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
