"""The parameters of models in stores."""

import copy
import gc
import io
import pickle

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import parameters_to_vector

import torchremat
from optimizing.chains import LAYER, LAYERS, chain, forward, gradients, stored, values
from optimizing.loops import KINDS, STEPS, WIDTH, Loop, adamw, equal, loss_of, net, plain_end
from optimizing.test_offload import STORES
from torchremat import (
    Disk,
    Host,
    MutationError,
    StoreError,
    UnsupportedError,
    offload_optimizer,
    offload_parameters,
    release_gradients,
)
from torchremat.policies import save_smaller_than


def into(store, *more):
    """Offload parameters, and then or before that what `more` says."""

    def prepare(model, optimizer):
        ways = {
            "release": lambda: release_gradients(model, optimizer),
            "state": lambda: offload_optimizer(optimizer, Host(), min_bytes=64),
            "parameters": lambda: offload_parameters(model, optimizer, store, min_bytes=64),
        }
        return [ways[name]() for name in ([] if "parameters" in more else ["parameters"]) + list(more)]

    return prepare


@pytest.mark.parametrize("releases", [False, True], ids=["step", "backward"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_run_is_bit_for_bit_the_plain_one(kind, releases):
    # Two uses of one weight, a frozen part, an average of the parameters that is made after each step.
    plain, store = plain_end(kind), Host()

    ours = Loop(kind, into(store, *["release"] * releases)).run()

    assert store.statistics.copied_in_bytes > 3 * (STEPS - 1) * WIDTH * WIDTH * 4
    assert equal(ours.ends_with(), plain)


@pytest.mark.parametrize("more", [("release", "parameters"), ("state",), ("state", "release", "parameters")], ids=str)
def test_it_goes_with_released_gradients_and_stored_state_in_any_order(more):
    plain, store = plain_end(adamw), Host()

    ours = Loop(adamw, into(store, *more)).run()

    assert store.statistics.copied_in_bytes > 0
    assert equal(ours.ends_with(), plain)


@pytest.mark.parametrize("make", STORES.values(), ids=STORES)
def test_every_store_gives_back_what_it_took(make):
    plain, store = plain_end(adamw), make()

    ours = Loop(adamw, into(store, "release")).run()

    assert store.statistics.copied_in_bytes > 0
    assert equal(ours.ends_with(), plain)


def test_an_optimizer_steps_on_two_models():
    def trained(prepare):
        models = [chain()[0], chain()[0]]
        optimizer = optim.AdamW([*models[0].parameters(), *models[1].parameters()])
        offloads = prepare(models, optimizer)
        for step in range(3):
            if step == 2 and offloads:
                assert [len(stored(one)) for one in models] == [LAYERS, LAYERS]
                offloads[1].remove()
            optimizer.zero_grad()
            models[1](models[0](torch.ones(4, 256))).square().mean().backward()
            optimizer.step()
        assert not offloads or [len(stored(one)) for one in models] == [LAYERS, 0]
        return values(models[0]) + values(models[1])

    plain = trained(lambda *_: [])
    assert equal(trained(lambda models, optimizer: [offload_parameters(m, optimizer, Host()) for m in models]), plain)


def test_gradients_accumulate():
    def run(prepare):
        model = net()
        optimizer = adamw(model)
        release = prepare(model, optimizer)
        for step in range(6):
            for part in range(3):
                if release is not None and part == 2:
                    release.last_microbatch()
                loss_of(model, 3 * step + part).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    def ours(model, optimizer):
        offload_parameters(model, optimizer, Host(), min_bytes=64)

    def released(model, optimizer):
        ours(model, optimizer)
        return release_gradients(model, optimizer, accumulates=True)

    plain = run(lambda *_: None)
    assert equal(run(ours), plain)
    assert equal(run(released), plain)


# ------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("releases", [False, True], ids=["step", "backward"])
def test_a_store_moves_each_parameter_once_for_each_use(releases):
    model, _ = chain()
    optimizer, store = optim.SGD(model.parameters(), 0.1), Host()
    offload_parameters(model, optimizer, store)
    if releases:
        release_gradients(model, optimizer)

    def step():
        optimizer.zero_grad()
        forward(model).backward()
        optimizer.step()

    step()
    before = store.statistics
    step()
    after = store.statistics

    # In the forward, in the backward but for the first layer, whose input needs no gradient, and in the step: with
    # released gradients the weight is there then, but for the first one. The backward begins with the weight that the
    # forward has ended with, and that one is still there.
    uses = LAYERS + (LAYERS - 1) + (1 if releases else LAYERS)
    assert after.copied_in_bytes - before.copied_in_bytes == (uses - 1) * LAYER
    assert after.copied_out_bytes - before.copied_out_bytes == uses * LAYER
    assert after.stored_bytes == LAYERS * LAYER


def test_three_parameters_are_in_memory_at_most():
    model, _ = chain()
    plain = torchremat.measure(model, forward).peak_bytes
    offload_parameters(model, None, Disk())
    forward(model).backward()  # learns what to bring ahead
    model.zero_grad()

    ours = torchremat.measure(model, forward)

    # The one that runs, the one before it, which leaves, and the one after it.
    assert ours.parameter_bytes == 0
    assert (LAYERS - 3) * LAYER <= plain - ours.peak_bytes < (LAYERS - 2) * LAYER
    assert len(stored(model)) == LAYERS


def test_given_modules_come_and_go_whole():
    blocks, _ = chain()
    model, store = nn.Sequential(blocks[:2], *blocks[2:]), Host()
    offload_parameters(model, None, store, modules=[model[0], model[2]])
    during = []
    model[0][1].register_forward_pre_hook(lambda *_: during.append(stored(model)))

    with torch.no_grad():
        forward(model)

    assert during == [["2.0.weight"]]
    assert stored(model) == ["0.0.0.weight", "0.1.0.weight", "2.0.weight"]
    assert store.statistics.copied_in_bytes == store.statistics.stored_bytes == 3 * LAYER


def test_small_parameters_stay():
    model = net()

    offload_parameters(model, None, Host(), min_bytes=WIDTH * WIDTH * 4)

    assert stored(model) == [name for name, p in model.named_parameters() if p.numel() >= WIDTH * WIDTH]


# ------------------------------------------------------------------------------------------------- what others see


def saved_and_loaded(value):
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


READS = {
    "state_dict": lambda model: list(model.state_dict().values()),
    "deepcopy": lambda model: list(copy.deepcopy(model).parameters()),
    "pickle": lambda model: list(pickle.loads(pickle.dumps(model)).parameters()),
    "save": lambda model: list(saved_and_loaded(model.state_dict()).values()),
    "save of the model": lambda model: list(saved_and_loaded(model).parameters()),
    "copy of a parameter": lambda model: [copy.deepcopy(p) for p in model.parameters()],
    "detach": lambda model: [p.detach() for p in model.parameters()],
    "data": lambda model: [p.data for p in model.parameters()],
    "numpy": lambda model: [torch.from_numpy(p.detach().numpy()) for p in model.parameters()],
    "a vector": lambda model: parameters_to_vector(model.parameters()).split(256 * 256),
    "foreach": lambda model: torch._foreach_mul(list(model.parameters()), 1.0),
    "out": lambda model: [torch.mul(p.detach(), 1, out=torch.empty(256, 256)) for p in model.parameters()],
    "words": lambda model: [torch.tensor(len(repr(p))) for p in model.parameters()],
    "storage": lambda model: [torch.tensor(p.untyped_storage().nbytes()) for p in model.parameters()],
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_whatever_reads_a_parameter_finds_it(read):
    plain, (model, _) = chain()[0], chain(Host())
    assert len(stored(model)) == LAYERS

    found = read(model)

    assert all(torch.equal(one.flatten(), other.flatten()) for one, other in zip(found, read(plain), strict=True))
    assert all(type(p) is not type(model[0][0].weight) or type(p) is nn.Parameter for p in found)
    assert equal(gradients(model), gradients(plain))


def test_what_reads_no_values_leaves_them_in_the_store():
    store = Host()
    model, _ = chain(store)

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
        assert (p.shape, p.dtype, p.numel(), p.nbytes) == ((256, 256), torch.float32, 2**16, LAYER)
        assert p.is_leaf
        assert p.requires_grad
        assert p.grad.is_contiguous()
        p.register_post_accumulate_grad_hook(lambda p: None)
    adamw(model).zero_grad()

    assert store.statistics.copied_in_bytes == 0
    assert len(stored(model)) == LAYERS


def test_what_was_read_leaves_when_another_one_is_read():
    model, _ = chain(Host())

    for p in model.parameters():
        p.detach().norm()
    assert stored(model) == [f"{number}.0.weight" for number in range(LAYERS - 1)]
    with torch.no_grad():
        model[3](torch.ones(1, 256))

    assert len(stored(model)) == LAYERS


def test_code_that_asks_nothing_reads_nan():
    (model, _), plain = chain(Host()), chain()[0]

    with torch._C.DisableTorchFunctionSubclass():
        assert model[0][0].weight.isnan().all()

    assert equal(gradients(model), gradients(plain))


def test_who_holds_the_values_sees_them_change():
    model, optimizer = net(), None
    optimizer = adamw(model)
    offload_parameters(model, optimizer, Host(), min_bytes=64)
    weight = model.blocks[0][3].weight
    held = weight.detach()

    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

    assert type(weight) is nn.Parameter
    assert held.data_ptr() == weight.data_ptr()
    del held
    loss_of(model, 0)
    assert type(weight) is not nn.Parameter


def test_a_copy_is_a_plain_model():
    store = Host()
    model, _ = chain(store)

    other = copy.deepcopy(model)
    before = store.statistics.copied_in_bytes
    forward(other).backward()

    assert stored(other) == []
    assert store.statistics.copied_in_bytes == before
    assert equal(gradients(other), gradients(model))


def test_a_checkpoint_in_the_middle_resumes():
    plain = plain_end(adamw)
    first = Loop(adamw, into(Disk(), "release")).run(stop=8)
    saved = copy.deepcopy([first.model.state_dict(), first.optimizer.state_dict(), first.schedule.state_dict()])
    average = copy.deepcopy(first.average)

    second = Loop(adamw, into(Disk(), "release"))
    second.average = average
    for own, state in zip((second.model, second.optimizer, second.schedule), saved, strict=True):
        own.load_state_dict(state)
    second.run(8)

    assert equal(second.ends_with(), plain)


# ------------------------------------------------------------------------------------------------------- autograd


def second_order(model):
    parameters = list(model.parameters())
    first = torch.autograd.grad(forward(model), parameters, create_graph=True)
    return torch.autograd.grad(sum(one.square().sum() for one in first), parameters)


def twice(model):
    model.zero_grad()
    loss = forward(model)
    loss.backward(retain_graph=True)
    loss.backward()
    return [p.grad for p in model.parameters()]


def functional(model):
    def loss(parameters):
        return torch.func.functional_call(model, parameters, (torch.ones(4, 256),)).square().mean()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def in_autocast(model):
    model.zero_grad()
    with torch.autocast("cpu"):
        loss = forward(model)
    loss.backward()
    return [p.grad for p in model.parameters()]


def checkpointed(use_reentrant):
    def run(model):
        model.zero_grad()
        x = torch.ones(4, 256, requires_grad=True)
        for block in model:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
        x.square().mean().backward()
        return [p.grad for p in model.parameters()]

    return run


def with_saved_tensors_in_a_store(model):
    model.zero_grad()
    with torchremat.offload(Host()):
        loss = forward(model)
    loss.backward()
    return [p.grad for p in model.parameters()]


def frozen(model):
    model[3].requires_grad_(False)
    found = gradients(model)
    model[3].requires_grad_(True)
    return [one for one in found if one is not None]


USES = {
    "once": gradients,
    "twice": twice,
    "second order": second_order,
    "torch.func": functional,
    "autocast": in_autocast,
    "checkpoint": checkpointed(use_reentrant=False),
    "reentrant checkpoint": checkpointed(use_reentrant=True),
    "saved tensors in a store": with_saved_tensors_in_a_store,
    "frozen": frozen,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_gradients_are_those_of_the_plain_model(use):
    store = Host()
    plain, (model, _) = chain()[0], chain(store)

    found = use(model)

    assert equal(found, use(plain))
    assert store.statistics.copied_in_bytes >= LAYERS * LAYER
    del found
    forward(model)
    assert len(stored(model)) == LAYERS


def test_without_a_graph_parameters_come_and_go():
    model, _ = chain(Host())
    expected = forward(chain()[0])

    with torch.inference_mode():
        assert torch.equal(forward(model), expected)
    assert len(stored(model)) == LAYERS
    assert equal(gradients(model), gradients(chain()[0]))


def test_a_write_between_forward_and_backward_is_an_error():
    model, _ = chain(Host())
    loss = forward(model)

    with torch.no_grad():
        model[4][0].weight.mul_(2)

    with pytest.raises(MutationError, match="modified by an inplace operation"):
        loss.backward()


# dynamo looks at the gradient of what it is given.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_caller_works():
    (model, _), plain = chain(Host()), chain()[0]

    torch.compile(forward, backend="aot_eager")(model).backward()

    assert equal([p.grad for p in model.parameters()], gradients(plain))
    assert len(stored(model)) == LAYERS


# ------------------------------------------------------------------------------------------------ regions and plans


def test_a_recompute_that_stops_leaves_no_hooks():
    # A recompute ends in the middle of a GELU, whose hooks torch does not run then. When the next forward came to that
    # GELU, it ended all calls: the hooks for saved tensors that those around had set stayed for good, and torch.func
    # refused to work from then on.
    (model, _), (plain, _) = chain(Host()), chain()
    torchremat.wrap(model, "*")

    for _ in range(2):
        assert equal(gradients(model), gradients(plain))
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert len(stored(model)) == LAYERS


def test_under_a_plan_each_region_brings_its_parameters_in():
    def step(model):
        return model(torch.ones(1024, 256)).square().mean()

    def grads(model):
        model.zero_grad()
        step(model).backward()
        return [p.grad for p in model.parameters()]

    model, _ = chain()
    torchremat.plan(model, step, budget="min", cost="flops").apply(model)
    planned, plain = torchremat.measure(model, step).peak_bytes, grads(model)
    offload_parameters(model, None, Disk())
    grads(model)
    model.zero_grad()

    ours = torchremat.measure(model, step)

    assert ours.recomputed_flops > 0
    assert planned - ours.peak_bytes == 6 * LAYER
    assert equal(grads(model), plain)


def test_a_region_in_parts_puts_away_a_parameter_that_has_stepped():
    # Its second part puts away what the first one left, a weight that has made its step since. To ask who holds that
    # weight is a view of it, which was taken for a read of the part: "changed in place between forward and recompute".
    def trained(prepare):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.0), nn.Linear(256, 64)) for _ in range(3))
        model = nn.Sequential(*layers)
        optimizer = optim.AdamW(model.parameters())
        prepare(model, optimizer)
        for number in range(3):
            optimizer.zero_grad()
            step(model, number).backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    def step(model, number=0):
        return model(torch.full((8, 64), 0.1 * (number + 1))).square().mean()

    def prepare(model, optimizer):
        plan = torchremat.plan(model, step, budget="min", optimizer=optimizer, cost="flops", release_gradients=True)
        plan.apply(model)
        assert "in 2 parts" in str(plan)
        offload_parameters(model, optimizer, Disk())

    assert equal(trained(prepare), trained(lambda *_: None))


def test_a_policy_does_not_see_what_comes_ahead():
    # The room for a parameter that comes ahead was made in the forward of a block, and was taken for an operator of it:
    # "operator 0 of the recompute is aten.mm.default, and in the forward it was aten.empty.memory_format".
    (model, _), (plain, _) = chain(Disk()), chain()
    torchremat.wrap(model, "*", policy=save_smaller_than(1))

    for _ in range(3):
        assert equal(gradients(model), gradients(plain))


def test_saved_tensors_in_a_store_leave_parameters_free():
    # The hooks of `offload` kept each parameter that a node saved, to its backward: all but one of the 8 stayed.
    (model, _), (plain, _) = chain(Disk()), chain()

    with torchremat.offload(Disk()):
        loss = forward(model)

    assert len(stored(model)) == LAYERS
    loss.backward()
    assert equal([p.grad for p in model.parameters()], gradients(plain))


def test_a_step_that_is_measured_does_not_train():
    model = net()
    optimizer = adamw(model)
    into(Host(), "release")(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0)

    torchremat.measure(model, lambda model: loss_of(model, 0), optimizer=optimizer)

    assert len(stored(model)) > 0
    assert equal(dict(model.state_dict()), dict(before))


# --------------------------------------------------------------------------------------------------------- failures


def test_a_forward_that_raises_leaves_parameters_whole():
    (model, _), plain = chain(Host()), chain()[0]

    def fail(*_):
        raise ValueError("no")

    hook = model[4][0].register_forward_hook(fail)
    with pytest.raises(ValueError, match="no"):
        forward(model)
    hook.remove()

    assert len(stored(model)) == LAYERS
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert equal(gradients(model), gradients(plain))


def test_a_backward_that_raises_leaves_parameters_whole():
    (model, _), plain = chain(Host()), chain()[0]

    def fail(_):
        raise ValueError("no")

    hook = model[4][0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="no"):
        forward(model).backward()
    hook.remove()

    assert equal(gradients(model), gradients(plain))
    assert len(stored(model)) == LAYERS


class Failing(Host):
    """Fails to read while `fails`."""

    fails = False

    def put(self, tensor):
        return FailingHandle(self, super().put(tensor))


class FailingHandle:
    def __init__(self, store, handle):
        self.store, self.handle, self.stored_bytes = store, handle, handle.stored_bytes
        self.prefetch = handle.prefetch

    def get(self):
        if self.store.fails:
            raise StoreError("the medium failed")
        return self.handle.get()


@pytest.mark.parametrize("run", [forward, lambda model: model.state_dict(), gradients], ids=["run", "read", "back"])
def test_a_read_that_fails_leaves_parameters_whole(run):
    store = Failing()
    (model, _), plain = chain(store), chain()[0]
    loss = forward(model)

    store.fails = True
    with pytest.raises(StoreError, match="the medium failed"):
        loss.backward() if run is gradients else run(model)
    store.fails = False

    assert len(stored(model)) == LAYERS
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert equal(gradients(model), gradients(plain))


def test_without_room_parameters_stay_in_memory():
    store = Host(3 * LAYER)

    model, _ = chain(store)

    assert len(stored(model)) == 3
    assert equal(gradients(model), gradients(chain()[0]))
    assert len(stored(model)) == 3


def test_a_strict_store_without_room_raises_and_parameters_are_as_before():
    model, _ = chain()

    with pytest.raises(StoreError, match="no room"):
        offload_parameters(model, None, Host(3 * LAYER, strict=True))

    assert stored(model) == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert equal(gradients(model), gradients(chain()[0]))


# ------------------------------------------------------------------------------------------------------ begin and end


def test_removed_it_leaves_nothing():
    store = Host()
    model = net()
    optimizer = adamw(model)
    with offload_parameters(model, optimizer, store, min_bytes=64) as offload:
        assert stored(model)
    offload.remove()

    assert stored(model) == []
    assert store.statistics.stored_bytes == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_model_that_is_dropped_takes_its_parameters_along():
    store = Host()
    model, offload = chain(store)
    gradients(model)
    assert store.statistics.stored_bytes == LAYERS * LAYER

    del model, offload
    gc.collect()

    assert store.statistics.stored_bytes == 0


class Own(nn.Parameter):
    pass


def test_refusals():
    model = net()
    optimizer = adamw(model)
    own = nn.Linear(2, 2)
    own.weight = Own(torch.ones(2, 2))

    with pytest.raises(UnsupportedError, match=r"store=Host: expected an object with a method `put`"):
        offload_parameters(model, optimizer, Host)
    with pytest.raises(UnsupportedError, match=r"weight is a Own, whose memory belongs to its class"):
        offload_parameters(own, None, Host())
    with pytest.raises(UnsupportedError, match=r"a OptimizedModule is compiled"):
        offload_parameters(torch.compile(model, backend="eager"), optimizer, Host())
    with pytest.raises(UnsupportedError, match=r"a Linear is no module of the model"):
        offload_parameters(model, optimizer, Host(), modules=[own])
    with offload_parameters(model, optimizer, Host()), pytest.raises(UnsupportedError, match=r"in a store already"):
        offload_parameters(model, optimizer, Host())
    release_gradients(model, optimizer)
    loss_of(model, 0).backward()
    with pytest.raises(UnsupportedError, match=r"a backward has released gradients"):
        offload_parameters(model, optimizer, Host())
    optimizer.step()
    offload_parameters(model, optimizer, Host()).remove()


def test_it_is_public():
    assert {"offload_parameters", "ParameterOffload"} <= {*torchremat.__all__}
