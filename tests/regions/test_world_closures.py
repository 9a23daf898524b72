"""What a function reaches that changes: cells, globals, defaults, arguments, tensors with attributes, generators."""

import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import torchremat
from regions.comparing import leaf
from regions.worlds import Programs, assert_agrees, assert_agrees_in_all, script
from torchremat.errors import CheckpointError, MutationError

program = Programs()

# ------------------------------------------------------------------------------------------------- cells and globals


@program
def a_loop_over_layers(run):
    layers, h = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), leaf(4, 4)
    x = h
    for layer in layers:
        h = run(lambda t: torch.tanh(layer(t)), h)  # noqa: B023
    loss = h.sum()
    loss.backward()
    return layers, x, loss


@program
def a_loop_at_the_top_of_a_script(run):
    source = """
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        x = h = torch.randn(4, 4, requires_grad=True)
        for layer in layers:
            h = run(lambda t: torch.tanh(layer(t)), h)
        loss = h.sum()
        loss.backward()
    """
    return script(source, run)


@program
def a_sparse_tensor_in_a_cell(run):
    adjacency, x = torch.eye(4).to_sparse(), leaf(4, 4)
    loss = run(lambda t: torch.sparse.mm(adjacency, t).sin(), x).sum()
    loss.backward()
    return x, loss


@program
def a_loop_over_numbers(run):
    x, total = leaf(4, 4), 0
    for step in range(1, 4):
        total = total + run(lambda t: (t * step).sin() * t, x).sum()  # noqa: B023
    total.backward()
    return x, total


@program
def functions_of_a_comprehension(run):
    # All of them see the last layer, in forward and recompute alike.
    layers, x = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), leaf(4, 4)
    functions = [lambda t: torch.tanh(layer(t)) for layer in layers]  # noqa: B023
    h = x
    for function in functions:
        h = run(function, h)
    loss = h.sum()
    loss.backward()
    return layers, functions, x, loss


@program
def a_mask_that_is_rebound(run):
    x, mask = leaf(4, 8), torch.ones(4, 8)
    y = run(lambda t: (t * mask).sin(), x)
    mask = torch.zeros(4, 8)
    loss = y.sum()
    loss.backward()
    return x, mask, loss


@program
def a_mask_of_a_script(run):
    source = """
        x, total = torch.randn(4, 8, requires_grad=True), 0
        def block(t):
            return (t * mask).sin()
        for step in range(3):
            mask = (torch.rand(4, 8) > 0.5).float()
            total = total + run(block, x).sum()
        total.backward()
    """
    return script(source, run)


@program
def configuration_and_counter_as_globals(run):
    source = """
        CONFIG, seen, steps = {"scale": 2.0}, [], 0
        linear = nn.Linear(4, 4)
        x = torch.randn(4, 4, requires_grad=True)
        def helper(t):
            return t * CONFIG["scale"] * len(seen)
        def block(t):
            global steps
            steps += 1
            seen.append(steps)
            return torch.tanh(helper(linear(t)) * steps)
        loss = run(block, run(block, x)).sum()
        CONFIG["scale"] = 5.0
        loss = loss + run(block, x).sum()
        CONFIG = {"scale": 0.0}
        loss.backward()
    """
    return script(source, run)


@program
def a_helper_that_is_defined_again(run):
    source = """
        x = torch.randn(4, 4, requires_grad=True)
        def activation(t):
            return t.sin() * t
        def block(t):
            return activation(t) * 2
        y = run(block, x)
        def activation(t):
            return t.exp() * t
        loss = (y + run(block, x)).sum()
        loss.backward()
    """
    return script(source, run)


@program
def a_loop_of_nested_regions_in_a_script(run):
    source = """
        layers = [nn.Linear(4, 4) for _ in range(4)]
        x = h = torch.randn(4, 4, requires_grad=True)
        for first, second in zip(layers[::2], layers[1::2]):
            def pair(t):
                return run(lambda u: torch.tanh(second(u)), run(lambda u: torch.tanh(first(u)), t))
            h = run(pair, h)
        loss = h.sum()
        loss.backward()
    """
    return script(source, run)


@program
def cells_of_cells(run):
    x, scale, total = leaf(4, 4), 1.0, 0

    def inner(t):
        return t * scale

    def middle(t):
        return inner(t).sin()

    def outer(t):
        return middle(t) * t

    for value in (1.0, 2.0, 3.0):
        scale = value
        total = total + run(outer, x).sum()
    old = inner

    def inner(t):
        return t.exp()

    total.backward()
    return x, total, old, outer, scale


@program
def a_counter_in_a_cell(run):
    x, steps = leaf(4, 4), 0

    def block(t):
        nonlocal steps
        steps += 1
        return (t * steps).sin() * t

    loss = run(block, run(block, x)).sum()
    steps = 100
    loss.backward()
    return x, loss, block


@program
def a_cell_that_is_deleted(run):
    x, gain = leaf(4, 4), 2.0
    y = run(lambda t: (t * gain).sin(), x)  # noqa: F821
    del gain
    loss = y.sum()
    loss.backward()
    return x, loss


@program
def functions_in_an_object(run):
    x = leaf(4, 4)
    gain = 2.0
    functions = SimpleNamespace(first=lambda t: t.sin() * gain, rest=[lambda t: t.exp() * gain])

    def block(t):
        return functions.first(t) * functions.rest[0](t)

    loss = run(block, x).sum()
    gain = 5.0
    functions.rest[0] = torch.cos
    loss = loss + run(block, x).sum()
    functions.first = None
    loss.backward()
    return x, functions, loss, gain


@program
def defaults_that_change(run):
    x = leaf(4, 4)

    def block(t, scale=2.0, *, seen=[]):  # noqa: B006
        seen.append(scale)
        return (t * scale * len(seen)).sin() * t

    loss = run(block, x).sum()
    block.__defaults__ = (3.0,)
    loss = loss + run(block, x).sum()
    block.__defaults__, block.__kwdefaults__ = (4.0,), {"seen": [1, 2, 3]}
    loss.backward()
    return x, block, loss


@program
def a_layer_as_a_default(run):
    layers, h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), leaf(4, 4)
    x = h
    for layer in layers:
        h = run(lambda t, layer=layer: torch.tanh(layer(t)), h)
    layers[0].requires_grad_(False)
    loss = h.sum()
    loss.backward()
    return layers, x, loss


@program
def partials(run):
    x, options, gain = leaf(4, 4), {"scale": 2.0}, 1.0

    def block(t, seen, options):
        seen.append(gain)
        return (t * options["scale"] * sum(seen)).sin() * t

    bound = functools.partial(block, seen=[], options=options)
    loss = run(bound, x).sum()
    options["scale"], gain = 3.0, 2.0
    loss = loss + run(bound, x).sum()
    bound.keywords["options"] = {"scale": 0.0}
    loss.backward()
    return x, bound, options, gain, loss


@program
def attributes_of_a_function(run):
    x = leaf(4, 4)

    def counted(function):
        @functools.wraps(function)
        def call(t):
            call.calls += 1
            return function(t) * call.calls

        call.calls = 0
        return call

    @counted
    def block(t):
        return t.sin() * t

    loss = run(block, run(block, x)).sum()
    block.calls = 7
    loss.backward()
    return x, block, loss


@program
def a_learning_rate_that_the_forward_reads(run):
    optimizer, x = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5), leaf(4, 4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def inner(t):
        optimizer.param_groups[0]["lr"] *= 0.5
        return torch.tanh(t * optimizer.param_groups[0]["lr"] * schedule.last_epoch.bit_length()) * t

    loss = run(inner, x).sum()
    optimizer.param_groups[0]["lr"], schedule.last_epoch = 0.1, 7
    loss.backward()
    return optimizer.param_groups[0]["lr"], x, loss


@program
def a_method_of_a_plain_object(run):
    class Trainer:
        def __init__(self):
            self.linear, self.step, self.log, self.best = nn.Linear(4, 4), 0, {}, None

        def forward(self, t):
            self.step += 1
            y = torch.tanh(self.linear(t) * self.step)
            self.log[self.step] = y.detach().mean()
            self.best = min(self.step, self.best or 10)
            return y

    trainer, x = Trainer(), leaf(4, 4)
    loss = run(trainer.forward, run(trainer.forward, x)).sum()
    trainer.step = 0
    loss.backward()
    return trainer, x, loss


@program
def a_callable_object(run):
    class Schedule:
        def __init__(self):
            self.rates, self.linear = iter_of(3), nn.Linear(4, 4)

        def __call__(self, t):
            return torch.tanh(self.linear(t) * self.rates.pop(0))

    def iter_of(count):
        return [1.0 / (step + 1) for step in range(count)]

    schedule, x = Schedule(), leaf(4, 4)
    loss = run(schedule, run(schedule, x)).sum()
    schedule.rates.clear()
    loss.backward()
    return schedule, x, loss


@program
def class_attributes(run):
    class Block(nn.Module):
        gain, calls = 1.0, 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, t):
            type(self).calls += 1
            return torch.tanh(self.linear(t) * self.gain * self.calls)

    block, x = Block(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    Block.gain = 3.0
    loss.backward()
    return block, Block, x, loss


# What `functools.cache` holds is out of reach, and a policy compares the operators: docs/limits.md says so.
@program(raises=CheckpointError)
def a_cached_function(run):
    source = """
        import functools
        x = torch.randn(4, 4, requires_grad=True)
        @functools.cache
        def table(n):
            return torch.arange(n * n).reshape(n, n) / n
        def block(t):
            return (t * table(len(t))).sin()
        loss = run(block, run(block, x)).sum()
        loss.backward()
        del table
    """
    return script(source, run)


@program(raises=MutationError)
def a_tensor_in_a_cell_that_is_written(run):
    # A sum saves neither of its terms, so plain autograd does not mind; it is given back, or an error.
    x, bias = leaf(4, 4), torch.ones(4)
    y = run(lambda t: (t + bias).sin() * t, x)
    bias.mul_(3)
    loss = y.sum()
    loss.backward()
    return x, bias, loss


@program
def a_tensor_in_a_cell_that_autograd_has_saved(run):
    # Plain autograd refuses, so this has to, a leaf without grad or not.
    x, mask = leaf(4, 4), torch.ones(4, 4)
    y = run(lambda t: (t * mask).sin(), x)
    mask.zero_()
    y.sum().backward()


@program
def a_leaf_in_a_cell_that_autograd_has_saved(run):
    x, weight = leaf(4, 4), leaf(4, 4)
    y = run(lambda t: (t @ weight).sin(), x)
    with torch.no_grad():
        weight.mul_(2)
    y.sum().backward()


# -------------------------------------------------------------------------------------------------------- arguments


@program
def attributes_of_tensors(run):
    x = leaf(4, 4)
    x.scale = 3.0

    def block(t):
        return (t * getattr(t, "scale", 1.0)).sin() * t

    one = run(block, x)
    x.scale = 5.0
    two = run(block, x)
    del x.scale
    h = x * 2
    h.scale = 2.0
    three = run(block, h)
    h.scale = 7.0
    loss = (one + two * three).sum()
    loss.backward()
    return x, h, loss


@program
def attributes_of_tensors_in_containers(run):
    x = leaf(4, 4)
    pair = {"a": [x * 2], "b": (x * 3,)}
    pair["a"][0].mask, pair["b"][0].names = torch.ones(4, 4), ["one"]

    def block(pair):
        a, b = pair["a"][0], pair["b"][0]
        return (a * a.mask).sin() * (b * len(b.names)).cos()

    def outer(pair):
        return run(block, pair) * 2

    loss = run(outer, pair).sum()
    pair["a"][0].mask = torch.zeros(4, 4)
    pair["b"][0].names.append("two")
    loss.backward()
    return x, pair, loss


@program
def attributes_of_parameters(run):
    # As tensor parallelism and sharding put them there.
    class Sharded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.weight.partition_dim, self.weight.uses = 0, []

        def forward(self, x):
            self.weight.uses.append(self.weight.partition_dim)
            w = self.weight.t() if self.weight.partition_dim else self.weight
            return torch.tanh(x @ w) * len(self.weight.uses)

    block, x = Sharded(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    block.weight.partition_dim = 1
    loss.backward()
    return block, x, loss


@program
def attributes_that_the_forward_sets(run):
    x = leaf(4, 4)

    def block(t):
        t.visits = getattr(t, "visits", 0) + 1
        return (t * t.visits).sin() * t

    loss = (run(block, x) * run(block, x)).sum()
    loss.backward()
    return x, loss


RULES = SimpleNamespace(doubles=False, calls=0)


class Ruled(torch.Tensor):
    """Multiplies by other numbers, as the rules of the moment are."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if RULES.doubles and function is torch.Tensor.mul:
            with torch._C.DisableTorchFunctionSubclass():
                return result * 2
        return result


@program
def a_subclass_under_rules_of_the_moment(run):
    RULES.doubles = True
    x = leaf(4, 4)
    h = x.as_subclass(Ruled) + 0

    def block(t):
        return (t * t).sin() * t

    def nested(t):
        return run(block, t) * 2

    one = run(block, h)
    two = run(nested, h)
    RULES.doubles = False
    loss = (one + two).sum()
    loss.backward()
    return x, loss


@program
def a_subclass_in_containers(run):
    RULES.doubles = False
    x = leaf(4, 4)
    inputs = {"h": [(x * 1).as_subclass(Ruled)]}
    inputs["h"][0].scale = 2.0

    def block(inputs):
        (h,) = inputs["h"]
        return (h * h).sin() * h.scale

    one = run(block, inputs)
    RULES.doubles = True
    two = run(block, inputs)
    inputs["h"][0].scale = 0.0
    RULES.doubles = False
    loss = (one * two).sum()
    loss.backward()
    return x, inputs, loss


@program
def a_subclass_that_carries_its_rules(run):
    class Scaled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            result = super().__torch_function__(function, types, args, kwargs or {})
            first = args[0] if args else None
            if isinstance(result, Scaled) and isinstance(first, Scaled):
                result.factor = getattr(first, "factor", 1.0)
            return result

    x = leaf(4, 4)
    h = (x * 1).as_subclass(Scaled)
    h.factor = 2.0

    def block(t):
        u = t.sin()
        return u * u.factor * t

    loss = run(block, h).sum()
    h.factor = 0.5
    loss.backward()
    return x, h, loss


@program
def a_function_mode_with_state(run):
    class Scaling(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.gain, self.calls = 2.0, 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            return result * self.gain if function is torch.tanh else result

    mode, linear, x = Scaling(), nn.Linear(4, 4), leaf(4, 4)
    with mode:
        one = run(lambda t: torch.tanh(linear(t)), x)
        mode.gain = 3.0
        two = run(lambda t: torch.tanh(linear(t)), x)
    mode.gain = 1.0
    loss = (one * two).sum()
    loss.backward()
    return mode, linear, x, loss


@program
def arguments_that_are_changed_afterwards(run):
    @dataclass
    class Batch:
        lengths: list
        scale: float = 1.0
        extra: dict = field(default_factory=dict)

    x, batch, names, options = leaf(4, 4), Batch([1, 2]), ["a"], {"power": 2}

    def block(t, batch, names, *, options):
        batch.extra.setdefault("seen", []).append(len(names))
        return (t * batch.scale * sum(batch.lengths)).tanh() ** options["power"] * len(batch.extra["seen"])

    one = run(block, x, batch, names, options=options)
    batch.lengths.append(3)
    batch.scale = 0.5
    names.append("b")
    options["power"] = 3
    two = run(block, x, batch, names, options=options)
    batch.lengths, batch.extra = [], {}
    options.clear()
    loss = (one * two).sum()
    loss.backward()
    return x, batch, names, options, loss


@program
def a_list_of_tensors_that_is_consumed(run):
    x = leaf(4, 4)
    parts = [x * 1, x * 2, x * 3]

    def block(parts):
        total = parts.pop()
        while parts:
            total = (total * parts.pop()).sin()
        return total

    loss = run(block, parts).sum()
    loss.backward()
    return x, parts, loss


@program
def a_cache_object_as_an_argument(run):
    class Cache:
        def __init__(self):
            self.keys = []

        def update(self, key):
            self.keys.append(key)
            return torch.cat(self.keys)

    layers, x, cache = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), leaf(4, 4), Cache()

    def block(t, layer, cache):
        return (t @ cache.update(layer(t)).t()).softmax(-1)[:, :4] * t

    h = x
    for layer in layers:
        h = run(block, h, layer, cache)
    cache.keys = cache.keys[:1]
    loss = h.sum()
    loss.backward()
    return layers, x, cache, loss


# ------------------------------------------------------------------------------------------------------- generators

NOISY = """
    generator = torch.Generator()
    generator.manual_seed(3)
    def noise(t):
        return t * torch.rand(t.shape, generator=generator)
    class Noisy(nn.Module):
        held = torch.Generator()
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
        def helper(self, t):
            return noise(t)
        def forward(self, t):
            return torch.tanh({draw})
    Noisy.held.manual_seed(4)
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = Noisy()
        def forward(self, t):
            return self.child(t) * self.child(t)
    block, x = {block}, torch.randn(4, 4, requires_grad=True)
    loss = run(block, run(block, x)).sum()
    generator.manual_seed(5)
    {between}
    loss.backward()
"""


def noisy(draw, block="Noisy()", between="pass"):
    source = NOISY.format(draw=draw, block=block, between=between)
    return lambda run: script(source, run)


for name, one in {
    "a_generator_in_a_forward": noisy("self.linear(t) * torch.rand(4, generator=generator)"),
    "a_generator_in_a_helper": noisy("noise(self.linear(t))"),
    "a_generator_in_a_method": noisy("self.helper(self.linear(t))"),
    "a_generator_in_a_child": noisy("noise(self.linear(t))", "Parent()"),
    "a_generator_of_the_class": noisy(
        "self.linear(t) * torch.rand(4, generator=self.held)", between="Noisy.held.manual_seed(7)"
    ),
    "a_generator_of_the_class_of_a_child": noisy("self.linear(t) * torch.rand(4, generator=Noisy.held)", "Parent()"),
    "a_generator_in_a_nested_region": noisy("run(noise, self.linear(t))"),
    "a_generator_in_a_lambda": noisy("(lambda u: noise(u))(self.linear(t))"),
    "a_generator_in_a_sequence": noisy("noise(self.linear(t))", "nn.Sequential(Noisy(), nn.Tanh(), Noisy())"),
    "a_generator_in_a_comprehension": noisy("sum([noise(self.linear(t)) for _ in range(2)])"),
}.items():
    one.__name__ = name
    program(one)


@program
def a_generator_in_a_dict_of_globals(run):
    source = """
        STATE = {"rng": torch.Generator(), "more": [torch.Generator()]}
        STATE["rng"].manual_seed(1)
        STATE["more"][0].manual_seed(2)
        x = torch.randn(4, 4, requires_grad=True)
        class Noisy(nn.Module):
            def forward(self, t):
                drawn = torch.rand(4, generator=STATE["rng"])
                return (t * drawn).sin() * torch.rand(4, generator=STATE["more"][0])
        block = Noisy()
        loss = run(block, run(block, x)).sum()
        STATE["rng"].manual_seed(9)
        loss.backward()
    """
    return script(source, run)


@program
def a_generator_in_an_object(run):
    class Noisy(nn.Module):
        def __init__(self, source):
            super().__init__()
            self.source = source

        def forward(self, t):
            return (t * torch.rand(4, generator=self.source.rngs[0])).sin() * t

    source = SimpleNamespace(rngs=[torch.Generator().manual_seed(1)])
    block, x = Noisy(source), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    torch.rand(3, generator=source.rngs[0])
    loss = loss + run(block, x).sum()
    source.rngs[0] = torch.Generator().manual_seed(3)
    loss.backward()
    return block, x, source, loss


@program
def a_generator_that_is_made_in_the_first_call(run):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.rng = None

        def forward(self, t):
            if self.rng is None:
                self.rng = torch.Generator().manual_seed(3)
            return (t * torch.rand(4, generator=self.rng)).sin() * t

    block, x = Noisy(), leaf(4, 4)
    loss = run(block, run(block, x)).sum()
    block.rng.manual_seed(9)
    loss.backward()
    return block, x, loss


@program
def a_batch_norm_behind_a_global_name(run):
    source = """
        norm = nn.BatchNorm1d(4)
        def normed(t):
            return norm(t) * t
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)
            def forward(self, t):
                return torch.tanh(run(normed, self.linear(t)) + normed(t))
        block, x = Block(), torch.randn(8, 4, requires_grad=True)
        loss = run(block, run(block, x)).sum()
        loss.backward()
    """
    return script(source, run)


@program
def a_seed_that_is_set_inside(run):
    linear, x = nn.Linear(4, 4), leaf(4, 4)

    def block(t):
        torch.manual_seed(11)
        return torch.tanh(linear(t)) * torch.rand(4)

    loss = (run(block, x) * run(lambda t: block(t) * torch.rand(4), x)).sum()
    torch.manual_seed(12)
    loss.backward()
    return linear, x, loss


@program
def a_decorated_method(run):
    # As a model declares its own blocks to be regions; the way of calling is beside the point.
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.gain, self.seen = nn.Linear(4, 4), 1.0, []

        def block(self, t, scale):
            self.seen.append(scale)
            return torch.tanh(self.linear(t) * scale * self.gain * len(self.seen))

        def forward(self, t):
            for scale in (1.0, 2.0, 3.0):
                self.gain = scale + 1
                t = run(self.block, t, scale)
            self.gain = 0.0
            return t

    model, x = Model(), leaf(4, 4)
    loss = model(x).sum()
    loss.backward()
    return model, x, loss


@pytest.mark.parametrize(("function", "ways", "options"), program.cases())
def test_operator_selection(function, ways, options):
    assert_agrees_in_all(function, ways, **options)


def test_a_function_that_is_made_a_region_once_sees_the_cells_of_each_call():
    def made(run):
        x, scale, total = leaf(4, 4), 1.0, 0
        block = run(lambda t: (t * scale).sin() * t)
        for value in (1.0, 2.0, 3.0):
            scale = value
            total = total + block(x).sum()
        total.backward()
        return x, total

    def program(run):
        region = (lambda function: function) if run.__name__ == "_plain" else torchremat.checkpointed
        return made(region)

    assert_agrees(program, "checkpoint")
