"""Programs as data: a tree of steps that is interpreted over tensors, plainly and with regions.

A program keeps a list of values. An `Op` reads two of them, by numbers that wrap around, and appends what it makes; a
`Block` runs its steps under a context; a `Part` is a piece that becomes a region, with values of its own; a `Chain` is
a module whose layers are recomputed in runs. So every combination of numbers is a program, and one that fails shrinks.

    mode         a Part is                                            for
    plain        a call                                               what is right
    reference    a call under hooks that clone what is saved          which parts are asked for what they saved; what is
                                                                      right where plain autograd refuses to go backward
    ours         a region, of one of several kinds
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import torchremat
from logs import Log, Tally
from probes.regions import CallDecision, RegionPlace, Scope, Settings, set_forward
from regions.comparing import Twice
from torchremat.interop.torch_checkpoint import checkpoint as drop_in
from torchremat.interop.torch_checkpoint import create_selective_checkpoint_contexts
from torchremat.policies import everything_saved, nothing_saved, save_matmuls, save_operators, save_smaller_than

# ------------------------------------------------------------------------------------------------------- operations


def fit(value):
    """A value as a 4 x 6 matrix of float32, a view where that is possible."""
    if value.numel() != 24:
        value = value.mean().expand(24)
    return value.reshape(4, 6).float()


def wide(value):
    """A value with at least one dimension."""
    return value if value.dim() else value.reshape(1)


def like(value, other):
    """A value that broadcasts to another."""
    return value if value.shape == other.shape else value.mean()


def inside(value, other, run, *, create):
    """A gradient of something small, taken in the middle of the program."""
    if not (torch.is_grad_enabled() and value.requires_grad):
        return value.detach()
    (grad,) = torch.autograd.grad((value * value * like(other, value).detach()).sum(), value, create_graph=create)
    return grad


def deep(value, root):
    """A gradient all the way back to the first value there is."""
    if not (torch.is_grad_enabled() and value.requires_grad and root.requires_grad):
        return value.detach()
    (grad,) = torch.autograd.grad(value.sum(), root, allow_unused=True, retain_graph=True)
    return value.detach() if grad is None else grad


def backward_inside(value, run):
    """A backward that leaves gradients, in the middle of the program."""
    if torch.is_grad_enabled() and value.requires_grad:
        value.float().square().mean().backward(retain_graph=True)
    return []


def doubled(value):
    # On a tensor of its own: torch 2.13 crashes in `register_hook` on some that were written through a view.
    value = value * 1
    if value.requires_grad:
        value.register_hook(lambda grad: None if grad is None else grad * 2)
    return value


def attention(a, b):
    q, k = fit(a).view(1, 2, 4, 3), fit(b).view(1, 2, 4, 3)
    return F.scaled_dot_product_attention(q, k, q)


# By name, each a function of two values and the run.
PURE = {
    "exp": lambda a, b, run: a.tanh().exp(),
    "sin": lambda a, b, run: a.sin(),
    "sigmoid": lambda a, b, run: a.sigmoid(),
    "relu": lambda a, b, run: a.relu(),
    "gelu": lambda a, b, run: F.gelu(a),
    "softmax": lambda a, b, run: wide(a).softmax(-1),
    "cumsum": lambda a, b, run: wide(a).cumsum(0),
    "square": lambda a, b, run: a.tanh().square(),
    "norm": lambda a, b, run: a.norm(),
    "prod": lambda a, b, run: wide(a).tanh().prod(0),
    "var": lambda a, b, run: a.var(correction=0),
    "half": lambda a, b, run: a.double().float().bfloat16(),
    "mul": lambda a, b, run: a * like(b, a),
    "div": lambda a, b, run: a / (like(b, a).abs() + 1),
    "add": lambda a, b, run: a + like(b, a),
    "where": lambda a, b, run: torch.where(a > 0, a, like(b, a)),
    "cat": lambda a, b, run: torch.cat([fit(a), fit(b)], 1)[:, 3:9],
    "stack": lambda a, b, run: torch.stack([fit(a), fit(b)]).amax(0),
    "matmul": lambda a, b, run: fit(a) @ fit(b).t(),
    "einsum": lambda a, b, run: torch.einsum("ij,ik->jk", fit(a), fit(b)),
    "gather": lambda a, b, run: fit(a).gather(1, fit(b).argsort(1)),
    "index": lambda a, b, run: fit(a)[fit(b).sum(1) > 0].sum(0),
    "scatter": lambda a, b, run: fit(a).scatter_add(1, fit(b).argsort(1), fit(b)),
    "attention": lambda a, b, run: attention(a, b),
    "cross_entropy": lambda a, b, run: F.cross_entropy(fit(a), fit(b).argmax(1)),
    "pool": lambda a, b, run: F.max_pool1d(fit(a).unsqueeze(0), 2)[0],
    "conv": lambda a, b, run: F.conv1d(fit(a).unsqueeze(0), run.machine.kernel)[0],
    "leaf": lambda a, b, run: a * run.machine.leaf,
    # Views.
    "transpose": lambda a, b, run: wide(a).transpose(0, -1),
    "slice": lambda a, b, run: wide(a)[..., : max(1, wide(a).shape[-1] // 2)],
    "select": lambda a, b, run: wide(a)[0],
    "flatten": lambda a, b, run: a.flatten(),
    "unsqueeze": lambda a, b, run: a.unsqueeze(0) if a.dim() < 4 else a,
    "view": lambda a, b, run: a.view(a.shape),
    "expand": lambda a, b, run: a.mean().expand(4, 6),
    "detach": lambda a, b, run: a.detach(),
    "clone": lambda a, b, run: a.clone(),
    # Several outputs.
    "chunk": lambda a, b, run: list(fit(a).chunk(2, 1)),
    "split": lambda a, b, run: list(fit(a).exp().split([1, 2, 3], 1))[1:],
    "unbind": lambda a, b, run: list(fit(a).unbind(0))[::2],
    "max": lambda a, b, run: wide(a).max(-1).values,
    "sort": lambda a, b, run: wide(a).sort(-1).values,
    "std_mean": lambda a, b, run: list(torch.std_mean(a.float(), correction=0)),
    "qr": lambda a, b, run: list(torch.linalg.qr(fit(a)[:, :4] + torch.eye(4) * 3)),
    # Modules.
    "linear": lambda a, b, run: run.machine.linear(fit(a)),
    "tied": lambda a, b, run: run.machine.tied(fit(a)),
    "weight": lambda a, b, run: F.linear(fit(a), run.machine.linear.weight),
    "layer_norm": lambda a, b, run: run.machine.norm(fit(a)),
    "batch_norm": lambda a, b, run: run.machine.batch(fit(a)),
    "frozen_batch_norm": lambda a, b, run: run.machine.frozen_batch(fit(a)),
    "average": lambda a, b, run: run.machine.average(fit(a)),
    "spectral": lambda a, b, run: run.machine.spectral(fit(a)),
    "weight_norm": lambda a, b, run: run.machine.weight_norm(fit(a)),
    # The rest.
    "twice": lambda a, b, run: Twice.apply(a),
    "none": lambda a, b, run: [],
    "frozen": lambda a, b, run: a * torchremat.frozen("decision", (like(b, a) > 0).to(a.dtype)),
    "run_once": lambda a, b, run: torchremat.run_once(run.log.append, "once") or [],
    "hook": lambda a, b, run: doubled(a),
}
RANDOM = {
    "dropout": lambda a, b, run: F.dropout(a, 0.4),
    "dropout_module": lambda a, b, run: run.machine.drop(a),
    "rrelu": lambda a, b, run: F.rrelu(a.float(), training=True),
    "rand": lambda a, b, run: a + torch.rand_like(a),
    "bernoulli": lambda a, b, run: a * torch.bernoulli(a.detach().float().sigmoid().nan_to_num(0.5)),
    "generator": lambda a, b, run: a * torch.rand(a.shape, generator=run.generator),
    "permutation": lambda a, b, run: fit(a)[:, torch.randperm(6)],
}
BACKWARD = {
    "grad": lambda a, b, run: inside(a, b, run, create=False),
    "create_graph": lambda a, b, run: inside(a, b, run, create=True),
    "deep_grad": lambda a, b, run: deep(a, run.root),
    "backward": lambda a, b, run: backward_inside(a, run),
}
WRITES = {
    "add_": lambda a, b, run: a.add_(1),
    "mul_": lambda a, b, run: a.mul_(like(b, a)),
    "relu_": lambda a, b, run: a.relu_(),
    "sigmoid_": lambda a, b, run: a.sigmoid_(),
    "exp_": lambda a, b, run: a.clamp_(-1, 1).exp_(),
    "zero_": lambda a, b, run: a.zero_(),
    "copy_": lambda a, b, run: a.copy_(like(b, a)),
    "setitem": lambda a, b, run: wide(a)[..., :1].copy_(b.mean()),
    "masked_fill_": lambda a, b, run: a.masked_fill_(like(b, a) > 0, 0.5),
    "addcmul_": lambda a, b, run: a.addcmul_(like(b, a), like(b, a)),
    "dropout_": lambda a, b, run: F.dropout(a, 0.4, inplace=True),
    "rrelu_": lambda a, b, run: F.rrelu(a, training=True, inplace=True),
    "detach_add_": lambda a, b, run: a.detach().add_(1),
    "detach_": lambda a, b, run: a.detach_(),
    "transpose_": lambda a, b, run: wide(a).transpose_(0, -1),
    "normal_": lambda a, b, run: a.normal_(),
    "no_grad_add_": lambda a, b, run: _add_without_grad(a),
}
OPERATIONS = {**PURE, **RANDOM, **BACKWARD, **WRITES}
DRAWS = {*RANDOM, "dropout_", "rrelu_", "normal_"}
FILLS_LATER = {"rrelu", "rrelu_"}  # what it has saved, so that a clone of that is not what it will be


def _add_without_grad(value):
    with torch.no_grad():
        return value.add_(1)


CONTEXTS = {
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast_uncached": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "autocast_off": lambda: torch.autocast("cpu", enabled=False),
    "save_on_cpu": save_on_cpu,
    "hooks": lambda: saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    # A plain run knows nothing of these.
    "offload": lambda: torchremat.offload(torchremat.Host(), min_bytes=0),
    "offload_kept": lambda: torchremat.offload(torchremat.Keep(), min_bytes=0),
}


def every_other(ctx, op, *args, **kwargs):
    """A policy that keeps every other operator, as it comes."""
    every_other.count += 1
    return every_other.count % 2 == 0


every_other.count = 0

POLICIES = {
    "none": None,
    "nothing": nothing_saved,
    "everything": everything_saved,
    "matmuls": save_matmuls,
    "every other": every_other,
    "everything stored": everything_saved.into(torchremat.Host()),
    "matmuls stored": save_matmuls.into(torchremat.Host()) | save_operators("aten.mul", "aten.sin", "aten.add"),
    "by size": save_smaller_than(97),
}

# ----------------------------------------------------------------------------------------------------- the programs


@dataclass(frozen=True)
class Op:
    name: str
    a: int = -1
    b: int = -1


@dataclass(frozen=True)
class Block:
    context: str
    steps: tuple = ()


@dataclass(frozen=True)
class Part:
    kind: str  # see `Run.call`
    takes: tuple  # the values that are its arguments
    passing: str  # how they are passed
    steps: tuple
    gives: tuple  # the values of its own that it returns
    packing: str  # how it returns them
    check: str = "metadata"
    preserve_rng: bool = True
    early_stop: bool = True
    cache: str = "none"  # an object that it changes: none, argument, guarded
    policy: str = "none"


@dataclass(frozen=True)
class Chain:
    takes: int
    layers: tuple  # the steps of each layer
    glue: tuple  # the steps after each layer
    places: tuple  # first and last layer of each run, outermost first


@dataclass(frozen=True)
class Program:
    steps: tuple
    ending: str = "backward"
    between: str = "nothing"
    forwards: int = 1  # before the backward
    repeats: int = 1
    in_thread: bool = False

    def names(self):
        """The names of all operations, contexts, and what else there is."""
        found = {self.ending, self.between}
        pending = list(self.steps)
        while pending:
            step = pending.pop()
            if isinstance(step, Op):
                found.add(step.name)
            elif isinstance(step, Chain):
                for steps in (*step.layers, *step.glue):
                    pending += steps
            else:
                found.add(step.context if isinstance(step, Block) else step.kind)
                pending += step.steps
                if isinstance(step, Part) and step.cache != "none":
                    found.add("cache")
                if isinstance(step, Part) and step.policy != "none":
                    found.add("policy")
        return found

    def writes(self):
        """Whether something is written in place."""
        return bool(self.names() & {*WRITES, "write parameter", "write input"})


def draws(steps):
    return bool(Program(steps).names() & DRAWS)


# --------------------------------------------------------------------------------------------------------- a machine


class Average(nn.Module):
    """Replaces one buffer, and writes to another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(x.mean(0) * 0.5)
                self.count = self.count + 1
        return (x - self.mean.clone()) * self.count


class Machine(nn.Module):
    """The modules that a program may run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.linear.weight
        self.norm = nn.LayerNorm(6)
        self.batch = nn.BatchNorm1d(6)
        self.frozen_batch = nn.BatchNorm1d(6).eval()
        self.average = Average()
        self.spectral = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.drop = nn.Dropout(0.3)
        self.kernel = nn.Parameter(torch.randn(4, 4, 1))
        self.leaf = torch.tensor(0.7, requires_grad=True)


@dataclass
class Cache:
    kept: list = field(default_factory=list)


@dataclass
class Pack:
    first: object
    rest: list


def packed(values, how):
    """Values in a container."""
    match how:
        case "tuple":
            return tuple(values)
        case "dict":
            return {f"v{i}": value for i, value in enumerate(values)}
        case "dataclass":
            return Pack(values[0], values[1:])
        case "nested":
            return [values[0], {"rest": tuple(values[1:]), "nothing": None}, "words"]
        case "with none":
            return (None, *values, None)
        case "one":
            return values[0]
        case "nothing":
            return None
    raise ValueError(how)


def unpacked(value):
    """The tensors in a container, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Pack):
        return unpacked((value.first, value.rest))
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for one in value for tensor in unpacked(one)] if isinstance(value, tuple | list) else []


class Body:
    """The function of a part."""

    def __init__(self, run, part, cache):
        self.run = run
        self.machine = run.machine  # where modules are looked for
        self.part = part
        self.cache = cache
        self.depth = run.depth

    def __call__(self, *args, cache=None, generator=None, **kwargs):
        run, part = self.run, self.part
        values = unpacked((args, kwargs))
        if self.depth == 0:
            (run.recomputes if torchremat.is_recomputing() else run.forwards)[id(part)] += 1
        with _Inside(run, values[0], generator, self.depth + 1):
            cache = self.cache if cache is None else cache
            if cache is not None:
                values.append(values[0] * len(cache.kept))
                cache.kept.append(values[-1].detach())
            run.steps(part.steps, values)
        return packed([values[i % len(values)] for i in part.gives], part.packing)


class Piece(nn.Module):
    """A body as a module."""

    def __init__(self, body):
        super().__init__()
        self.machine = body.machine
        self.body = body

    def forward(self, *args, **kwargs):
        return self.body(*args, **kwargs)


class Layer(nn.Module):
    def __init__(self, run, steps, is_region):
        super().__init__()
        self.machine = run.machine
        self.is_region = is_region
        self.run = run
        self.own = steps

    def forward(self, h, *, generator):
        values = [h]
        run = self.run
        with run.cloning(self) if self.is_region else nullcontext(), _Inside(run, h, generator, run.depth + 1):
            run.steps(self.own, values)
        return values[-1]


class Layers(nn.Module):
    def __init__(self, run, chain):
        super().__init__()
        self.run = run
        self.glue = chain.glue
        self.layers = nn.ModuleList(
            Layer(run, steps, any(first <= i <= last for first, last in chain.places))
            for i, steps in enumerate(chain.layers)
        )

    def forward(self, h):
        for layer, glue in zip(self.layers, self.glue, strict=True):
            values = [layer(h, generator=self.run.generator)]
            self.run.steps(glue, values)
            h = values[-1]
        return h


# ---------------------------------------------------------------------------------------------------- interpretation


class Run:
    """One interpretation of a program."""

    def __init__(self, mode):
        self.mode = mode
        torch.manual_seed(0)
        self.machine = Machine()
        self.inputs = [torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)]
        self.leaves = [*self.inputs[:2], self.machine.leaf, *self.machine.parameters()]
        self.generator = torch.Generator().manual_seed(3)
        self.cache = Cache()
        self.log = Log()
        self.root = self.inputs[0]
        self.depth = 0
        self.forwards = Tally()  # of the outermost parts, by number
        self.recomputes = Tally()
        self.asked = set()
        self.backwards = 0
        self.kept = []

    def steps(self, steps, values):
        for step in steps:
            self.step(step, values)
            del values[1:-11]

    def step(self, step, values):
        match step:
            case Op(name, a, b):
                made = OPERATIONS[name](values[a % len(values)], values[b % len(values)], self)
                values += made if isinstance(made, list) else [made]
            case Block(context, steps):
                plain = context.startswith("offload") and self.mode != "ours"
                with nullcontext() if plain else CONTEXTS[context]():
                    self.steps(steps, values)
            case Part():
                values += unpacked(self.part(step, [values[i % len(values)] for i in step.takes]))
            case Chain():
                values.append(self.layers(step, values[step.takes % len(values)]))

    def part(self, part, values):
        args, kwargs = (), {}
        if part.passing == "args":
            args = tuple(values)
        elif part.passing == "kwargs":
            kwargs = packed(values, "dict")
        else:
            args = (packed(values, part.passing), 3, None)
        kwargs["generator"] = self.generator
        # What an inner part changes, the outer one would have to know of.
        cache = "none" if self.depth else part.cache
        body = Body(self, part, self.cache if cache == "guarded" else None)
        if cache == "argument":
            kwargs["cache"] = self.cache
        guard = [self.cache] if cache == "guarded" else []
        return self.call(part, body, args, kwargs, guard)

    def call(self, part, body, args, kwargs, guard):
        if self.mode == "plain":
            return body(*args, **kwargs)
        if self.mode == "reference":
            with self.cloning(part):
                return body(*args, **kwargs)
        options = {
            "check": part.check,
            "early_stop": part.early_stop,
            "preserve_rng": part.preserve_rng or draws(part.steps),
            "guard": guard,
            "policy": POLICIES[part.policy],
        }
        match part.kind:
            case "checkpointed":
                return torchremat.checkpointed(body, **options)(*args, **kwargs)
            case "wrap":
                piece = torchremat.wrap(Piece(body), "", **options)
                return piece(*args, **kwargs)
            case "drop-in" if not guard:
                check = "none" if part.check == "none" else "default"
                options = {"determinism_check": check, "preserve_rng_state": options["preserve_rng"]}
                if part.policy != "none":
                    options["context_fn"] = partial(create_selective_checkpoint_contexts, POLICIES[part.policy])
                return drop_in(body, *args, use_reentrant=False, early_stop=part.early_stop, **options, **kwargs)
            case "checkpoint" if not guard:
                return torchremat.checkpoint(body, *args, **kwargs)
            case _:
                return torchremat.checkpointed(body, guard=guard)(*args, **kwargs)

    def cloning(self, part):
        """The hooks of a reference run; inside of others there are some already."""
        if self.mode != "reference" or self.depth:
            return nullcontext()
        return saved_tensors_hooks(lambda tensor: (part, tensor.clone()), self.ask)

    def ask(self, packed):
        part, tensor = packed
        self.asked.add(id(part))
        return tensor

    def layers(self, chain, value):
        model = Layers(self, chain)
        self.kept.append(model)
        if self.mode == "ours":
            places = [(first, last, RegionPlace(last - first + 1, f"{first}..{last}")) for first, last in chain.places]
            choices = {}
            for index in range(len(model.layers)):
                around = tuple(place for first, last, place in places if first <= index <= last)
                choices[f"layers.{index}", 0] = CallDecision(around)
            set_forward(model, "", None, Scope(choices, Settings()))
            for index, layer in enumerate(model.layers):
                set_forward(layer, f"layers.{index}", None)
        return model(value)


class _Inside:
    """The root, the generator and the depth of what runs in a part."""

    def __init__(self, run, *new):
        self.run = run
        self.new = new

    def __enter__(self):
        run = self.run
        self.old = run.root, run.generator, run.depth
        run.root, run.generator, run.depth = self.new

    def __exit__(self, *_):
        self.run.root, self.run.generator, self.run.depth = self.old


@dataclass
class Outcome:
    """What a run has left."""

    run: Run
    found: list  # of name and tensor
    error: BaseException | None = None
    when: str = "forward"


def outcome(program, mode):
    """Interpret a program; an error that it raises is part of the outcome."""
    run = Run(mode)
    result = Outcome(run, [])
    try:
        for number in range(program.repeats):
            _repeat(program, run, result, number)
    except (RuntimeError, AssertionError) as error:
        result.error = error.with_traceback(None)
    result.found += [(f"gradient {i}", one.grad) for i, one in enumerate(run.leaves)]
    result.found += [(name, one.clone()) for name, one in run.machine.named_buffers()]
    result.found += [("default generator", torch.get_rng_state()), ("generator", run.generator.get_state())]
    result.found += [(f"cache {i}", one) for i, one in enumerate(run.cache.kept)]
    result.found.append(("log", torch.tensor(len(run.log))))
    result.found.append(("training", torch.tensor([one.training for one in run.machine.modules()])))
    return result


def _repeat(program, run, result, number):
    result.when = "forward"
    outputs = []
    for _ in range(program.forwards):
        values = [run.inputs[0] * 1, run.inputs[1] * 1, run.inputs[2].clone()]
        run.steps(program.steps, values)
        outputs.append(values)
    del values
    result.found += [(f"output {i} of {number}", one.detach().clone()) for i, one in enumerate(chain(*outputs))]
    result.when = "backward"
    _between(program, run, outputs)
    if program.in_thread:
        with ThreadPoolExecutor(1) as pool:
            result.found += pool.submit(_end, program.ending, run, outputs).result()
    else:
        result.found += _end(program.ending, run, outputs)


def _between(program, run, outputs):
    match program.between:
        case "eval":
            run.machine.eval()
        case "draw":
            torch.rand(3)
            torch.rand(2, generator=run.generator)
        case "write parameter":
            with torch.no_grad():
                run.machine.linear.weight.add_(0.1)
        case "write input":
            with torch.no_grad():
                outputs[0][0].add_(1)
        case "replace parameter":
            run.machine.norm.weight = nn.Parameter(torch.full((6,), 2.0))
        case "replace buffer":
            run.machine.batch.running_mean = torch.full((6,), 2.0)
        case "clear cache":
            run.cache.kept.clear()


def _loss(values):
    terms = [one.float().mean() * (i + 1) for i, one in enumerate(values) if one.requires_grad]
    return sum(terms) if terms else None


def _end(ending, run, outputs):
    losses = [loss for values in outputs if (loss := _loss(values)) is not None]
    if not losses:
        return []
    loss = sum(losses)
    found = Log()

    def count(times=1):
        run.backwards += times

    def grads(loss, **options):
        count()
        return torch.autograd.grad(loss, run.leaves, allow_unused=True, **options)

    match ending:
        case "backward":
            count()
            loss.backward()
        case "autocast":
            count()
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
        case "retain":
            count(2)
            loss.backward(retain_graph=True)
            loss.backward()
        case "grad":
            found += grads(loss)
        case "subset":
            count()
            found += torch.autograd.grad(loss, [run.leaves[0], run.machine.norm.weight], allow_unused=True)
        case "double":
            first = grads(loss, create_graph=True)
            found += first
            total = [one.square().sum() for one in first if one is not None and one.requires_grad]
            if total:
                count()
                sum(total).backward()
        case "partial":
            last = [one for one in chain(*outputs) if one.requires_grad][-1]
            del outputs[:], losses
            count(2)
            last.float().sum().backward(retain_graph=True)
            loss.backward()
        case "one":
            last = [one for one in chain(*outputs) if one.requires_grad][-1]
            del outputs[:], losses, loss
            count()
            last.float().sum().backward()
        case "separately":
            count(len(losses))
            for one in reversed(losses):
                one.backward(retain_graph=True)
        case "session" | "session of two":
            passes = 2 if ending == "session of two" else None
            with torchremat.session(passes) if run.mode == "ours" else nullcontext():
                count(2)
                loss.backward(retain_graph=True)
                loss.backward()
        case "batched":
            count()
            directions = torch.tensor([1.0, -2.0])
            found += torch.autograd.grad(loss, run.leaves, directions, is_grads_batched=True, allow_unused=True)
    return [(f"{ending} {i}", None if one is None else one.detach().clone()) for i, one in enumerate(found)]


ENDINGS = (
    "backward", "autocast", "retain", "grad", "subset", "double", "partial", "one", "separately", "session",
    "session of two", "batched",
)  # fmt: skip
BETWEEN = (
    "nothing", "eval", "draw", "write parameter", "write input", "replace parameter", "replace buffer", "clear cache",
)  # fmt: skip


def differences(ours, right):
    """What is not equal bit for bit, in words."""
    if [name for name, _ in ours.found] != [name for name, _ in right.found]:
        return [f"{[name for name, _ in ours.found]} instead of {[name for name, _ in right.found]}"]
    return [
        f"{name}: {a} instead of {b}"
        for (name, a), (_, b) in zip(ours.found, right.found, strict=True)
        if not (a is b if a is None or b is None else _equal(a, b))
    ]


def _equal(a, b):
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    # Which of the many numbers that are none does not matter.
    return torch.equal(a, b) or (
        a.is_floating_point() and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) and torch.equal(a.isnan(), b.isnan())
    )


# -------------------------------------------------------------------------------------------------------- strategies

_NUMBERS = st.integers(0, 7)


def _operations(names):
    return st.builds(Op, st.sampled_from(names), _NUMBERS, _NUMBERS)


def _steps(pool, depth, most=5, least=0):
    plain = _operations(pool)
    kinds = [plain, plain, plain]
    if depth:
        kinds += [_blocks(pool, depth - 1), _parts(pool, depth - 1)]
    return st.lists(st.one_of(kinds), min_size=least, max_size=most).map(tuple)


def _blocks(pool, depth):
    return st.builds(Block, st.sampled_from(sorted(CONTEXTS)), _steps(pool, depth, most=3, least=1))


def _parts(pool, depth):
    return st.builds(
        Part,
        st.sampled_from(["checkpoint", "checkpointed", "wrap", "drop-in"]),
        st.lists(_NUMBERS, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["args", "kwargs", "tuple", "dict", "dataclass", "nested", "with none"]),
        _steps(pool, depth, most=6, least=1),
        st.lists(_NUMBERS, min_size=1, max_size=3).map(tuple),
        st.sampled_from(["one", "tuple", "dict", "dataclass", "nested", "with none", "nothing"]),
        check=st.sampled_from(["metadata", "none"]),
        preserve_rng=st.booleans(),
        early_stop=st.booleans(),
        cache=st.sampled_from(["none", "none", "none", "argument", "guarded"]),
        policy=st.sampled_from(["none", "none", "none", *POLICIES]),
    )


@st.composite
def _chains(draw, pool):
    layers = tuple(draw(st.lists(_steps(pool, 1, most=3, least=1), min_size=1, max_size=5)))
    glue = tuple(draw(_steps(pool, 0, most=1)) for _ in layers)
    places = []
    for _ in range(draw(st.integers(0, 3))):
        first = draw(st.integers(0, len(layers) - 1))
        last = draw(st.integers(first, len(layers) - 1))
        # One of two runs holds the other, or they do not meet.
        if all(last < a or b < first or (a <= first and last <= b) or (first <= a and b <= last) for a, b in places):
            places.append((first, last))
    places.sort(key=lambda place: place[0] - place[1])
    return Chain(draw(_NUMBERS), layers, glue, tuple(places))


@st.composite
def programs(draw):
    """Any program; half of them write nothing in place, and most go backward in no other backward."""
    pool = [*PURE, *RANDOM]
    writes = draw(st.booleans())
    if writes:
        pool += [*WRITES]
    if draw(st.integers(0, 4)) == 0:
        pool += [*BACKWARD]
    middle = _chains(pool) if draw(st.integers(0, 3)) == 0 else _parts(pool, 2)
    steps = (*draw(_steps(pool, 0, most=3)), draw(middle), *draw(_steps(pool, 2, most=4)))
    around = draw(st.sampled_from([None, None, None, "autocast", "save_on_cpu", "offload"]))
    if around:
        steps = (Block(around, steps),)
    between = st.sampled_from([one for one in BETWEEN if writes or not one.startswith("write")])
    return Program(
        steps,
        # Torch refuses `.backward()` in a recompute that runs for a batch of gradients.
        draw(st.sampled_from([one for one in ENDINGS if one != "batched" or "backward" not in pool])),
        draw(st.one_of(st.just("nothing"), between)),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.integers(0, 5)) == 0,
    )
