"""The region engine end to end: gradients against the plain run, recomputes counted, storages watched."""

import copy
import gc
import pickle
import threading
from weakref import ref

import pytest
import torch
from torch import nn

import torchremat
from logs import Count, Log
from probes.regions import CallDecision, Region, RegionPlace, Scope, Settings, set_forward


class Block(nn.Module):
    """LayerNorm, linear, BatchNorm, ReLU, dropout; counts its forwards."""

    def __init__(self, width=16):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.batch = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)
        self.forwards = Count()

    def forward(self, x, scale=1.0):
        self.forwards.up()
        return x + self.drop(torch.relu(self.batch(self.linear(self.norm(x))))) * scale


class Net(nn.Module):
    """Blocks in a loop, with glue before the fifth."""

    def __init__(self, blocks=6):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == 3:
                x = x * 1.5
        return self.head(x)


def made(cls=Net):
    torch.manual_seed(0)
    return cls()


def run(model, x=None, *, steps=1):
    """Gradients, buffers and the generator's state after some accumulated steps."""
    torch.manual_seed(1)
    x = torch.linspace(-1, 1, 128).view(8, 16) if x is None else x
    for _ in range(steps):
        model(x).pow(2).mean().backward()
    return (
        [parameter.grad for parameter in model.parameters()]
        + [buffer.clone() for buffer in model.buffers()]
        + [torch.get_rng_state()]
    )


def same(found, expected):
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def forwards(model):
    return [layer.forwards.value for layer in model.layers]


@pytest.mark.parametrize("steps", [1, 3])
def test_wrapped_blocks_train_as_plain_ones(steps):
    model = torchremat.wrap(made(), "layers.*")

    assert same(run(model, steps=steps), run(made(), steps=steps))
    assert forwards(model) == [2 * steps] * 6


def nested(model, places):
    """Put runs on a model: each place is (first, last), outermost first."""
    made_places = [(first, last, RegionPlace(last - first + 1, f"{first}..{last}")) for first, last in places]
    choices = {}
    for index in range(len(model.layers)):
        around = tuple(place for first, last, place in made_places if first <= index <= last)
        choices[f"layers.{index}", 0] = CallDecision(around)
    set_forward(model, "", None, Scope(choices, Settings()))
    for index, layer in enumerate(model.layers):
        set_forward(layer, f"layers.{index}", None)
    return model


def test_nested_runs_recompute_as_their_tree_says():
    model = nested(made(), [(0, 5), (1, 3), (2, 3)])

    assert same(run(model), run(made()))
    # All of them once for the outermost region; 1 again for the middle one, where 2 and 3 trail and are left to the
    # innermost, which runs both.
    assert forwards(model) == [2, 3, 3, 3, 2, 2]


def test_a_run_holds_no_boundary_that_it_links():
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Plain() for _ in range(4))
            self.boundaries = []

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
                self.boundaries.append(ref(x.untyped_storage()))
            return x.sum()

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x):
            return torch.tanh(self.linear(x))

    model = nested(Chain(), [(0, 3)])
    loss = model(torch.randn(8, 16))
    alive = [boundary() is not None for boundary in model.boundaries]
    loss.backward()

    # All are recomputed from the input of layer 0. A wrapped forward per layer would hold the first three.
    assert alive == [False, False, False, False]


def test_an_in_place_change_between_two_calls_breaks_the_link():
    class Glue(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(2)
            )

        def forward(self, x):
            x = self.layers[0](x)
            x.add_(1)
            return self.layers[1](x)

    expected = run(made(Glue))

    assert same(run(nested(made(Glue), [(0, 1)])), expected)


def test_tensors_in_keywords_and_containers_are_inputs():
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
    calls = Log()

    def function(a, pair, *, named):
        calls.append(1)
        return torch.tanh(a @ pair[0]) * named["w"].sigmoid()

    torchremat.checkpoint(function, weights[0], (weights[1], "text"), named={"w": weights[2]}).sum().backward()
    found = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    function(weights[0], (weights[1], "text"), named={"w": weights[2]}).sum().backward()

    assert same(found, [weight.grad for weight in weights])
    assert len(calls) == 3


@pytest.mark.parametrize("where", ["args[0]", "kwargs['mask']", "args[1][0]"])
def test_an_input_that_was_changed_is_named(where):
    x, y, mask = (torch.ones(3) for _ in range(3))
    w = torch.ones(3, requires_grad=True)
    loss = torchremat.checkpoint(lambda x, y, mask: (x * y[0] * mask * w).sigmoid().sum(), x, [y], mask=mask)
    {"args[0]": x, "args[1][0]": y, "kwargs['mask']": mask}[where].add_(1)

    with pytest.raises(torchremat.MutationError) as raised:
        loss.backward()

    assert f"its input {where} was changed in place" in str(raised.value)


def test_a_step_of_the_optimizer_before_backward_is_an_error():
    model = torchremat.wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), "0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(torch.randn(2, 4, requires_grad=True)).sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    with pytest.raises(torchremat.MutationError, match="weight"):
        loss.backward()


def test_without_grad_a_region_is_a_plain_call():
    model = torchremat.wrap(made(), "layers.*").eval()
    with torch.no_grad():
        expected = made().eval()(torch.ones(8, 16))
        assert torch.equal(model(torch.ones(8, 16)), expected)
    with torch.inference_mode():
        assert torch.equal(model(torch.ones(8, 16)), expected)
    assert forwards(model) == [2] * 6


def test_retained_graphs_recompute_for_each_backward():
    model = torchremat.wrap(made(), "layers.*")
    torch.manual_seed(1)
    loss = model(torch.linspace(-1, 1, 128).view(8, 16)).pow(2).mean()

    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in model.parameters()]
    loss.backward()

    assert same([parameter.grad for parameter in model.parameters()], [2 * grad for grad in once])
    assert forwards(model) == [3] * 6


def test_double_backward():
    def gradient_of_gradient(call):
        x = torch.linspace(-1, 1, 8, requires_grad=True)
        (first,) = torch.autograd.grad(call(lambda t: (t.tanh() * t).sum(), x), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    assert torch.equal(gradient_of_gradient(torchremat.checkpoint), gradient_of_gradient(lambda f, x: f(x)))


def test_a_node_may_read_its_saved_tensors_twice_for_one_recompute():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x, x.exp())
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[1] + 0 * ctx.saved_tensors[0]

    calls = Log()
    x = torch.ones(3, requires_grad=True)

    def function(t):
        calls.append(1)
        return Twice.apply(t * 1)

    torchremat.checkpoint(function, x).sum().backward()

    assert torch.equal(x.grad, x.detach().exp())
    assert len(calls) == 2


def test_backward_inside_a_region():
    w = torch.linspace(0.1, 1, 4, requires_grad=True)

    def function(t):
        inner = t.detach().requires_grad_()
        (slope,) = torch.autograd.grad((inner.sin() * w).sum(), inner)
        return (t * slope * w.exp()).sum()

    x = torch.ones(4, requires_grad=True)
    torchremat.checkpoint(function, x).backward()
    found, x.grad, w_found, w.grad = x.grad, None, w.grad, None
    function(x).backward()

    assert torch.equal(found, x.grad)
    assert torch.equal(w_found, w.grad)


def test_one_recompute_serves_every_backward_of_a_session():
    calls = Log()
    x = torch.linspace(0.1, 1, 4, requires_grad=True)
    w = torch.linspace(1, 2, 4, requires_grad=True)

    def function(t):
        calls.append(1)
        return (t * w).exp().sum()

    with torchremat.session(passes=2):
        loss = torchremat.checkpoint(function, x)
        (for_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        (for_weight,) = torch.autograd.grad(loss, w)

    assert len(calls) == 2
    assert torch.equal(for_input, w * (x * w).exp())
    assert torch.equal(for_weight, x * (x * w).exp())


def test_a_session_recomputes_ahead_of_the_gradient():
    order = Log()
    x = torch.ones(3, requires_grad=True)

    def function(t):
        order.append("forward")
        return t.exp().sin()

    with torchremat.session() as session:
        loss = torchremat.checkpoint(function, x).sum()
        order.append("ahead")
        assert session.recompute() == 1
        order.append("backward")
        loss.backward()

    assert " ".join(order) == "forward ahead forward backward"


def test_a_dropped_graph_frees_its_inputs_and_regions():
    gc.disable()
    try:
        for failure in ("none", "forward", "backward"):
            x = torch.randn(64, 64, requires_grad=True) * 1
            storage = ref(x.untyped_storage())

            def function(t, failure=failure):
                if failure == "forward":
                    raise ValueError
                return torch.tanh(t @ t).exp()

            try:
                loss = torchremat.checkpoint(function, x).sum()
                if failure == "backward":
                    loss.register_hook(lambda grad: 1 / 0)
                    loss.backward()
            except (ValueError, ZeroDivisionError):
                pass
            x = loss = None
            assert storage() is None, failure
        assert not [thing for thing in gc.get_objects() if type(thing) is Region]
    finally:
        gc.enable()


def test_random_numbers_are_kept_only_where_they_were_drawn():
    drawing, plain = nn.Sequential(nn.Dropout(0.5)), nn.Sequential(nn.Tanh())
    regions = []
    for module in (drawing, plain):
        region = Region(Settings())
        region.call(module, (torch.ones(4, requires_grad=True),), {}, [module])
        regions.append(region)

    assert [sum(state.nbytes for state in region.calls[0].generators.values()) for region in regions] == [
        5056,
        0,
    ]


def test_autocast_is_seen_again():
    model = torchremat.wrap(made(), "layers.*")
    plain = made()
    results = []
    for one in (model, plain):
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(torch.ones(8, 16)).float().pow(2).mean()
        loss.backward()
        results.append([parameter.grad for parameter in one.parameters()])

    assert same(*results)


def test_gradient_scaler():
    results = []
    for model in (torchremat.wrap(made(), "layers.*"), made()):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(8, 16)).pow(2).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([parameter.detach() for parameter in model.parameters()])

    assert same(*results)


def test_a_cache_that_grows_is_seen_as_the_forward_saw_it():
    cache = []
    w = torch.ones(2, requires_grad=True)

    def function(x, cache):
        cache.append(x * w)
        return torch.stack(cache).exp().sum()

    torchremat.checkpoint(function, torch.ones(2), cache).backward()

    assert len(cache) == 1
    assert torch.equal(w.grad, torch.ones(2).exp())


def test_a_function_that_does_something_else_the_second_time_is_an_error():
    turns = iter([1, 2])

    def function(x):
        for _ in range(next(turns)):
            x = x.exp()
        return x.sum()

    x = torch.ones(3, requires_grad=True)
    loss = torchremat.checkpointed(function, early_stop=False)(x)

    with pytest.raises(torchremat.CheckpointError, match="trying to save more tensors during recomputation"):
        loss.backward()


def test_copies_and_pickles_run_their_own_weights():
    model = torchremat.wrap(made(), "layers.*")
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = run(made())

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()

    for other in others:
        assert same(run(other), expected)
        assert forwards(other) == [2] * 6


def test_unwrapping_leaves_nothing_behind():
    model = made()
    before = [dict(module.__dict__) for module in model.modules()]
    torchremat.wrap(model, "layers.*", every=2)

    assert list(model.state_dict()) == list(made().state_dict())
    assert [name for name, module in model.named_modules() if "forward" in module.__dict__] == [
        "layers.0",
        "layers.2",
        "layers.4",
    ]
    torchremat.unwrap(model)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_hooks_run_once():
    model = made()
    seen = Log()
    model.layers[0].register_forward_hook(lambda *_: seen.append("after"))
    model.layers[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    torchremat.wrap(model, "layers.*")

    run(model)

    assert seen == ["before", "after"]


def test_a_pattern_without_a_match_names_the_closest():
    with pytest.raises(torchremat.WrapError, match=r"no module is named 'layer.0'. Closest names: layers.0"):
        torchremat.wrap(made(), "layer.0")


def test_data_parallel_is_refused():
    model = torchremat.wrap(made(), "layers.*")

    with pytest.raises(torchremat.UnsupportedError, match="DataParallel"):
        model.layers[0]._replicate_for_data_parallel()


def test_regions_of_several_threads_do_not_meet():
    expected = run(made())
    model = torchremat.wrap(made(), "layers.*")
    x = torch.linspace(-1, 1, 128).view(8, 16)
    torch.manual_seed(1)
    loss = model(x).pow(2).mean()
    results = []

    def work():
        results.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 4
    assert all(same(grads, expected[: len(grads)]) for grads in results)


@pytest.mark.parametrize("option", [{"check": "all"}, {"preserve_rng": 1}, {"early_stop": None}])
def test_an_option_that_cannot_be_honoured_raises(option):
    with pytest.raises(torchremat.UnsupportedError, match=next(iter(option))):
        torchremat.checkpointed(torch.sin, **option)
