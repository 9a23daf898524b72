"""A plan put on a model: used as before, copied, saved, trained in many ways, and taken off without a trace."""

import copy
import io
import json
import pickle
import threading
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import models
import zoo
from logs import Log
from planning.kinds import KINDS, Loop, block, inputs, linear, square
from planning.steps import differences, each, fingerprint, keep_all, outcome, recomputed_flops
from probes.planning import KeepNode, RegionNode, described
from probes.regions import is_wrapped
from torchremat import (
    OrderWarning,
    Plan,
    PlanError,
    Planner,
    ShapeWarning,
    UnsupportedError,
    WrapError,
    plan,
    unwrap,
    wrap,
)

# What is applied here is about values, and was planned without the optimizer that trains, and without DDP around it.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* (is trained by|has a plan and was put into DistributedDataParallel)", "ignore:a step was measured at"
)


@cache
def loop_plan():
    """A plan for a loop of four blocks that recomputes all of them."""
    made = Planner(*KINDS["loop"](), cost="flops").plan("100%")
    return replace(made, tree=each(4))


def planned_loop():
    model, step = KINDS["loop"]()
    loop_plan().apply(model)
    return model, step


def test_the_table():
    made = replace(
        loop_plan(),
        tree=(KeepNode(0), RegionNode((KeepNode(1), RegionNode((KeepNode(2),)))), RegionNode((KeepNode(3),))),
        budget_bytes=2**20,
        budget="1MiB",
        units=tuple(replace(unit, seconds=0.00125) for unit in loop_plan().units),
        peak_bytes=900 * 1024,
        plain_peak_bytes=1800 * 1024,
        plain_source="predicted",
        where="backward of layers.2",
        plain_seconds=0.010,
        recompute_seconds=0.0025,
        recomputed_flops=2_500_000_000,
        recomputed_calls=4,
        flops=5_000_000_000,
        floor_bytes=600 * 1024,
        planning_seconds=1.25,
        planning_steps=9,
    )

    assert str(made) == (
        "budget     1.00 MiB (1MiB) on cpu\n"
        "peak       900.00 KiB predicted, 50% of plain (1.76 MiB, predicted); highest during backward of layers.2\n"
        "time       1.25 x plain predicted; 2.50 GFLOP recomputed in 4 calls, 50% of a forward\n"
        "floor      600.00 KiB is the smallest budget found to work\n"
        "before     194.00 KiB live before a step: parameters 130.00 KiB, inputs 64.00 KiB\n"
        "optimizer  not counted\n"
        "planning   1.2 s and 9 runs of the step\n"
        "\n"
        "module         saves      inputs    forward  plan\n"
        "layers.0  128.00 KiB   64.00 KiB    1.25 ms  keep\n"
        "layers.1  128.00 KiB   64.00 KiB    1.25 ms  ┌ recompute\n"
        "layers.2  128.00 KiB   64.00 KiB    1.25 ms  └─ recompute\n"
        "layers.3  128.00 KiB   64.00 KiB    1.25 ms  ─ recompute"
    )


def test_the_optimizer_in_the_table():
    made = replace(loop_plan(), optimizer_peak_bytes=3 * 2**20, optimizer_state_bytes=2**20)

    assert "optimizer  1.00 MiB of state to come; its step peaks at 3.00 MiB" in str(made)


def test_trees_in_words():
    assert described(keep_all(2)) == ["keep", "keep"]
    assert described((RegionNode((KeepNode(0), KeepNode(1), KeepNode(2))),)) == [
        "┌ recompute",
        "│ recompute",
        "└ recompute",
    ]


# ----------------------------------------------------------------------------------------- apply and remove


@pytest.mark.parametrize("name", ["loop", "one linear", "siamese", "shared weights", "sequential in place", "tied"])
def test_remove_gives_the_model_back_as_it_was(name):
    model, step = KINDS[name]()
    made = plan(model, step, budget="80%") if name != "one linear" else plan(model, step, budget="100%")
    before = fingerprint(model)

    made.apply(model)
    made.remove(model)

    assert before.changes(fingerprint(model)) == []


def test_apply_runs_nothing_and_changes_forwards_alone():
    model, _ = KINDS["loop"]()
    before = fingerprint(model)
    state, names = list(model.state_dict()), [name for name, _ in model.named_modules()]

    loop_plan().apply(model)

    changed = before.changes(fingerprint(model))
    allowed = {
        f"{module}{attribute}"
        for module in ("", "layers.0", "layers.1", "layers.2", "layers.3")
        for attribute in (".forward", "._replicate_for_data_parallel", " keys", *([".compile"] if module else []))
    }
    assert set(changed) == allowed
    assert list(model.state_dict()) == state
    assert [name for name, _ in model.named_modules()] == names
    assert isinstance(model, Loop)


def test_a_forward_of_the_instance_itself_is_kept():
    model, step = KINDS["loop"]()
    own = model.layers[1].forward
    model.layers[1].forward = own
    before = fingerprint(model)

    loop_plan().apply(model)
    flops = recomputed_flops(model, step)
    loop_plan().remove(model)

    assert flops > 0
    assert before.changes(fingerprint(model)) == []
    assert model.layers[1].__dict__["forward"] is own


def test_applying_twice_is_an_error_and_keeps_the_first():
    model, step = planned_loop()
    before = fingerprint(model)

    with pytest.raises(PlanError, match=r"wrapped modules already .*Remove the plan that is applied, or unwrap it"):
        loop_plan().apply(model)

    assert before.changes(fingerprint(model)) == []
    assert recomputed_flops(model, step) > 0


def test_a_plan_over_wraps_of_the_user_is_an_error():
    model, step = KINDS["loop"]()
    wrap(model, "layers.0")
    before = fingerprint(model)

    with pytest.raises(PlanError, match=r"wrapped modules already \(layers.0\)"):
        loop_plan().apply(model)
    with pytest.raises(PlanError, match=r"wrapped modules already \(layers.0\)"):
        plan(model, step, budget="70%")

    assert before.changes(fingerprint(model)) == []


def test_planning_with_a_plan_applied_is_an_error():
    model, step = planned_loop()
    before = fingerprint(model)

    with pytest.raises(PlanError, match="wrapped modules already"):
        plan(model, step, budget="70%")

    assert before.changes(fingerprint(model)) == []


def test_wrapping_a_planned_module_is_an_error():
    model, _ = planned_loop()

    with pytest.raises(WrapError, match=r"`layers.0` is wrapped already; unwrap it or remove its plan first"):
        wrap(model, "layers.0")


def test_unwrap_takes_a_plan_off_as_well():
    plan = loop_plan()
    model, _ = KINDS["loop"]()
    before = fingerprint(model)

    plan.apply(model)
    unwrap(model)

    assert before.changes(fingerprint(model)) == []


def test_another_model_is_refused_with_all_differences():
    plan = loop_plan()  # made by the first test that asks for it, of a model that draws random numbers
    other = Loop(5)
    other.layers[0][0] = nn.Linear(64, 32)
    before = fingerprint(other)

    with pytest.raises(PlanError) as error:
        plan.apply(other)

    assert str(error.value) == (
        "the plan was made for another model; 6 differences:\n"
        "  `layers.4.0.weight` is not in the plan\n"
        "  `layers.4.0.bias` is not in the plan\n"
        "  `layers.4.2.weight` is not in the plan\n"
        "  `layers.4.2.bias` is not in the plan\n"
        "  `layers.0.0.weight` has shape (32, 64), the plan was made for (64, 64)\n"
        "  `layers.0.0.bias` has shape (32,), the plan was made for (64,)"
    )
    assert before.changes(fingerprint(other)) == []


def test_many_differences_are_cut_short():
    with pytest.raises(PlanError, match=r"(?s)another model; 3\d differences:.*\.\.\. and \d\d more$"):
        loop_plan().apply(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))))


def test_another_instance_of_the_same_model_is_the_same_model():
    torch.manual_seed(5)
    other = Loop()
    step = KINDS["loop"]()[1]
    plain = outcome(other, step)

    loop_plan().apply(other)

    assert recomputed_flops(other, step) > 0
    assert differences(outcome(other, step), plain) == []


# ---------------------------------------------------------------------------------------------------------- training


def trained(model, step, steps=3, **options):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {f"loss {i}": loss for i, loss in enumerate(losses)} | {
        name: parameter.detach().clone() for name, parameter in model.named_parameters()
    }


def test_training_is_bit_identical():
    expected = trained(*KINDS["loop"]())

    assert differences(trained(*planned_loop()), expected) == []


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: _saved_and_loaded(model),
        lambda model: copy.deepcopy(copy.deepcopy(model)),
    ],
    ids=["deepcopy", "pickle", "torch.save", "deepcopy twice"],
)
def test_a_copy_of_a_planned_model_is_planned_and_its_own(copied):
    model, step = planned_loop()
    expected = trained(*KINDS["loop"]())
    other = copied(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    assert recomputed_flops(other, step) == recomputed_flops(model, step) > 0
    assert differences(trained(other, step), expected) == []
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    loop_plan().remove(other)
    assert recomputed_flops(other, step) == 0
    assert recomputed_flops(model, step) > 0


def _saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_a_plan_tells_what_it_took():
    calls = Log()
    model, step = KINDS["loop"]()

    made = plan(model, lambda model: calls.append(1) or step(model), budget="60%", cost="flops")

    assert made.planning_steps == len(calls) > 2
    assert made.planning_seconds > 0


def test_a_plan_of_an_older_version_is_read(tmp_path):
    path = tmp_path / "plan.json"
    loop_plan().save(path)
    content = json.loads(path.read_text())
    del content["planning_seconds"], content["planning_steps"], content["conditions"][""]["compiled"]
    path.write_text(json.dumps(content))

    read = Plan.load(path)

    assert (read.planning_seconds, read.planning_steps, read.conditions[""].compiled) == (0.0, 0, None)
    assert "planning " not in str(read)
    assert read.tree == loop_plan().tree


def test_the_state_dict_is_that_of_the_plain_model():
    plain, _ = KINDS["loop"]()
    model, _ = planned_loop()

    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@pytest.mark.filterwarnings("ignore:.* has a plan for steps that begin without gradients")
def test_gradient_accumulation():
    def accumulated(model, step):
        for factor in (1.0, 2.0, 3.0):
            (factor * step(model)).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    assert differences(accumulated(*planned_loop()), accumulated(*KINDS["loop"]())) == []


@pytest.mark.filterwarnings("ignore::torchremat.PlanWarning")  # it was planned without autocast
def test_grad_scaler():
    def scaled(model, step):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = step(model)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    assert differences(scaled(*planned_loop()), scaled(*KINDS["loop"]())) == []


def test_double_backward():
    def penalised(model, step):
        loss = step(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum((grad**2).sum() for grad in grads).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

    assert differences(penalised(*planned_loop()), penalised(*KINDS["loop"]())) == []


def test_retained_graphs():
    def twice(model, step):
        loss = step(model)
        loss.backward(retain_graph=True)
        loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    assert differences(twice(*planned_loop()), twice(*KINDS["loop"]())) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_a_call_is_plain_and_warns_of_nothing(mode):
    model, _ = planned_loop()
    plain, _ = KINDS["loop"]()
    larger = inputs(1024, 64)

    with mode():
        assert torch.equal(model(larger), plain(larger))
        assert torch.equal(model.eval()(larger), plain.eval()(larger))


def test_generation_under_a_plan_is_generation():
    model, step = zoo.gpt2(blocks=3, width=64)
    made = plan(model, step, budget="75%")
    prompt = torch.arange(2, 10).view(1, 8)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(prompt, **options)

    made.apply(model)

    assert torch.equal(model.generate(prompt, **options), expected)
    model.train()
    assert recomputed_flops(model, step) > 0


def test_a_larger_input_warns_once_and_is_exact():
    model, _ = planned_loop()
    plain, _ = KINDS["loop"]()
    larger = inputs(300, 64)

    def step(m):
        return square(m(larger))

    with pytest.warns(ShapeWarning, match="the model.* is called with 19200 input elements, .* for 16384") as caught:
        first = outcome(model, step)
    assert caught[0].filename == __file__  # it pointed at a line of the library
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = outcome(model, step)
        smaller = outcome(model, lambda m: square(m(inputs(100, 64))))

    assert differences(first, outcome(plain, step)) == []
    assert differences(second, first) == []
    assert differences(smaller, outcome(plain, lambda m: square(m(inputs(100, 64))))) == []


class Scaled(nn.Module):
    """Divides by a number that a trainer may give as a tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))

    def forward(self, x, count=None):
        return self.layers(x).square().sum() / (1 if count is None else count)


def test_a_number_in_a_tensor_is_no_larger_input():
    model, x = Scaled(), torch.ones(8, 16)
    plan(model, lambda model: model(x), budget="min", cost="flops").apply(model)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, torch.tensor(8)).backward()


def test_more_calls_than_planned_warn_and_are_exact():
    model, step = planned_loop()
    plain, _ = KINDS["loop"]()
    for one in (model, plain):
        one.layers.append(one.layers[0])

    with pytest.warns(OrderWarning, match=r"`layers.0` was called 2 times in one forward, more often than planned for"):
        found = outcome(model, step)

    assert differences(found, outcome(plain, step)) == []


@pytest.mark.parametrize("order", [(0,), (3, 2, 1, 0), (1, 0, 2, 3), (0, 2), ()])
def test_another_order_of_calls_is_exact(order):
    model, _ = planned_loop()
    plain, _ = KINDS["loop"]()
    deep = replace(loop_plan(), tree=(RegionNode((KeepNode(0), KeepNode(1), RegionNode((KeepNode(2), KeepNode(3))))),))
    nested, _ = KINDS["loop"]()
    deep.apply(nested)

    def step(m):
        x = inputs() * m.layers[0][0].bias
        for index in order:
            x = m.layers[index](x)
        return square(x)

    class Reordered(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self):
            return step(self.inner)

    expected = outcome(plain, step)
    for one in (model, nested):
        one.forward.own, inner = None, one
        assert differences(outcome(inner, step), expected) == []


class Drops(nn.Module):
    """Layer drop: leaves layers out at random."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()) < 0.6:
                x = layer(x)
        return x


def test_layer_drop_under_a_plan_of_a_full_forward_is_exact():
    torch.manual_seed(0)
    model, full = Drops(), Loop(6)
    full.load_state_dict(model.state_dict())
    x = inputs()
    made = plan(full, lambda m: square(m(x)), budget="70%")
    runs = [outcome(model, lambda m: square(m(x * m.layers[0][0].bias)), seed=seed) for seed in range(5)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OrderWarning)
        made.apply(model)
        found = [outcome(model, lambda m: square(m(x * m.layers[0][0].bias)), seed=seed) for seed in range(5)]

    assert [differences(*both) for both in zip(found, runs, strict=True)] == [[]] * 5


def test_two_plans_on_two_models():
    torch.manual_seed(0)
    first, step = planned_loop()
    second = nn.Sequential(*(linear() for _ in range(4)))
    both = plan(second, step, budget="100%")
    both = replace(both, tree=(RegionNode((KeepNode(0), KeepNode(1))), RegionNode((KeepNode(2),)), KeepNode(3)))
    plain = [outcome(model, step) for model in (KINDS["loop"]()[0], second)]

    both.apply(second)
    found = [outcome(model, step) for model in (first, second)]

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return self.second(self.first(x))

    assert [differences(*one) for one in zip(found, plain, strict=True)] == [[], []]
    assert recomputed_flops(Pair(), step) >= recomputed_flops(first, step) + recomputed_flops(second, step)


def test_a_plan_applied_in_one_thread_trains_in_another():
    expected = trained(*KINDS["loop"]())
    model, step = planned_loop()
    found = []

    thread = threading.Thread(target=lambda: found.append(trained(model, step)))
    thread.start()
    thread.join()

    assert differences(found[0], expected) == []


def test_two_threads_run_one_planned_model_at_once():
    model, _ = planned_loop()
    plain, _ = KINDS["loop"]()
    batches = [inputs(128, 64) * (i + 1) for i in range(4)]

    def gradient(one, x):
        return torch.autograd.grad(square(one(x)), one.layers[0][0].weight)[0]

    expected = [gradient(plain, x) for x in batches]
    found = [None] * 4
    threads = [threading.Thread(target=lambda i=i: found.__setitem__(i, gradient(model, batches[i]))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_data_parallel_is_refused():
    model, _ = planned_loop()

    with pytest.raises(UnsupportedError, match="use DistributedDataParallel"):
        model._replicate_for_data_parallel()


def test_forward_hooks_that_change_outputs_run_once_in_forward():
    ran = []

    def doubled(module, args, output):
        ran.append(1)
        return 2 * output

    model, step = KINDS["loop"]()
    for layer in model.layers:
        layer.register_forward_hook(doubled)
    expected = outcome(model, step)
    made = replace(loop_plan(), tree=tuple(RegionNode((KeepNode(unit),)) for unit in range(4)))
    ran.clear()

    made.apply(model)
    found = outcome(model, step)

    assert differences(found, expected) == []
    assert len(ran) == 4


def test_buffers_that_count_end_as_after_one_forward():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = block()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("mean", torch.zeros(64))

        def forward(self, x):
            self.calls += 1
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.inner(x) + self.mean

    def factory():
        torch.manual_seed(0)
        return nn.Sequential(*(Counts() for _ in range(4)))

    x = inputs()
    step = lambda m: square(m(x))  # noqa: E731
    model = factory()
    made = replace(
        plan(model, step, budget="100%"),
        tree=(RegionNode((KeepNode(0), RegionNode((KeepNode(1), KeepNode(2))))), KeepNode(3)),
    )

    made.apply(model)

    assert differences(trained(model, step), trained(factory(), step)) == []
    assert [int(one.calls) for one in model] == [3, 3, 3, 3]


def test_ddp_of_a_planned_model(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        expected = trained(*KINDS["loop"]())
        model, step = planned_loop()
        found = trained(nn.parallel.DistributedDataParallel(model), step)
        flops = recomputed_flops(model, step)
    finally:
        dist.destroy_process_group()

    assert differences({name.removeprefix("module."): value for name, value in found.items()}, expected) == []
    assert flops > 0


@pytest.mark.parametrize("name", ["unet", "resnet", "gpt dropout"])
def test_training_of_the_models_is_bit_identical_at_the_floor(name):
    make = {
        "unet": lambda: models.unet_step(batch=2, size=16, width=8),
        "resnet": lambda: models.resnet_step(batch=4, size=16, width=8),
        "gpt dropout": lambda: models.gpt_step(blocks=3, width=32, context=64, batch=2, dropout=0.1),
    }[name]
    model, step = make()
    planner = Planner(model, step)
    planner.plan(planner.floor_bytes).apply(model)

    torch.manual_seed(3)
    found = trained(model, step)
    flops = recomputed_flops(model, step)
    plain, step = make()
    torch.manual_seed(3)
    expected = trained(plain, step)

    assert differences(found, expected) == []
    assert flops > 0


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.utils.parametrizations.weight_norm,
        torch.nn.utils.parametrizations.spectral_norm,
        torch.nn.utils.parametrizations.orthogonal,
    ],
)
def test_parametrizations(norm):
    def factory():
        torch.manual_seed(0)
        return nn.Sequential(*(norm(linear()) for _ in range(4)))

    x = inputs()
    step = lambda m: square(F.gelu(m(x)))  # noqa: E731
    model = factory()
    made = replace(plan(model, step, budget="100%"))
    count = len(made.units)
    made = replace(made, tree=(RegionNode((RegionNode((KeepNode(0),)), *map(KeepNode, range(1, count)))),))

    made.apply(model)

    assert differences(trained(model, step), trained(factory(), step)) == []
    assert recomputed_flops(model, step) > 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_inside_a_plan():
    def factory():
        torch.manual_seed(0)
        return nn.Sequential(*(torch.compile(block(), backend="eager") for _ in range(4)))

    x = inputs()
    step = lambda m: square(m(x))  # noqa: E731
    model = factory()
    made = plan(model, step, budget="75%")

    made.apply(model)

    assert differences(outcome(model, step), outcome(factory(), step)) == []
    assert recomputed_flops(model, step) > 0


def test_a_plan_that_is_not_on_the_model_takes_nothing_off():
    # Whatever was on the model was stripped, and the next step ran out of memory.
    model, step = KINDS["loop"]()
    made = loop_plan()

    with pytest.raises(PlanError, match=r"this plan is not on the model\. On it is nothing"):
        made.remove(model)

    wrap(model, "layers.1")
    before = fingerprint(model)
    with pytest.raises(PlanError, match=r"this plan is not on the model\. On it is `wrap` of `layers\.1`"):
        made.remove(model)
    assert before.changes(fingerprint(model)) == []
    unwrap(model)

    other = plan(model, step, budget="100%")
    other.apply(model)
    before = fingerprint(model)
    with pytest.raises(PlanError, match=r"On it is another plan\. Remove the plan that was applied, or take all off"):
        made.remove(model)
    assert before.changes(fingerprint(model)) == []
    assert (made.is_on(model), other.is_on(model)) == (False, True)


def test_a_plan_takes_off_its_own_and_what_is_wrapped_beside_it_stays():
    model, _ = KINDS["loop"]()
    made = loop_plan()
    made.apply(model)
    wrap(model, "layers.1.0")

    made.remove(model)

    assert [name for name, module in model.named_modules() if is_wrapped(module)] == ["layers.1.0"]


def test_a_plan_is_removed_once():
    model, _ = KINDS["loop"]()
    made = loop_plan()
    made.apply(model)

    made.remove(model)

    with pytest.raises(PlanError, match="On it is nothing"):
        made.remove(model)
