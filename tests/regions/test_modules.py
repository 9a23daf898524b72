"""What a recompute sees of the modules: parameters, buffers, training flags."""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel

from logs import Count
from probes.regions import Backups, Reaching, reach
from regions.comparing import equal, leaf, same
from torchremat import Host, MutationError, checkpoint, checkpointed, extend, wrap


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(x)).tanh()).exp()


class Averaged(nn.Module):
    """Has buffers that its forward writes, replaces and leaves alone."""

    def __init__(self, size=4):
        super().__init__()
        self.register_buffer("written", torch.zeros(size))
        self.register_buffer("replaced", torch.zeros(size))
        self.register_buffer("constant", torch.ones(size))
        self.register_buffer("absent", None)

    def forward(self, x):
        self.written.mul_(0.5).add_(x.detach().mean(0))
        self.replaced = self.replaced + 1
        return (x * self.constant).exp() * (1 + self.written.clone()) * self.replaced


_net = Net()


def by_global_name(x):
    return _net(x)


def reached(*roots):
    world = Reaching()
    reach(world, roots)
    return world


def modules_of(function, args=()):
    """The outermost modules that a call reaches."""
    modules = reached(function, *args).modules
    inner = {id(one) for module in modules for one in module.modules() if one is not module}
    return [one for one in modules if id(one) not in inner]


def test_modules_of_a_call_are_found():
    net, other, third = Net(), Net(), Net()

    class Runner:
        def __init__(self):
            self.net = net

        def run(self, x):
            return self.net(x)

        def __call__(self, x):
            return other(self.net(x))

    def inner(x):
        return third(x)

    found = {
        "module": (modules_of(net, (torch.ones(1),)), [net]),
        "method": (modules_of(net.forward), [net]),
        "closure": (modules_of(lambda x: net(x)), [net]),
        "list in closure": (modules_of(functools.partial(lambda nets, x: nets, [net])), [net]),
        "partial": (modules_of(functools.partial(net, 1)), [net]),
        "function in closure": (modules_of(lambda x: inner(x)), [third]),
        "global": (modules_of(by_global_name), [_net]),
        "argument": (modules_of(len, (1, net)), [net]),
        # Whatever has an object may call it, and so run its `__call__`.
        "attribute of self": (modules_of(Runner().run), [net, other]),
        "attribute of a callable": (modules_of(Runner()), [net, other]),
        "none": (modules_of(torch.sin, (torch.ones(1),)), []),
    }

    assert {name: list(map(id, ours)) for name, (ours, _) in found.items()} == {
        name: list(map(id, wanted)) for name, (_, wanted) in found.items()
    }


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("early_stop", [True, False])
def test_batch_norm_ends_as_after_one_forward(momentum, early_stop):
    net = Net()
    net.norm.momentum = momentum
    x = leaf(8, 4)
    plain = net.forward
    wrap(net, lambda name, module: module is net, early_stop=early_stop)

    for _ in range(3):
        before = int(net.norm.num_batches_tracked)
        net.norm.num_batches_tracked.zero_().add_(before)
        assert same(lambda: net(x), lambda: plain(x), [x], [net])
        assert net.norm.num_batches_tracked == before + 1


def test_batch_norm_in_nested_regions_and_microbatches():
    net = Net()
    batches = torch.randn(3, 8, 4)

    def run(call):
        return sum(call(lambda x: call(net, x.sin()), batch).sum() for batch in batches)

    assert same(lambda: run(checkpoint), lambda: run(lambda f, x: f(x)), [], [net])
    assert net.norm.num_batches_tracked == 3


def test_buffers_written_and_replaced():
    net = Averaged()
    x = leaf(3, 4)

    assert same(lambda: checkpoint(net, x), lambda: net(x), [x], [net])
    assert net.replaced.tolist() == [1.0] * 4


def test_what_a_second_forward_does_to_buffers_does_not_matter():
    net = Averaged()
    x = leaf(3, 4)
    first = checkpoint(net, x).sum()
    checkpoint(net, x * 3).sum()
    first.backward()
    ours = x.grad.clone()

    net = Averaged()

    assert torch.equal(ours, torch.autograd.grad(net(x).sum(), x)[0])


class Codes(nn.Module):
    """A codebook that each forward moves through `.data`, as vector quantizers do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.eye(4))

    def forward(self, x):
        found = (x @ self.codes.clone()).tanh()
        self.codes.data.lerp_(found.detach(), 0.5)
        return found


# The second layer of a residual quantizer is left out at random. Its codebook had not changed in the first forward of
# the region around both, and a write that moves no version was not seen: the gradients were wrong without an error.
def test_a_buffer_that_a_later_forward_writes_through_data():
    region, plain, x = nn.ModuleList([Codes(), Codes()]), nn.ModuleList([Codes(), Codes()]), leaf(4, 4)

    def forward(layers, count):
        return nn.Sequential(*layers[:count])(x)

    for count in (1, 2, 2):
        ours = torch.autograd.grad(checkpoint(forward, region, count).sum(), x)
        assert equal(ours, torch.autograd.grad(forward(plain, count).sum(), x))
    assert equal([*region.buffers()], [*plain.buffers()])


def test_only_the_buffers_that_are_written_are_copied():
    net = Averaged(10_000)
    checkpoint(net, leaf(3, 10_000))

    backups = Backups(reached(net))

    # 10,000 numbers of 4 bytes each. What is replaced is there as before.
    assert [(one.name, one.before.nbytes) for one in backups._all] == [("written", 40_000)]


class Shifted(Net):
    """Reads one large buffer, and has another that it does not read."""

    def __init__(self):
        super().__init__()
        self.norm.register_buffer("large", torch.zeros(100_000))
        self.norm.register_buffer("unread", torch.zeros(100_000))

    def forward(self, x):
        return super().forward(x) * self.norm.large.exp().mean()


@pytest.mark.parametrize("name", ["first.weight", "first.bias", "norm.weight", "norm.large"])
def test_a_write_between_forward_and_backward_is_an_error_that_names_it(name):
    model = nn.ModuleDict({"body": Shifted().eval()})
    wrap(model, "body")
    y = model["body"](leaf(8, 4)).sum()
    with torch.no_grad():
        model["body"].get_parameter(name).mul_(2) if "large" not in name else model["body"].get_buffer(name).mul_(2)

    with pytest.raises(MutationError, match=rf"region body: its parameter or buffer `body\.{name}` .* in place"):
        y.backward()


@pytest.mark.parametrize("name", ["norm.running_mean", "norm.running_var", "norm.unread"])
def test_a_write_in_between_to_a_small_buffer_or_to_what_is_not_read_does_not_matter(name):
    x = leaf(8, 4)

    def run(call, writes):
        torch.manual_seed(0)
        net = Shifted().eval()
        y = call(net, x).sum()
        if writes:
            net.get_buffer(name).add_(1)
        return torch.autograd.grad(y, [x, *net.parameters()]), net.get_buffer(name)

    ours, written = run(checkpoint, True)
    plain, before = run(lambda f, x: f(x), False)

    assert all(map(torch.equal, ours, plain))
    assert torch.equal(written, before + 1)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_an_optimizer_step_before_backward_is_an_error(kind, options):
    net = Net()
    optimizer = kind(net.parameters(), lr=0.1, **options)
    net(leaf(8, 4)).sum().backward()
    y = checkpoint(net, leaf(8, 4)).sum()
    optimizer.step()

    with pytest.raises(MutationError, match=r"optimizer\.step"):
        y.backward()


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_a_step_over_a_parameter_in_a_closure_is_an_error(options):
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1, **options)
    counter = torch.zeros(())

    def body(x):
        counter.add_(1)
        return (x @ weight).exp().sin()

    weight.grad = torch.ones(4, 4)
    first, second = (checkpoint(body, leaf(8, 4)).sum() for _ in range(2))
    second.backward()
    optimizer.step()

    with pytest.raises(MutationError, match="its tensor `weight` was changed in place"):
        first.backward()


def test_an_optimizer_that_steps_inside_backward_is_none():
    def train(call):
        torch.manual_seed(0)
        net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
        for parameter in net.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        x = torch.randn(2, 4)
        for _ in range(2):
            h = x
            for block in net:
                h = call(block, h)
            h.sum().backward()
        return list(net.parameters())

    assert all(map(torch.equal, train(checkpoint), train(lambda f, x: f(x))))


def test_replaced_parameters_are_those_of_the_forward():
    net = Net().eval()
    x = leaf(8, 4)
    others = {name: leaf(*value.shape) for name, value in net.named_parameters()}

    def run(call):
        # When backward comes, the module has its own parameters again.
        return functional_call(call, others, (x,))

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return checkpoint(self.net, x)

    others = {f"net.{name}": value for name, value in others.items()}
    leaves = [x, *others.values()]
    plain = nn.Module()
    plain.net = net
    plain.forward = lambda x: net(x)

    assert same(lambda: run(Region()), lambda: run(plain), leaves)


def test_a_new_parameter_is_not_taken_for_the_old_one():
    net = nn.Linear(4, 4)
    x = leaf(2, 4)
    y = checkpoint(lambda x: net(x).exp(), x).sum()
    expected = torch.autograd.grad(net(x).exp().sum(), x)[0]
    new = nn.Parameter(torch.zeros(4, 4))
    net.weight = new

    y.backward()

    assert torch.equal(x.grad, expected)
    assert net.weight is new


def test_a_flip_of_training_in_between_does_not_matter():
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    x = leaf(8, 4)

    def run(call):
        y = call(net, x)
        net.eval()
        return y

    def trained(call):
        net.train()
        return run(call)

    assert same(lambda: trained(checkpoint), lambda: trained(lambda f, x: f(x)), [x], [net])
    assert not net.training and not net[1].training


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_weights_that_a_hook_computes(norm):
    layer = getattr(nn.utils, norm)(nn.Linear(4, 4))
    x = leaf(2, 4)

    def run():
        # The hook of the second call replaces the weight before the first is recomputed.
        return layer(x).exp().sum() + layer(x * 2).exp().sum()

    state = {name: value.clone() for name, value in layer.state_dict().items()}
    run().backward()
    plain = [x.grad.clone(), *(parameter.grad.clone() for parameter in layer.parameters())]
    layer.load_state_dict(state)
    layer.zero_grad()
    x.grad = None
    wrap(layer, nn.Linear)
    run().backward()

    assert all(map(torch.equal, [x.grad, *(parameter.grad for parameter in layer.parameters())], plain))


@pytest.mark.parametrize("kind", [parametrizations.weight_norm, spectral_norm, parametrizations.orthogonal])
def test_parametrizations(kind):
    net = nn.Sequential(kind(nn.Linear(4, 4)), nn.Tanh())
    x = leaf(2, 4)

    assert same(lambda: checkpoint(net, x), lambda: net(x), [x], [net])


def test_parametrizations_in_a_cache():
    net = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh())
    x = leaf(2, 4)

    with parametrize.cached():
        net(x)
        y = checkpoint(net, x).sum()

    # The forward found the weight in the cache, and so does the recompute, which ran without one.
    y.backward()

    assert torch.equal(x.grad, torch.autograd.grad(net(x).sum(), x)[0])


def test_lazy_modules():
    net = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    x = leaf(2, 4)
    checkpoint(net, x).sum().backward()
    first = x.grad.clone()

    assert torch.equal(first, torch.autograd.grad(net(x).sum(), x)[0])


def test_shared_parameters():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    x = leaf(2, 4)

    assert same(lambda: checkpoint(net, x), lambda: net(x), [x], [net])


def test_a_script_module():
    # Its interpreter turns the end of a recompute into an error of its own.
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        net = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    x = leaf(2, 4)

    assert same(lambda: checkpoint(net, x), lambda: net(x), [x], [net])


# ---------------------------------------------------------------------------------------- buffers, the less usual kinds


class Codebook(nn.Module):
    """Has a buffer that follows what the module sees, when it is told so."""

    def __init__(self, size, way="lerp_"):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.way = way

    def forward(self, x, follows=True):
        if follows:
            one = x.detach().mean().expand(self.mean.shape)
            if self.way == "lerp_":
                self.mean.lerp_(one, 0.5)
            elif self.way == "copy_":
                self.mean.copy_(self.mean * 0.5 + one * 0.5)
            else:
                self.mean = self.mean * 0.5 + one * 0.5
        return (x.exp() * (1 + self.mean[:4].clone())).sin()


def several(call, make, x, follows):
    """Several forwards before one backward; return the gradient, the buffers and how often the module has run."""
    torch.manual_seed(0)
    module = make()
    counted = Count()
    module.register_forward_pre_hook(extend.only_watches(lambda *_: counted.up()))
    outputs = [call(lambda x, one: module(x, *one), x * n, one).sum() for n, one in enumerate(follows, 1)]
    (grad,) = torch.autograd.grad(sum(outputs), x)
    return grad, [buffer.clone() for buffer in module.buffers()], counted.value


def is_as_plain(make, follows=((True,), (True,))):
    x = leaf(3, 4)
    ours, buffers, calls = several(checkpoint, make, x, follows)
    plain, expected, _ = several(lambda f, *args: f(*args), make, x, follows)
    return torch.equal(ours, plain) and all(map(torch.equal, buffers, expected)) and calls == 2 * len(follows)


@pytest.mark.parametrize("way", ["lerp_", "copy_", "replaced"])
@pytest.mark.parametrize("size", [4, 100_000])
def test_an_average_that_is_written(way, size):
    assert is_as_plain(lambda: Codebook(size, way))


@pytest.mark.parametrize("follows", ["01", "10", "0110", "0101"])
def test_a_small_buffer_that_is_written_now_and_then(follows):
    assert is_as_plain(lambda: Codebook(4), [(one == "1",) for one in follows])


def test_a_large_buffer_that_is_written_later_than_the_first_time_needs_a_guard():
    module, plain = Codebook(100_000), Codebook(100_000)
    x = leaf(3, 4)
    checkpoint(module, x, follows=False).sum().backward()
    y = checkpoint(module, x).sum()
    with pytest.raises(MutationError, match=r"its forward wrote `mean` in place, .*or large .*`guard=\[...\]`"):
        y.backward()

    module = Codebook(100_000)
    region = checkpointed(module, guard=[module])
    region(x, follows=False).sum().backward()
    (ours,) = torch.autograd.grad(region(x).sum(), x)
    assert torch.equal(ours, torch.autograd.grad(plain(x).sum(), x)[0])
    assert torch.equal(module.mean, plain.mean)


def test_a_large_buffer_that_is_written_by_the_next_forward_is_an_error():
    x = leaf(3, 4)
    module = Codebook(100_000)
    y = checkpoint(module, x, follows=False).sum()
    checkpoint(module, x)

    with pytest.raises(MutationError, match="`mean` was changed in place between forward and recompute"):
        y.backward()


def test_a_large_buffer_that_is_not_written_is_not_copied():
    module = Codebook(100_000)
    x = leaf(3, 4)
    allocated = []

    class Watches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.clone.default:
                allocated.append(result.nbytes)
            return result

    checkpoint(module, x, False).sum().backward()  # the first time it may be
    with extend.only_watches(Watches()):
        checkpoint(module, x, False).sum().backward()

    # The clone of four numbers in the forward, and in the recompute.
    assert allocated == [16, 16]


def test_a_norm_whose_momentum_is_zero_at_first():
    def run(call):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(4, momentum=0.0)
        x = torch.randn(8, 4, requires_grad=True)
        for momentum in (0.0, 0.1):
            norm.momentum = momentum
            call(lambda x: norm(x).exp().sin(), x).sum().backward()
        return norm.running_mean, norm.running_var, norm.num_batches_tracked, x.grad

    assert all(map(torch.equal, run(checkpoint), run(lambda f, x: f(x))))


@pytest.mark.parametrize("kind", ["shared", "view"])
def test_buffers_that_are_one(kind):
    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Module(), nn.Module()
            self.a.register_buffer("mean", torch.zeros(8))
            self.b.register_buffer("mean", self.a.mean if kind == "shared" else self.a.mean[:4])

        def forward(self, x):
            self.a.mean.add_(1)
            return (x.exp() * self.b.mean[:4].clone()).sin()

    assert is_as_plain(Parts, [(), ()])


def test_lazy_norms():
    net = nn.Sequential(nn.LazyBatchNorm1d(), nn.Tanh())
    for _ in range(2):
        checkpoint(net, leaf(3, 4)).sum().backward()

    assert net[0].num_batches_tracked == 2


def test_modules_in_the_defaults_of_a_function():
    norms = [nn.BatchNorm1d(4) for _ in range(3)]
    h = leaf(8, 4)
    for norm in norms:
        h = checkpoint(lambda x, norm=norm: norm(x).exp().sin(), h)
    h.sum().backward()

    assert [int(norm.num_batches_tracked) for norm in norms] == [1, 1, 1]


def test_a_parameter_that_the_forward_itself_writes_is_an_error():
    class Clamps(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(x).exp()

    y = checkpoint(Clamps(4, 4), leaf(2, 4)).sum()

    with pytest.raises(MutationError, match=r"its forward wrote `weight` in place, which .* is a parameter"):
        y.backward()


def test_a_backward_inside_of_a_forward_that_changes_what_another_left_alone():
    # While the second forward ran, the clones of what the first had left alone were not shown to its own recompute,
    # which wrote the statistics a second time.
    def train(call):
        net = Averaged()

        def first(x):
            return x.exp() if net.training else x

        def second(x):
            y = net(x)
            (grad,) = torch.autograd.grad(y.exp().sum(), y)
            return y * grad

        x = torch.ones(3, 4, requires_grad=True)
        call(first, x)
        call(second, x).sum().backward()
        return [x.grad, *net.buffers()]

    assert all(map(torch.equal, train(checkpoint), train(lambda f, x: f(x))))


def tanh(x):
    return x.tanh()


def keep_nothing(context, operator, *args, **kwargs):
    return False


def as_its_own(module):
    module.forward = tanh
    return wrap(module, "")


@pytest.mark.parametrize(
    ("wrapped", "is_inert"),
    [
        (lambda module: module, True),
        (lambda module: wrap(module, ""), True),
        (lambda module: wrap(nn.Sequential(module), "0"), True),
        (lambda module: wrap(module, "", policy=keep_nothing), False),
        (lambda module: wrap(module, "", guard=[[1]]), False),
        (lambda module: wrap(module, "", store=Host()), False),
        (as_its_own, False),
    ],
    ids=["plain", "wrapped", "inside", "policy", "guard", "store", "own forward"],
)
def test_a_wrapper_runs_no_code_but_its_modules_if_the_user_gave_it_none(wrapped, is_inert):
    # What is inert is not looked at once more after each recompute. That a module was wrapped counted as code.
    assert reached(wrapped(nn.Tanh())).is_inert == is_inert


def test_of_an_installed_package_no_more_is_reached_than_what_a_forward_may_meet():
    # From file to file its code leads to a thousand functions, of which each region looked at all: 10 ms a call.
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8, n_positions=8)
    block = GPT2LMHeadModel(config).transformer.h[0]
    world = Reaching()

    reach(world, [block])

    assert {one.__module__.partition(".")[0] for one in world.bindings.functions} == {"transformers"}
    assert len(world.bindings.functions) < 20
    assert config in world.bindings.objects


class Comparing(Codebook):
    """Compares its buffers, as containers of tensors do."""

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return self.mean == other.mean


def test_a_module_with_an_equality_of_its_own():
    # What a forward changes is noted for each module, and was found again by `==`.
    assert is_as_plain(lambda: Comparing(4))
