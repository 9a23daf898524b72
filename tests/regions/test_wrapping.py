"""Wrapped modules: what runs, and that nothing else about them has changed."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import zoo
from forked import CONTEXT
from logs import Log
from probes.regions import is_wrapped, matching
from regions.comparing import Counted, equal, live_regions, result
from regions.distributed import Block, net, train
from torchremat import UnsupportedError, WrapError, unwrap, wrap
from torchremat.policies import save_matmuls, save_operators


def trains_as_plain(wrapped, plain):
    x = torch.randn(8, 4)
    ours = result(lambda: wrapped(x), [], [wrapped])
    return equal(ours, result(lambda: plain(x), [], [plain]))


# ------------------------------------------------------------------------------------------------- what matches


@pytest.mark.parametrize(
    ("pattern", "every", "names"),
    [
        ("layers.*", 1, "layers.0 layers.1 layers.2 layers.3"),
        ("layers.*", 2, "layers.0 layers.2"),
        ("layers.[12]", 1, "layers.1 layers.2"),
        # The model itself, whose name is empty, was wrapped as well, and was the first of `every`.
        ("*", 1, "inp layers head"),
        ("*", 2, "inp head"),
        ("layers.*.linear", 3, "layers.0.linear layers.3.linear"),
        (Block, 1, "layers.0 layers.1 layers.2 layers.3"),
        (lambda name, module: isinstance(module, nn.Linear) and "layers" not in name, 1, "inp head"),
    ],
)
def test_patterns(pattern, every, names):
    model = net()

    assert wrap(model, pattern, every=every) is model

    assert " ".join(name for name, module in model.named_modules() if is_wrapped(module)) == names
    assert trains_as_plain(model, net())


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layer.*", r"no module is named 'layer\.\*'\. Closest names: layers"),
        ("layers", None),
        ("zzz", r"no module is named 'zzz'\. Closest names: "),
        (nn.LayerNorm, r"no module is a LayerNorm\. Closest types: "),
        (
            lambda name, module: False,
            r"the predicate '<lambda>' matched none of the model's modules, of types BatchNorm1d",
        ),
        (torch.Tensor, r"modules=Tensor: expected a type of module"),
        (3, r"modules=3: expected a glob over names, a type, or a predicate"),
    ],
)
def test_no_match_is_an_error_with_what_is_closest(pattern, message):
    model = net()
    if message is None:
        assert [name for name, _ in matching(model, pattern)] == ["layers"]
        return
    with pytest.raises(WrapError, match=message):
        wrap(model, pattern)
    assert not any(map(is_wrapped, model.modules()))


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_is_a_positive_int(every):
    with pytest.raises(WrapError, match=r"every=.*: expected an int of at least 1"):
        wrap(net(), "layers.*", every=every)


def test_wrapping_twice_is_an_error_and_changes_nothing():
    model = wrap(net(), "layers.1")
    with pytest.raises(WrapError, match=r"`layers\.1` is wrapped already; unwrap it"):
        wrap(model, "layers.*")

    assert [name for name, module in model.named_modules() if is_wrapped(module)] == ["layers.1"]


def test_the_root_can_be_wrapped():
    model = wrap(net(), lambda name, module: name == "")

    assert trains_as_plain(model, net())
    assert [layer.calls.value for layer in model.layers] == [2] * 4


def test_a_parent_and_its_children_can_be_wrapped():
    model = wrap(wrap(net(), "layers.*"), "layers.*.*")

    assert trains_as_plain(model, net())
    # The forward, its recompute, and no more: the children's are their own.
    assert [layer.calls.value for layer in model.layers] == [2] * 4


def test_each_call_is_recomputed_once():
    model = wrap(net(), "layers.*")

    assert trains_as_plain(model, net())
    assert [layer.calls.value for layer in model.layers] == [2] * 4


def test_a_module_that_is_called_twice():
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = nn.Sequential(shared, nn.Tanh(), shared)
    wrap(model, "0")
    plain = copy.deepcopy(unwrap(model))
    wrap(model, "0")
    assert trains_as_plain(model, plain)


# ----------------------------------------------------------------------------------- what does not change


def test_unwrapping_leaves_nothing_behind():
    model = net()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    order = {name: list(vars(module)) for name, module in model.named_modules()}

    assert unwrap(wrap(model, "layers.*")) is model

    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert {name: list(vars(module)) for name, module in model.named_modules()} == order


def test_what_describes_a_model_is_unchanged():
    model, plain = net(), net()
    wrap(model, "layers.*")

    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(type(one) is type(other) for one, other in zip(model.modules(), plain.modules(), strict=True))
    assert repr(model) == repr(plain)
    layer = model.layers[0]
    assert inspect.signature(layer.forward) == inspect.signature(plain.layers[0].forward)
    assert list(inspect.signature(layer.forward).parameters) == ["x", "scale"]
    assert inspect.unwrap(layer.forward) == Block.forward.__get__(layer)
    assert "as a region by torchremat" in repr(layer.forward)
    model.load_state_dict(plain.state_dict())


def test_hooks_run_once():
    model = net()
    events = Log()
    layer = wrap(model, "layers.1").layers[1]
    layer.register_forward_pre_hook(lambda *_: events.append("pre"))
    layer.register_forward_hook(lambda *_: events.append("post"))
    layer.register_full_backward_pre_hook(lambda *_: events.append("backward pre"))
    layer.register_full_backward_hook(lambda *_: events.append("backward"))

    model(torch.randn(8, 4)).sum().backward()

    assert events == ["pre", "post", "backward pre", "backward"]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_run_their_own_weights(way):
    model = wrap(net(), "layers.*")
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    assert all(map(is_wrapped, copied.layers)) and copied.layers[0].forward.module is copied.layers[0]
    del model
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(2)
    plain = net()
    plain.load_state_dict(copied.state_dict())

    assert trains_as_plain(copied, plain)
    assert [layer.calls.value for layer in copied.layers] == [2] * 4
    assert all("forward" not in vars(layer) for layer in unwrap(copied).layers)


@pytest.mark.parametrize("policy", [save_matmuls, save_operators("aten.tanh") | ~save_matmuls], ids=["one", "joined"])
def test_a_model_with_a_policy_is_copied_and_pickled_after_it_has_run(policy):
    # What the policy had answered for each operator was pickled too, and operators cannot be.
    model = wrap(net(), "layers.*", policy=policy)
    trains_as_plain(model, net())
    plain = net()

    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        plain.load_state_dict(copied.state_dict())
        assert all(map(is_wrapped, copied.layers)) and trains_as_plain(copied, plain)


def test_a_copied_layer_alone():
    layer = copy.deepcopy(wrap(net(), "layers.*").layers[2])

    assert layer.forward.module is layer


def remade(module, changed):
    """Return a module like another, as learn2learn's `clone_module` makes it: all attributes, other parameters."""
    made = module.__new__(type(module))
    made.__dict__ = module.__dict__.copy()
    made._parameters = {name: changed(one) for name, one in module._parameters.items()}
    made._modules = {name: remade(one, changed) for name, one in module._modules.items()}
    return made


# A copy of the attributes has the forward that `wrap` has put there, which ran the weights of the module that it was
# put on: with learn2learn and with higher all numbers of an inner loop were wrong, and there was no error.
@pytest.mark.parametrize("pattern", ["layers.*", lambda name, _: not name])
def test_a_module_made_of_another_ones_attributes_runs_its_own_weights(pattern):
    def outer_loss(model, x):
        loss = remade(model, torch.clone)(x).square().mean()
        gradients = iter(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))
        return remade(model, lambda one: one - next(gradients))(x).square().mean()

    model, plain, x = net(), net(), torch.randn(8, 4)
    wrap(model, pattern)

    ours, expected = (result(lambda one=one: outer_loss(one, x), [], [one]) for one in (model, plain))

    assert equal(ours, expected)
    assert all(layer.calls.value > other.calls.value for layer, other in zip(model.layers, plain.layers, strict=True))
    with torch.no_grad():
        assert torch.equal(remade(model, torch.neg)(x), remade(plain, torch.neg)(x))


def test_a_module_made_of_another_ones_attributes_does_not_guard_the_objects_of_that():
    model = wrap(net(), "layers.1", guard=[nn.Linear(2, 2)])

    with pytest.raises(WrapError, match="would guard the objects of the original"):
        remade(model, torch.clone)(torch.ones(2, 4))


def test_a_forward_that_the_instance_had_before():
    # As accelerate leaves it.
    model, plain = net(), net()
    calls = Log()
    for one in (model, plain):
        old = one.layers[0].forward
        one.layers[0].forward = lambda *args, old=old, **kwargs: calls.append(1) or old(*args, **kwargs) * 2
    own = model.layers[0].forward
    wrap(model, "layers.*")

    assert trains_as_plain(model, plain)
    assert len(calls) == 3
    assert vars(unwrap(model).layers[0])["forward"] is own


def test_a_method_of_the_instance_is_copied_with_it():
    model = net()
    model.layers[0].forward = model.layers[0].forward
    copied = copy.deepcopy(wrap(model, "layers.*"))

    assert copied.layers[0].forward.function.__self__ is copied.layers[0]


def test_the_forward_of_a_module_that_is_gone():
    model = wrap(net(), "layers.*")
    forward = model.layers[0].forward
    del model

    with pytest.raises(WrapError, match=r"`layers\.0` is gone"):
        forward(torch.ones(2, 4))


def test_data_parallel_is_refused():
    model = wrap(net(), "layers.*")

    with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
        nn.DataParallel(model).module.layers[0]._replicate_for_data_parallel()


def test_a_script_module_is_refused():
    with pytest.warns((DeprecationWarning, FutureWarning), match="jit"):
        model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))

    with pytest.raises(WrapError, match=r"`0` is a ScriptModule.*Wrap the module that calls it"):
        wrap(model, "0")


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference"])
def test_without_grad_it_is_a_plain_call(mode):
    model = wrap(net(), "layers.*").eval()
    context = {"eval": torch.no_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[mode]
    before = len(live_regions())
    with context():
        y = model(torch.randn(8, 4))

    assert not y.requires_grad and len(live_regions()) == before
    assert [layer.calls.value for layer in model.layers] == [1] * 4


def test_eval_mode_with_grad_is_recomputed():
    model, plain = wrap(net(), "layers.*").eval(), net().eval()

    assert trains_as_plain(model, plain)
    assert [layer.calls.value for layer in model.layers] == [2] * 4


# ------------------------------------------------------------------------------------------------ real models


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gpt2(use_cache, dropout):
    def take(wrapped):
        model, step = zoo.gpt2(blocks=3, width=32, dropout=dropout, use_cache=use_cache)
        if wrapped:
            wrap(model, "transformer.h.*")
        forwards = [Counted(block.attn.forward) for block in model.transformer.h]
        for block, forward in zip(model.transformer.h, forwards, strict=True):
            block.attn.forward = forward
        torch.manual_seed(1)
        loss = step(model)
        loss.backward()
        return [one.calls for one in forwards], [loss.detach(), *(p.grad for p in model.parameters())]

    (ours_calls, ours), (plain_calls, plain) = take(True), take(False)

    assert (ours_calls, plain_calls) == ([2, 2, 2], [1, 1, 1])
    assert equal(ours, plain)


def test_a_cache_that_outlives_the_forward_is_whole():
    model, _ = zoo.gpt2(blocks=2, width=32, use_cache=True)
    wrap(model, "transformer.h.*")
    tokens = torch.randint(2, 100, (1, 8))
    output = model(input_ids=tokens, labels=tokens)
    output.loss.backward()

    assert output.past_key_values.get_seq_length() == 8
    assert all(layer.keys.shape[-2] == 8 for layer in output.past_key_values.layers)


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "t5"])
def test_models_of_transformers(name):
    factory = getattr(zoo, name)

    def take(wrapped):
        model, step = factory(blocks=2, width=32, dropout=0.1)
        if wrapped:
            wrap(model, lambda name, module: name.split(".")[-1].isdigit() and name.count(".") <= 3)
        torch.manual_seed(1)
        loss = step(model)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    assert equal(take(True), take(False))


# ------------------------------------------------------------------------------------------------ distributed


def test_distributed_data_parallel(tmp_path):
    # What the other process runs is in a module of its own: to import this one, with transformers, takes seconds.
    other = CONTEXT.Process(target=train, args=(1, str(tmp_path / "store")))
    other.start()
    train(0, str(tmp_path / "store"))
    other.join()

    assert other.exitcode == 0
