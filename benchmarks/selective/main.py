"""What selective recompute adds to a region, and what it holds: ours against torch's selective checkpoint."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from weakref import ref

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _steps import ratio
from _tables import bar, markdown, publish
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import torchremat
from torchremat.policies import Policy, everything_saved, save_matmuls, save_operators

Function = Callable[[Tensor], Tensor]

MOST = 0.7
OPERATIONS = 50
ROUNDS = 41
STEPS = 40
PLAIN = partial(checkpoint, use_reentrant=False)
aten = torch.ops.aten
MATMULS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


def alternating(x: Tensor) -> Tensor:
    """Fifty operations, half of which save a tensor."""
    for _ in range(OPERATIONS // 2):
        x = x.sin() * 1.01
    return x


def additions(x: Tensor) -> Tensor:
    """Eleven operations, of which autograd saves one output."""
    for _ in range(5):
        x = x + 1
    x = x.exp()
    for _ in range(5):
        x = x + 1
    return x


class Attention(nn.Module):
    """A block of a transformer that is written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.transpose(-1, -2), -1) @ v)
        return x + self.down(nn.functional.gelu(self.up(x)))


def save_all(*_: object, **__: object) -> bool:
    """Torch's policy for everything."""
    return True


# A policy of ours, and what torch is given for the same.
POLICIES: dict[str, tuple[Policy, object]] = {
    "everything": (everything_saved, save_all),
    "matrix products": (save_matmuls, MATMULS),
    "sin": (save_operators("aten.sin.default"), [aten.sin.default]),
}


def torchs(function: Function, policy: object) -> Function:
    """Torch's selective checkpoint of a function."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return lambda x: checkpoint(function, x, use_reentrant=False, context_fn=contexts)


def added(rounds: int, steps: int) -> dict[str, object]:
    """Time a region of fifty operations plainly and selectively, in turn; seconds are those of one operation."""
    policy, given = POLICIES["sin"]
    x = torch.rand(4, requires_grad=True)

    def by_function(ctx: object, op: object, *args: object, **kwargs: object) -> bool:
        return op is aten.sin.default

    ways: dict[str, Function] = {
        "torch, plain": lambda x: PLAIN(alternating, x),
        "torch, list": torchs(alternating, given),
        "torch, function": torchs(alternating, by_function),
        "ours, plain": torchremat.checkpointed(alternating),
        "ours, policy": torchremat.checkpointed(alternating, policy=policy),
        "ours, function": torchremat.checkpointed(alternating, policy=by_function),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gc.collect()
    gc.disable()
    try:
        for turn in range(rounds + 1):
            for name, run in ways.items():
                start_s = time.perf_counter()
                for _ in range(steps):
                    run(x).sum().backward()
                if turn:
                    seconds[name].append((time.perf_counter() - start_s) / steps / OPERATIONS)
    finally:
        gc.enable()

    def over(one: str, plain: str) -> list[float]:
        return [took - without for took, without in zip(seconds[one], seconds[plain], strict=True)]

    pairs = {
        "by operator": ("ours, policy", "torch, list"),
        "by a function": ("ours, function", "torch, function"),
    }
    found: dict[str, object] = {}
    for name, (ours, theirs) in pairs.items():
        mine, others = over(ours, "ours, plain"), over(theirs, "torch, plain")
        found[name] = {
            "ours_s": statistics.median(mine),
            "torch_s": statistics.median(others),
            "ratio": asdict(ratio(mine, others)),
        }
    return found


class Made(TorchDispatchMode):
    """Knows the memory that operators have made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        output = func(*args, **(kwargs or {}))
        given = {id(one.untyped_storage()) for one in args if isinstance(one, Tensor)}
        for one in output if isinstance(output, tuple | list) else [output]:
            if isinstance(one, Tensor) and id(one.untyped_storage()) not in given:
                self.made[id(one.untyped_storage())] = ref(one.untyped_storage())
        return output


def held(function: Function, x: Tensor) -> int:
    """Bytes that are alive after a forward and that it has made, without those of its output."""
    with Made() as mode:
        output = function(x)
    spared = output.untyped_storage()
    alive = [one() for one in mode.made.values()]
    return sum(one.nbytes() for one in alive if one is not None and one is not spared)


def memory(*, width: int) -> dict[str, dict[str, int]]:
    """Bytes held at the end of forward."""
    torch.manual_seed(0)
    functions: dict[str, Function] = {
        "eleven operations": additions,
        "fifty operations": alternating,
        "attention block": Attention(width),
        "transformer layer": nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True),
    }
    x = torch.randn(2, 16, width, requires_grad=True)
    found: dict[str, dict[str, int]] = {}
    for name, function in functions.items():
        for label, (policy, given) in POLICIES.items():
            found[f"{name}, {label}"] = {
                "plain": held(function, x),
                "torch": held(torchs(function, given), x),
                "ours": held(torchremat.checkpointed(function, policy=policy), x),
            }
    return found


def run(smoke: bool) -> dict[str, object]:
    times = added(2 if smoke else ROUNDS, 3 if smoke else STEPS)
    bytes_held = memory(width=16 if smoke else 64)
    by_operator = times["by operator"]["ratio"]["median"]
    most = max((one["ours"] / one["torch"] for one in bytes_held.values() if one["torch"]), default=0.0)
    return {
        "times": times,
        "bytes": bytes_held,
        "bars": [
            bar(
                f"{OPERATIONS} operations: selective adds at most {MOST} of what torch's adds, per operation",
                f"{by_operator:.2f}",
                by_operator <= MOST,
            ),
            bar("never more bytes held than torch for the same policy", f"at most {most:.2f} of torch's", most <= 1.0),
        ],
    }


def tables(results: dict[str, object]) -> dict[str, str]:
    rows = [
        [
            name,
            f"{1e6 * one['torch_s']:.1f}",
            f"{1e6 * one['ours_s']:.1f}",
            f"{one['ratio']['median']:.2f} ({one['ratio']['low']:.2f}-{one['ratio']['high']:.2f})",
        ]
        for name, one in results["times"].items()
    ]
    bytes_held = [
        [name, f"{one['plain']:,}", f"{one['torch']:,}", f"{one['ours']:,}"] for name, one in results["bytes"].items()
    ]
    return {
        "times": markdown(["a policy that goes", "torch adds, us", "ours adds, us", "ours / torch's"], rows),
        "bytes": markdown(["bytes held after forward", "no checkpoint", "torch", "ours"], bytes_held),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
