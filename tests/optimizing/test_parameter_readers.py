"""What users do with parameters in a store: each ends as with a plain model, or is refused by name."""

import copy
import gc
import io
import multiprocessing
from contextlib import nullcontext

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, prune, spectral_norm, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.overrides import TorchFunctionMode

from optimizing.chains import LAYERS, chain, forward, gradients, stored, train, values
from optimizing.loops import equal
from torchremat import Host, UnsupportedError, checkpoint, offload_parameters

X = torch.ones(4, 256)


def weight_of(model):
    return model[0][0].weight


# ---------------------------------------------------------------------------------------------- transforms, in C++


def loss_of_bare(parameters):
    return sum(one.square().sum() for one in parameters.values())


TRANSFORMS = {
    "grad": lambda model: list(torch.func.grad(loss_of_bare)(dict(model.named_parameters())).values()),
    "vjp": lambda model: torch.func.vjp(torch.square, weight_of(model))[1](torch.ones(256, 256)),
    "jvp": lambda model: torch.func.jvp(torch.square, (weight_of(model),), (torch.ones(256, 256),)),
    "jacrev": lambda model: torch.func.jacrev(lambda one: (one @ one).sum(0))(weight_of(model))[0],
    "hessian": lambda model: torch.func.hessian(lambda one: one.square().sum())(weight_of(model)[0, :5]),
    "vmap": lambda model: torch.vmap(lambda row: row.square().sum())(weight_of(model)),
    "vmap over two": lambda model: torch.vmap(torch.dot)(weight_of(model), model[1][0].weight),
    "functionalize": lambda model: torch.func.functionalize(torch.square)(weight_of(model)),
    "linearize": lambda model: torch.func.linearize(torch.square, weight_of(model))[0],
    "closure": lambda model: torch.func.grad(lambda x: (weight_of(model) @ x).sum())(X[0]),
    "ensemble": lambda model: torch.func.stack_module_state([model, model])[0]["0.0.weight"].detach(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:Attempted to insert a get_attr")  # torch's own
@pytest.mark.parametrize("use", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_take_bare_parameters(use):
    (model, _), (plain, _) = chain(Host()), chain()
    assert len(stored(model)) == LAYERS

    found = use(model)

    assert equal(found, use(plain))
    assert equal(gradients(model), gradients(plain))
    del found
    gc.collect()
    forward(model)
    assert len(stored(model)) == LAYERS


def test_a_compiled_transform_takes_a_bare_parameter():
    (model, _), (plain, _) = chain(Host()), chain()
    compiled = torch.compile(torch.func.grad(lambda one: (X @ one).square().sum()), backend="aot_eager")

    assert torch.equal(compiled(weight_of(model)), compiled(weight_of(plain)))


# -------------------------------------------------------------------------------------------------- a training loop


def in_closures(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = forward(model)
        loss.backward()
        return loss

    return [optimizer.step(closure) for _ in range(3)] + values(model)


def scaled_and_clipped(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(forward(model)).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.001)
        scaler.step(optimizer)
        scaler.update()
    return values(model)


def two_optimizers(model, optimizer):
    other = optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        forward(model).backward()
        optimizer.step()
        other.step()
    return values(model)


def an_optimizer_in_hooks(model, optimizer):
    for p in model.parameters():
        own = optim.SGD([p], 0.1)
        p.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    return [forward(model).backward() for _ in range(3)] + values(model)


def averaged(model, optimizer):
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        train(model, optimizer)
        mean.update_parameters(model)
    return [*values(mean), mean(X)]


def shared_by_two(model, optimizer):
    other = nn.Sequential(model[0], nn.Linear(256, 256, bias=False))
    nn.init.ones_(other[1].weight)
    return gradients(other) + train(model, optimizer)


def a_module_later(model, optimizer):
    torch.manual_seed(1)
    model.append(nn.Linear(256, 256))
    optimizer.add_param_group({"params": model[-1].parameters()})
    return train(model, optimizer)


def frozen_for_a_while(model, optimizer):
    model.requires_grad_(False)
    found = [forward(model)]
    model.requires_grad_(True)
    return found + train(model, optimizer)


def through_views(model, optimizer):
    with torch.no_grad():
        weight_of(model)[0].fill_(0)
        weight_of(model).t()[1] = 0
        model[1][0].weight.data.mul_(2)
    model[2][0].weight.data = torch.ones(256, 256)
    model[3][0].weight.data = model[3][0].weight.data.t()
    return train(model, optimizer)


def a_vector(model, optimizer):
    vector_to_parameters(torch.arange(LAYERS * 65536.0) / 1e6, model.parameters())
    return train(model, optimizer)


def loaded(model, optimizer):
    model.load_state_dict({name: 2 * value for name, value in chain()[0].state_dict().items()})
    return train(model, optimizer)


LOOPS = [in_closures, scaled_and_clipped, two_optimizers, an_optimizer_in_hooks, averaged, shared_by_two]
LOOPS += [a_module_later, frozen_for_a_while, through_views, a_vector, loaded]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda one: one.__name__)
def test_a_users_loop_ends_as_without_a_store(loop):
    (model, _), (plain, _), store = chain(), chain(), Host()
    optimizers = [optim.SGD(one.parameters(), 0.1) for one in (model, plain)]
    offload_parameters(model, optimizers[0], store)

    assert equal(loop(model, optimizers[0]), loop(plain, optimizers[1]))
    assert store.statistics.copied_in_bytes > 0


# ----------------------------------------------------------------------------------------------- changes of the model


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


def filled(model):
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.constant_(p, 0.01)


def assigned(model):
    model.load_state_dict({name: 2 * value for name, value in chain()[0].state_dict().items()}, assign=True)


def replaced(model):
    model[1][0].weight = nn.Parameter(torch.ones(256, 256))


def tied(model):
    model[1][0].weight = model[0][0].weight


def pruned_in_forwards(model):
    prune.l1_unstructured(model[0][0], "weight", 0.5)


CHANGES = {
    "to": lambda model: model.to("cpu"),
    "there and back": lambda model: model.double().float(),
    "shared memory": lambda model: model.share_memory(),
    "to_empty": filled,
    "load, assigned": assigned,
    "replaced": replaced,
    "tied": tied,
    "parametrized": lambda model: parametrize.register_parametrization(model[0][0], "weight", Symmetric()),
    "weight_norm": lambda model: parametrizations.weight_norm(model[0][0]),
    "spectral_norm": lambda model: spectral_norm(model[0][0]),
    "orthogonal": lambda model: parametrizations.orthogonal(model[0][0]),
    "pruned": pruned_in_forwards,
    "compiled": lambda model: model.compile(backend="aot_eager"),
    "a compiled part": lambda model: model[2].compile(backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_model_can_be_changed(change):
    (model, _), (plain, _) = chain(Host()), chain()

    for one in (model, plain):
        torch.manual_seed(1)
        change(one)

    for _ in range(2):
        assert equal(gradients(model), gradients(plain))
    assert equal(values(model), values(plain))


# ----------------------------------------------------------------------------------------------------- other readers


def exported(model):
    return torch.export.export(model, (X,)).module()(X)


def shallow(model):
    return gradients(copy.copy(model)) + [copy.copy(p).detach() for p in model.parameters()]


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def under_a_mode(model):
    with Nothing():
        return [p * 1 for p in model.parameters()]


def without_data(model):
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.ones(4, 256))
    return values(model)


def saved_by_name(model):
    memory = io.BytesIO()
    torch.save(dict(model.named_parameters()), memory)
    memory.seek(0)
    return [p.detach() for p in torch.load(memory).values()]


def in_a_fork(model):
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def run():
        torch.set_num_threads(1)
        queue.put([p.detach()[0].tolist() for p in model.parameters()] + [forward(model).item()])

    process = context.Process(target=run)
    process.start()
    found = queue.get()
    process.join()
    return found


READERS = {
    "two": lambda model: (model[0][0].weight.detach(), model[0][0].weight @ model[1][0].weight)[1].detach(),
    "block_diag": lambda model: torch.block_diag(*model.parameters()).detach(),
    "traced": lambda model: torch.jit.trace(model, X)(X).detach(),
    "exported": exported,
    "symbolically traced": lambda model: torch.fx.symbolic_trace(model)(X).detach(),
    "shallow copies": shallow,
    "a function mode": under_a_mode,
    "fake tensors": without_data,
    "saved by name": saved_by_name,
    "a forked process": in_a_fork,
    "a compiled function": lambda model: torch.compile(torch.square, backend="aot_eager")(weight_of(model)).detach(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:The .grad attribute", "ignore:.*fork")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_other_readers_find_the_values(read):
    (model, _), (plain, _) = chain(Host()), chain()
    assert len(stored(model)) == LAYERS

    assert equal(read(model), read(plain))
    assert equal(gradients(model), gradients(plain))


def test_of_two_that_are_read_together_none_leaves():
    # To bring one back would put the other away, which was read before, and so without end.
    model, _ = chain(Host())
    first, second = model[0][0].weight, model[1][0].weight
    first.detach()

    first @ second

    assert [type(first), type(second)] == [nn.Parameter, nn.Parameter]


@pytest.mark.parametrize("places", ["forward_pre", "forward"])
def test_an_interrupted_forward_leaves_no_hooks(places):
    # torch runs no hooks after a KeyboardInterrupt, so ours for saved tensors saw all other models until this one ran.
    (model, _), (plain, _) = chain(Host()), chain()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = getattr(model[2][0], f"register_{places}_hook")(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forward(model)
    hook.remove()
    gradients(plain)

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert len(stored(model)) == LAYERS
    assert equal(gradients(model), gradients(plain))


@pytest.mark.parametrize(
    ("around", "after"),
    [
        # Ours lay below those of the region in which the next forward ran, and could not be taken away there.
        (nullcontext, lambda model, plain: (checkpoint(forward, model).backward(), gradients(plain))),
        # The block takes away ours, which lie on top.
        (torch.autograd.graph.save_on_cpu, lambda model, plain: (gradients(plain), gradients(model))),
    ],
    ids=["below the hooks of a region", "within those of a block"],
)
def test_an_interrupt_leaves_no_hooks_among_those_of_others(around, after):
    (model, _), (plain, _) = chain(Host()), chain()

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model[2][0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), around():
        forward(model)
    hook.remove()
    after(model, plain)

    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_hook_that_raises_before_ours_ends_no_call_around():
    (model, _), (plain, _) = chain(Host()), chain()
    inside = []

    class Caller(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with pytest.raises(ValueError, match="no"):
                self.layer(x)
            inside.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            return x

    def fail(*_):
        raise ValueError("no")

    around = nn.Sequential(Caller(nn.Linear(256, 256)), model)
    offload_parameters(around[0], None, Host())
    around[0].layer.register_forward_pre_hook(fail, prepend=True)

    assert torch.equal(forward(around), forward(plain))
    assert inside != [None]


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.fixture
def group(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def inside(wrap):
    return lambda model: wrap(nn.Sequential(model))


WRAPS = {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard}
WRAPS |= {f"{name} around": inside(wrap) for name, wrap in WRAPS.items()}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPS)
def test_data_parallelism_is_refused(name):
    model, _ = chain()
    wrapped = WRAPS[name](model)

    with pytest.raises(
        UnsupportedError, match="a DistributedDataParallel has these" if "Data" in name else "a DTensor"
    ):
        offload_parameters(model, None, Host())
    assert wrapped(X).isfinite().all()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", WRAPS)
def test_data_parallelism_after_it_is_refused(name):
    model, _ = chain(Host())

    wrapped = WRAPS[name](model)

    with pytest.raises(UnsupportedError, match=f"was put into {name.split()[0]} after torchremat.offload_parameters"):
        wrapped(X)


@pytest.mark.usefixtures("group")
def test_removed_it_goes_into_data_parallelism():
    (model, offload), (plain, _) = chain(Host()), chain()
    wrapped = DistributedDataParallel(model)
    with pytest.raises(UnsupportedError, match="DistributedDataParallel after"):
        wrapped(X)

    offload.remove()
    forward(wrapped).backward()

    assert equal([p.grad for p in model.parameters()], gradients(plain))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled_and_scripted_modules_are_refused():
    compiled, _ = chain()
    compiled[1].compile(backend="eager")
    scripted = nn.Sequential(torch.jit.script(nn.Linear(256, 256)))

    with pytest.raises(UnsupportedError, match="a Sequential is compiled"):
        offload_parameters(compiled, None, Host())
    with pytest.raises(UnsupportedError, match="a RecursiveScriptModule is compiled"):
        offload_parameters(scripted, None, Host())
    with pytest.raises(UnsupportedError, match="Script the model after `remove"):
        torch.jit.script(chain(Host())[0])


def test_an_optimizer_whose_step_has_no_parts_is_refused():
    model, _ = chain()

    with pytest.raises(UnsupportedError, match="LBFGS"):
        offload_parameters(model, optim.LBFGS(model.parameters()), Host())
    assert stored(model) == []
