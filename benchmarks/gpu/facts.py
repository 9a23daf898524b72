"""How a real device behaves where the library relies on it: history, workspaces, copies, kernels, capture."""

from __future__ import annotations

import gc
import statistics
import threading
import time
from collections.abc import Callable

import torch
from findings import section
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import torchremat

MIB = 2**20
DEVICE = torch.device("cuda", 0)


def versions() -> object:
    properties = torch.cuda.get_device_properties(0)
    return {
        "torch": torch.__version__,
        "device": properties.name,
        "total_bytes": properties.total_memory,
        "capability": torch.cuda.get_device_capability(),
        "allocator": torch.cuda.get_allocator_backend(),
        "cudnn": torch.backends.cudnn.version(),
        "free_total": torch.cuda.mem_get_info(),
    }


def _stat(name: str) -> int:
    return torch.cuda.memory_stats(DEVICE).get(name, 0)


def _position() -> int:
    return _stat("allocation.all.allocated") + _stat("allocation.all.freed")


def _history() -> list[dict[str, object]]:
    return torch.cuda.memory._snapshot()["device_traces"][0]


def history() -> object:
    """Whether the allocator's history and its counters tell the same, and how it names what."""
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        before, start = len(_history()), _position()
        kept = [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in (1, 511, 513, 3 * MIB, 30 * MIB)]
        del kept[3]
        middle = _position()
        x = torch.rand(300, 300, device=DEVICE, requires_grad=True)
        (x @ x).relu().sum().backward()
        end = _position()
        torch.cuda.synchronize()
        events = _history()[before:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    actions = [event["action"] for event in events]
    seen = sum(action in ("alloc", "free_completed") for action in actions)
    return {
        "first": [{key: value for key, value in event.items() if key != "frames"} for event in events[:14]],
        "actions": {action: actions.count(action) for action in dict.fromkeys(actions)},
        "counted": end - start,
        "in the history": seen,
        "in the middle": middle - start,
        "agree": seen == end - start,
    }


def history_of_streams() -> object:
    """What a free looks like of a block that another stream has used, and of a device thread's allocations."""
    torch.cuda.memory._record_memory_history("all", context=None)
    try:
        before, start = len(_history()), _position()
        side = torch.cuda.Stream()
        big = torch.rand(8192, 8192, device=DEVICE)
        with torch.cuda.stream(side):
            for _ in range(20):
                big @ big
        big.record_stream(side)
        del big
        at_free = _position()
        torch.cuda.synchronize()
        torch.empty(1, device=DEVICE)
        after = _position()
        events = _history()[before:]
    finally:
        torch.cuda.memory._record_memory_history(None)
    return {
        "actions": [f"{event['action']} {event['size']} stream {event['stream']}" for event in events],
        "counted at the free": at_free - start,
        "counted after": after - start,
        "allocated": torch.cuda.memory_allocated(),
    }


def profiler_tree() -> object:
    """Whether torch's profiler tells of CUDA's allocations, as ours asks it and with operators."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.rand(100, 100, device=DEVICE).sin().sum()
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    seen: list[str] = []

    def walk(nodes: list[object], depth: int) -> None:
        for node in nodes:
            if node.name == "[memory]":
                seen.append(f"{depth} {node.extra_fields.device} {node.extra_fields.alloc_size}")
            walk(node.children, depth + 1)

    walk(tree, 0)
    return seen[:20]


def workspaces() -> object:
    """What stays in memory after the first products, of the thread and of autograd's."""
    found: dict[str, int] = {}

    def note(name: str) -> None:
        torch.cuda.synchronize()
        gc.collect()
        found[name] = torch.cuda.memory_allocated()

    note("before")
    x = torch.rand(256, 256, device=DEVICE, requires_grad=True)
    note("an input")
    y = x @ x
    note("after a product")
    y.sum().backward()
    note("after its backward")
    x.grad = None
    del y
    note("without gradient and result")
    half = x.detach().bfloat16().requires_grad_()
    (half @ half).sum().backward()
    half.grad = None
    note("after bfloat16")
    functional.linear(half, half, torch.zeros(256, device=DEVICE, dtype=torch.bfloat16)).sum().backward()
    half.grad = None
    note("after a linear with bias (cublasLt)")
    thread = threading.Thread(target=torch.matmul, args=(x.detach(), x.detach()))
    thread.start()
    thread.join()
    del thread
    note("after a product in a thread")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.detach() @ x.detach()
    note("after a product on another stream")
    del x, half
    note("all gone")
    torch._C._cuda_clearCublasWorkspaces()
    note("workspaces cleared")
    convolution = nn.Conv2d(64, 64, 3).to(DEVICE)
    convolution(torch.rand(8, 64, 64, 64, device=DEVICE)).sum().backward()
    del convolution
    note("after a convolution")
    return found


def copies() -> object:
    """GB/s between pinned memory and the device, and GB/s of a copy that is not pinned."""
    size = 1024 * MIB
    device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    plain = torch.empty(size // 8, dtype=torch.uint8)

    def rate(copy: Callable[[], object], nbytes: int) -> float:
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            copy()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
        return round(nbytes / statistics.median(seconds) / 1e9, 2)

    return {
        "out, pinned": rate(lambda: pinned.copy_(device, non_blocking=True), size),
        "in, pinned": rate(lambda: device.copy_(pinned, non_blocking=True), size),
        "out, pageable": rate(lambda: plain.copy_(device[: size // 8]), size // 8),
        "in, pageable": rate(lambda: device[: size // 8].copy_(plain), size // 8),
    }


def products() -> object:
    """TFLOP/s of a large product, as the host sees it without waiting, and as events do."""
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    found = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start_s = time.perf_counter()
        begin.record()
        a @ a
        end.record()
        launched_s = time.perf_counter() - start_s
        torch.cuda.synchronize()
        found.append((launched_s * 1e6, 2 * 8192**3 / (begin.elapsed_time(end) * 1e-3) / 1e12))
    return {
        "launch, microseconds": round(statistics.median(one for one, _ in found), 1),
        "TFLOP/s": round(statistics.median(one for _, one in found), 1),
    }


def attention() -> object:
    """Whether two plain runs of the backward of attention are equal, by kernel and determinism."""
    found: dict[str, object] = {}
    shape = (4, 16, 1024, 64)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).sin().sum(), (q, k, v)
        )

    for backend in (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.MATH,
    ):
        for deterministic in (False, True):
            torch.use_deterministic_algorithms(deterministic)
            name = f"{backend.name}{', deterministic' if deterministic else ''}"
            try:
                with sdpa_kernel(backend):
                    first = run()
                    found[name] = [
                        max(float((one - other).abs().max()) for one, other in zip(first, run(), strict=True))
                        for _ in range(8)
                    ]
            except RuntimeError as error:
                found[name] = str(error)[:200]
    torch.use_deterministic_algorithms(False)
    return found


def atomics() -> object:
    """Whether other common backwards differ between two runs."""
    found: dict[str, object] = {}
    table = torch.randn(1000, 256, device=DEVICE, requires_grad=True)
    index = torch.randint(0, 20, (65536,), device=DEVICE)
    picture = torch.randn(8, 64, 56, 56, device=DEVICE, requires_grad=True)
    convolution = nn.Conv2d(64, 64, 3, padding=1).to(DEVICE)

    def embedding() -> Tensor:
        return torch.autograd.grad(functional.embedding(index, table).sin().sum(), table)[0]

    def indexed() -> Tensor:
        return torch.autograd.grad(table[index].sin().sum(), table)[0]

    def scattered() -> Tensor:
        out = torch.zeros(1000, 256, device=DEVICE).index_add(0, index, table[index].sin())
        return torch.autograd.grad(out.cos().sum(), table)[0]

    def upsampled() -> Tensor:
        out = functional.interpolate(picture, scale_factor=2, mode="bilinear")
        return torch.autograd.grad(out.sin().sum(), picture)[0]

    def convolved() -> Tensor:
        return torch.autograd.grad(convolution(picture).sin().sum(), convolution.weight)[0]

    for run in (embedding, indexed, scattered, upsampled, convolved):
        first = run()
        found[run.__name__] = max(float((first - run()).abs().max()) for _ in range(8))
    return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def slack() -> object:
    """What the counters say of a step's peak: requested, allocated, reserved, and sizes rounded to 512."""
    model = nn.Sequential(*(_Block(1000) for _ in range(8))).to(DEVICE)
    x = torch.rand(777, 1000, device=DEVICE)

    def step() -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=True)

    found = []
    for turn in range(4):
        step()
        if turn == 2:
            torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start, requested = torch.cuda.memory_allocated(), _stat("requested_bytes.all.current")
        torch.cuda.memory._record_memory_history("all", context=None)
        before = len(_history())
        step()
        torch.cuda.synchronize()
        events = _history()[before:]
        torch.cuda.memory._record_memory_history(None)
        live = peak = rounded = top = 0
        held: dict[int, int] = {}
        for event in events:
            if event["action"] == "alloc":
                held[event["addr"]] = event["size"]
                live += event["size"]
                rounded += -(-event["size"] // 512) * 512
            elif event["action"] == "free_completed" and event["addr"] in held:
                size = held.pop(event["addr"])
                live -= size
                rounded -= -(-size // 512) * 512
            peak, top = max(peak, live), max(top, rounded)
        found.append(
            {
                "allocated peak": torch.cuda.max_memory_allocated() - start,
                "requested peak": _stat("requested_bytes.all.peak") - requested,
                "history's peak": peak,
                "history's peak, rounded to 512": top,
                "reserved": torch.cuda.max_memory_reserved(),
            }
        )
    return found


def flags() -> object:
    """What the getters of the flags of reduced precision return, and whether their setters take it."""
    return {
        name: repr(getattr(torch._C, f"_get_cublas_allow_{name}")())
        for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction", "fp16_accumulation")
    }


def generators() -> object:
    """What a state of a generator costs on a device, and how it behaves while a graph is captured."""
    found: dict[str, object] = {}
    generator = torch.cuda.default_generators[0]
    start_s = time.perf_counter()
    for _ in range(1000):
        generator.get_state()
    found["get_state, microseconds"] = round((time.perf_counter() - start_s) * 1e3, 2)
    state = generator.get_state()
    start_s = time.perf_counter()
    for _ in range(1000):
        generator.set_state(state)
    found["set_state, microseconds"] = round((time.perf_counter() - start_s) * 1e3, 2)
    start_s = time.perf_counter()
    for _ in range(1000):
        generator.get_offset()
    found["get_offset, microseconds"] = round((time.perf_counter() - start_s) * 1e3, 2)
    x = torch.ones(1000, device=DEVICE)
    functional.dropout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        try:
            before = generator.get_state()
            y = functional.dropout(x)
            after = generator.get_state()
            found["while captured"] = f"moved: {not torch.equal(before, after)}"
        except RuntimeError as error:
            found["while captured"] = str(error)[:200]
            y = x
        try:
            found["offset while captured"] = generator.get_offset()
        except RuntimeError as error:
            found["offset while captured"] = str(error)[:200]
        found["is_current_stream_capturing"] = torch.cuda.is_current_stream_capturing()
    graph.replay()
    first = y.clone()
    graph.replay()
    found["two replays differ"] = not torch.equal(first, y)
    return found


def capture_of_a_region() -> object:
    """What our region and torch's do in a graph that is captured, with dropout and without."""
    from torch.utils.checkpoint import checkpoint

    found: dict[str, object] = {}
    for name, region in (
        ("ours", torchremat.checkpoint),
        ("torch", lambda *a: checkpoint(*a, use_reentrant=False)),
        ("torch, rng kept out", lambda *a: checkpoint(*a, use_reentrant=False, preserve_rng_state=False)),
    ):
        for dropout in (0.0, 0.5):
            x = (torch.rand(16, 64, device=DEVICE) + 0.5).requires_grad_()

            def model(x: Tensor, dropout: float = dropout) -> Tensor:
                return functional.dropout(x.exp(), dropout).square()

            try:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        region(model, x).sum().backward()
                        x.grad = None
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                x.grad = None
                with torch.cuda.graph(graph):
                    y = region(model, x)
                    y.sum().backward()
                masks_agree = []
                for _ in range(5):
                    x.grad.zero_()
                    graph.replay()
                    torch.cuda.synchronize()
                    # y is x where nothing was dropped, times a constant: so is its gradient, of the same places.
                    masks_agree.append(torch.equal(y != 0, x.grad != 0))
                result = {"masks agree in replays": masks_agree}
            except Exception as error:  # noqa: BLE001  an error is a finding
                result = f"{type(error).__name__}: {error}"[:300]
                torch.cuda.synchronize()
            found[f"{name}, dropout {dropout}"] = result
    return found


def offloaded() -> object:
    """What is still allocated after the forward of an offloaded chain, right away and after a wait."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(12))).to(DEVICE)
    x = torch.rand(4096, 2048, device=DEVICE)

    def allocated(step: Callable[[], Tensor]) -> dict[str, int]:
        torch.cuda.synchronize()
        start = torch.cuda.memory_allocated()
        loss = step()
        now = torch.cuda.memory_allocated() - start
        torch.cuda.synchronize()
        waited = torch.cuda.memory_allocated() - start
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        torch.cuda.synchronize()
        return {
            "after the forward": now // MIB,
            "after a wait": waited // MIB,
            "peak of the backward": (torch.cuda.max_memory_allocated() - start) // MIB,
            "reserved": torch.cuda.memory_reserved() // MIB,
        }

    found = {"plain": allocated(lambda: layers(x).square().mean())}
    layers.zero_grad()

    def away() -> Tensor:
        with torchremat.offload(torchremat.Host()):
            return layers(x).square().mean()

    found["offload, MiB"] = allocated(away)
    return found


def planned() -> object:
    """Whether `plan` runs on the device at all, and how right it is."""
    model = nn.Sequential(*(_Block(512) for _ in range(8))).to(DEVICE)
    x = torch.rand(1024, 512, device=DEVICE)

    def step(model: nn.Module) -> Tensor:
        return model(x).square().mean()

    plan = torchremat.plan(model, step, budget="60%")
    return {"plan": str(plan), "verified": str(torchremat.verify(plan, model, step))}


def measured() -> object:
    model = nn.Sequential(*(_Block(512) for _ in range(8))).to(DEVICE)
    x = torch.rand(1024, 512, device=DEVICE)
    return str(torchremat.measure(model, lambda model: model(x).square().mean()))


def out_of_memory() -> object:
    """How errors of memory read: the allocator's, cuBLAS's without room for its workspace, cuDNN's."""
    found: dict[str, str] = {}
    try:
        torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
    except RuntimeError as error:
        found["allocator"] = f"{type(error).__name__}: {error}"[:400]
    torch.cuda.empty_cache()
    torch._C._cuda_clearCublasWorkspaces()
    x = torch.rand(2048, 2048, device=DEVICE)
    picture, kernel = torch.rand(8, 64, 64, 64, device=DEVICE), torch.rand(64, 64, 3, 3, device=DEVICE)
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + MIB) / torch.cuda.get_device_properties(0).total_memory
    )
    held = []
    try:
        while True:
            held.append(torch.empty(MIB // 2, dtype=torch.uint8, device=DEVICE))
    except RuntimeError:
        pass
    for name, run in (
        ("a product", lambda: x @ x),
        ("a convolution", lambda: functional.conv2d(picture, kernel)),
    ):
        try:
            run()
            found[name] = "none"
        except RuntimeError as error:
            found[name] = f"{type(error).__name__}: {error}"[:400]
    del held
    torch.cuda.set_per_process_memory_fraction(1.0)
    return found


if __name__ == "__main__":
    section(
        workspaces=workspaces,
        versions=versions,
        history=history,
        history_of_streams=history_of_streams,
        profiler_tree=profiler_tree,
        copies=copies,
        products=products,
        attention=attention,
        atomics=atomics,
        slack=slack,
        flags=flags,
        generators=generators,
        offloaded=offloaded,
        measured=measured,
        planned=planned,
        capture_of_a_region=capture_of_a_region,
        out_of_memory=out_of_memory,
    )
