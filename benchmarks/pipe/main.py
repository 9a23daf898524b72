"""What each part of a pipe is for: the ablation of torchgpipe's paper on its U-Net, and torchgpipe beside it."""

from __future__ import annotations

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from queue import Queue
from types import ModuleType
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))

import _paths  # noqa: F401
import torch
from _tables import bar, markdown, mib, publish, yes
from torch import Tensor, nn

import torchremat
import unet
from pipeline.holding import StageBytes, own_memory
from torchremat._compat.accelerators import accelerator_of
from torchremat.extend import only_watches
from torchremat.measuring.allocator import record_allocations
from torchremat.pipeline import ordering, runner
from torchremat.pipeline import pipe as pipes

RIVAL = "torchgpipe"
MODES = ("always", "except_last", "never")
ROUNDS = 20


class Sizes:
    """The model and its batch."""

    def __init__(self, *, channels: int, pixels: int, batch: int) -> None:
        self.channels, self.pixels, self.batch = channels, pixels, batch

    def model(self) -> unet.UNet:
        torch.manual_seed(0)
        return unet.UNet(3, 2, self.channels)

    def images(self) -> Tensor:
        return torch.rand(self.batch, 3, self.pixels, self.pixels, requires_grad=True)


REAL = Sizes(channels=16, pixels=64, batch=16)
TINY = Sizes(channels=4, pixels=16, batch=8)
# All stash in stage 0 and pop in stage 3: 3 x (2 convs, stash), pools between | pool, conv | conv, grow | the rest.
BALANCE = [11, 2, 2, 12]
CHUNKS = 8


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


class Carrying(nn.Module):
    """A layer of a model whose skips go through all stages, in a tuple with what the layers compute."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.stashes, self.pops = isinstance(layer, unet.StashSkip), isinstance(layer, unet.PopSkip)
        self.layer = nn.Identity() if self.stashes or self.pops else layer

    def forward(self, value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        x, *skips = (value,) if isinstance(value, Tensor) else value
        x = self.layer(x)
        if self.stashes:
            skips.append(x)
        if self.pops:
            x = torch.cat([skips.pop(), x], dim=1)
        return (x, *skips) if skips else x


def carried(layers: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(*map(Carrying, layers))


def rivals(layers: nn.Sequential) -> nn.Sequential:
    """The same layers with torchgpipe's skips."""
    skip = importlib.import_module(RIVAL).skip

    @skip.skippable(stash=["skip"])
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Generator[object, None, Tensor]:
            yield skip.stash("skip", x)
            return x

    @skip.skippable(pop=["skip"])
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Generator[object, Tensor, Tensor]:
            return torch.cat([(yield skip.pop("skip")), x], dim=1)

    namespaces: dict[object, object] = {}
    made: list[nn.Module] = []
    for layer in layers:
        if isinstance(layer, unet.StashSkip | unet.PopSkip):
            namespace = namespaces.setdefault(layer.namespaces["skip"], skip.Namespace())
            layer = (Stash if isinstance(layer, unet.StashSkip) else Pop)().isolate(namespace)
        made.append(layer)
    return nn.Sequential(*made)


@contextmanager
def without_dependency() -> Generator[None]:
    """Let nothing say in which order microbatches go back."""
    with mock.patch.object(ordering, "join_all", lambda tensors, *_: list(tensors)):
        yield


@contextmanager
def without_streams() -> Generator[None]:
    """Let copies go on the streams that compute."""
    with mock.patch.object(pipes, "new_stream", lambda device: accelerator_of(device).default_stream(device)):
        yield


@contextmanager
def rivals_own_memory() -> Generator[None]:
    """As `own_memory`, for torchgpipe, whose copies are calls of `Tensor.to`."""
    plainly = Tensor.to
    with mock.patch.object(Tensor, "to", lambda one, *to: one.clone() if to == (one.device,) else plainly(one, *to)):
        yield


@only_watches
class Open:
    """Counts the cells that have been recomputed and have not gone back yet; `library` says what runs."""

    def __init__(self, stages: Sequence[nn.Module], library: ModuleType) -> None:
        self.now = self.most = 0
        self.library = library
        for stage in stages:
            stage.register_forward_pre_hook(self._begun)

    def _begun(self, _: nn.Module, given: tuple[object, ...]) -> object:
        if self.library.is_recomputing():
            self.now += 1
            self.most = max(self.most, self.now)
        elif not self.library.is_checkpointing():
            return None
        # Ours goes back through the graph of the forward, torchgpipe through that of the recompute.
        (value,) = given
        tensors = [value] if isinstance(value, Tensor) else list(value)
        tensors[0] = Gone.apply(self, tensors[0])
        return (tensors[0] if isinstance(value, Tensor) else tuple(tensors),)


class Gone(torch.autograd.Function):
    """Tells when the gradient of a cell's input is there."""

    @staticmethod
    def forward(ctx, opened: Open, x: Tensor) -> Tensor:
        ctx.opened = opened
        return x.detach()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        ctx.opened.now -= 1
        return None, grad


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters()]


def plain_gradients(sizes: Sizes, x: Tensor, chunks: int) -> list[Tensor]:
    layers = sizes.model().layers()
    loss_of(torch.cat([layers(one) for one in x.chunk(chunks)])).backward()
    return gradients(layers)


class Here:
    """A worker that works at once, in the thread that asks: the allocator's events are those of one thread."""

    def submit(self, work: Callable[[], object]) -> Future[object]:
        done: Future[object] = Future()
        done.set_result(work())
        return done


class RivalsQueue:
    """The same in the place of torchgpipe's queues."""

    def __init__(self, results: Queue[object]) -> None:
        self.results = results

    def put(self, task: object) -> None:
        self.results.put((True, (task, task.compute())))


@contextmanager
def here(devices: Sequence[object]) -> Generator[object]:
    yield [Here() for _ in devices]


@contextmanager
def rivals_here(devices: Sequence[object]) -> Generator[object]:
    results: list[Queue[object]] = [Queue() for _ in devices]
    yield [RivalsQueue(one) for one in results], results


def one_step(
    make: Callable[[], nn.Module], x: Tensor, wanted: Sequence[Tensor], library: ModuleType
) -> dict[str, object]:
    """What a step holds, by a mode that sees each operator; and the peak, by what the allocator says, in one thread."""
    own = own_memory if library is torchremat else rivals_own_memory
    pipe = make()
    opened = Open(pipe.partitions, library)
    held = StageBytes(pipe.partitions)
    with own(), held:
        output = pipe(x)
        live = [held.live[stage] for stage in range(len(pipe.partitions))]
        loss_of(output).backward()
    assert opened.now == 0
    del output
    equal = all(torch.equal(one, other) for one, other in zip(gradients(pipe), wanted, strict=True))
    where = (runner, here) if library is torchremat else (library.pipeline, rivals_here)
    x.grad, pipe = None, make()
    with own(), mock.patch.object(where[0], "spawn_workers", where[1]), record_allocations(x.device) as recorder:
        loss_of(pipe(x)).backward()
    x.grad = None
    return {
        "peak_bytes": recorder.trace.peak_bytes,
        "seen_bytes": held.peak_bytes,
        "held_bytes": live,
        "open": opened.most,
        "equal": equal,
    }


def ours(sizes: Sizes, *, skips: Callable[[nn.Sequential], nn.Sequential], chunks: int, mode: str) -> torchremat.Pipe:
    layers = skips(sizes.model().layers())
    return torchremat.Pipe(layers, BALANCE, devices=_devices(), chunks=chunks, checkpoint=mode)


def theirs(sizes: Sizes, *, mode: str) -> nn.Module:
    layers = rivals(sizes.model().layers())
    rival = importlib.import_module(RIVAL)
    return rival.GPipe(layers, BALANCE, devices=["cpu"] * 4, chunks=CHUNKS, checkpoint=mode)


def _devices() -> list[str]:
    return [f"cuda:{index}" for index in range(4)] if torch.cuda.device_count() >= 4 else ["cpu"] * 4


def as_they_are(layers: nn.Sequential) -> nn.Sequential:
    return layers


WAYS = {
    "skips in tuples, no dependency": (carried, without_dependency),
    "skips in tuples": (carried, ExitStack),
    "skips by portals, no dependency": (as_they_are, without_dependency),
    "skips by portals": (as_they_are, ExitStack),
}


def stage_inputs(sizes: Sizes, rows: int) -> list[int]:
    """Bytes of what each stage gets of a microbatch, without its skips."""
    layers, x, sizes_of = sizes.model().layers(), sizes.images()[:rows], []
    for count in BALANCE:
        sizes_of.append(x.nbytes)
        x = layers[:count](x)
        layers = layers[count:]
    return sizes_of


def measured(sizes: Sizes, *, with_rival: bool) -> dict[str, object]:
    x = sizes.images()
    wanted = plain_gradients(sizes, x, CHUNKS)
    rows: dict[str, object] = {}
    for name, (skips, switched) in WAYS.items():
        with switched():
            make = partial(ours, sizes, skips=skips, chunks=CHUNKS, mode="except_last")
            rows[name] = one_step(make, x, wanted, torchremat)
    beside: dict[str, object] = {}
    for mode in MODES:
        make = partial(ours, sizes, skips=as_they_are, chunks=CHUNKS, mode=mode)
        beside[mode] = {"ours": one_step(make, x, wanted, torchremat)}
        if with_rival:
            make = partial(theirs, sizes, mode=mode)
            beside[mode][RIVAL] = one_step(make, x, wanted, importlib.import_module(RIVAL))
    return {"ablation": rows, "beside": beside}


def all_chunks(sizes: Sizes) -> dict[str, dict[str, bool]]:
    """Whether gradients are those of the plain layers, by chunks and mode."""
    x = sizes.images()
    found: dict[str, dict[str, bool]] = {}
    for chunks in range(1, 9):
        wanted = plain_gradients(sizes, x, chunks)
        found[str(chunks)] = {}
        for mode in MODES:
            pipe = ours(sizes, skips=as_they_are, chunks=chunks, mode=mode)
            loss_of(pipe(x)).backward()
            equal = all(torch.equal(one, other) for one, other in zip(gradients(pipe), wanted, strict=True))
            found[str(chunks)][mode] = equal
    return found


def on_cuda(sizes: Sizes) -> dict[str, object] | None:
    """Seconds of a step and the most bytes of each device, for each way; None where there are not four devices."""
    if torch.cuda.device_count() < 4:
        return None
    x = sizes.images().to("cuda:0")
    found: dict[str, object] = {}
    switches = {"": ExitStack, ", no copy streams": without_streams}
    for name, (skips, switched) in WAYS.items():
        for label, streamed in switches.items():
            with switched(), streamed():
                pipe = ours(sizes, skips=skips, chunks=CHUNKS, mode="except_last")
                seconds: list[float] = []
                for _ in range(ROUNDS + 1):
                    for device in range(4):
                        torch.cuda.reset_peak_memory_stats(device)
                        torch.cuda.synchronize(device)
                    start_s = time.perf_counter()
                    loss_of(pipe(x)).backward()
                    for device in range(4):
                        torch.cuda.synchronize(device)
                    seconds.append(time.perf_counter() - start_s)
            found[name + label] = {
                "seconds": statistics.median(seconds[1:]),
                "peak_bytes": [torch.cuda.max_memory_allocated(device) for device in range(4)],
            }
    return found


def run(smoke: bool) -> dict[str, object]:
    sizes = TINY if smoke else REAL
    with_rival = not smoke
    if with_rival and importlib.util.find_spec(RIVAL) is None:
        raise SystemExit("torchgpipe is what this compares with: pip install --no-deps torchgpipe==0.0.7")
    found = measured(sizes, with_rival=with_rival)
    chunks = all_chunks(sizes)
    inputs = stage_inputs(sizes, sizes.batch // CHUNKS)
    always = found["beside"]["always"]["ours"]["held_bytes"]
    between = [CHUNKS * inputs[1], CHUNKS * inputs[2]]
    results = {**found, "chunks": chunks, "cuda": on_cuda(sizes), "inputs": inputs, "bars": []}
    if smoke:
        return results
    last = found["beside"]["except_last"]
    mine, theirs = last["ours"]["peak_bytes"], last[RIVAL]["peak_bytes"]
    count = sum(equal for modes in chunks.values() for equal in modes.values())
    results["bars"] = [
        bar(
            "gradients equal those of the plain layers, 1 to 8 chunks, in all modes",
            f"{count} of {8 * len(MODES)}",
            count == 8 * len(MODES),
        ),
        bar(
            "always: the stages between hold their inputs and no byte of the skips",
            f"{always[1]:,} and {always[2]:,} of {between[0]:,} and {between[1]:,}",
            always[1:3] == between,
        ),
        bar("except_last: the peak is at most torchgpipe's", f"{mine / theirs:.3f} of it", mine <= theirs),
    ]
    return results


def tables(results: dict[str, object]) -> dict[str, str]:
    head = ["peak, MiB", *(f"stage {stage}" for stage in range(4)), "open recomputes", "equal"]

    def row(name: str, one: dict[str, object], peak: str) -> list[str]:
        return [name, mib(one[peak]), *map(mib, one["held_bytes"]), str(one["open"]), yes(one["equal"])]

    ablation = [row(name, one, "seen_bytes") for name, one in results["ablation"].items()]
    beside = [
        row(f"{mode}, {who}", one, "peak_bytes")
        for mode, both in results["beside"].items()
        for who, one in both.items()
    ]
    cuda = results["cuda"]
    seconds = [
        [name, "needs 4 CUDA devices", ""]
        if cuda is None
        else [name, f"{1e3 * cuda[name]['seconds']:.1f}", ", ".join(map(mib, cuda[name]["peak_bytes"]))]
        for name in [name + label for name in WAYS for label in ("", ", no copy streams")]
    ]
    chunks = [[count, *(yes(equal) for equal in modes.values())] for count, modes in results["chunks"].items()]
    return {
        "ablation": markdown(["except_last", *head], ablation),
        "beside": markdown(["checkpoint", *head], beside),
        "cuda": markdown(["", "step, ms", "peak of each device, MiB"], seconds),
        "chunks": markdown(["chunks", *MODES], chunks),
    }


if __name__ == "__main__":
    sys.exit(publish(Path(__file__).parent, run, tables))
