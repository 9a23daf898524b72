"""A budget in transformers' Trainer."""

import re

import peft
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import torchremat
from interop.trainers import Small, Tokens, Unshuffled, llama, train
from optimizing.loops import equal
from torchremat import Disk
from torchremat.tensors.sizes import format_bytes

MemoryBudget = torchremat.interop.transformers.MemoryBudget

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def budget(size, **options):
    """A callback that is quick to plan."""
    return MemoryBudget(size, **{"cost": "flops", "operators": False, **options})


def lora():
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return peft.get_peft_model(llama(), config)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        (
            {
                "eval_strategy": "steps",
                "eval_steps": 1,
                "gradient_accumulation_steps": 2,
                "label_smoothing_factor": 0.1,
            },
            llama,
        ),
        ({"bf16": True}, lora),
    ],
    ids=["evaluation and accumulation", "bf16 and lora"],
)
def test_the_training_is_the_same_within_the_budget(tmp_path, options, model):
    plain = train(tmp_path, model=model(), **options)
    ours = train(tmp_path, [budget("75%")], model=model(), **options)

    assert ours == plain
    (row,) = ours.logged
    assert row["step"] == 0
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    assert row["memory_predicted_bytes"] == pytest.approx(row["memory_measured_bytes"], rel=0.01)
    assert row["memory_slowdown"] > 1  # something is recomputed
    assert ours.is_bare
    assert not {"training_step", "compute_loss"} & vars(ours.trainer).keys()
    for one, name in ((plain, "plain"), (ours, "ours")):
        one.model.save_pretrained(tmp_path / name)
    assert folder(tmp_path / "ours") == folder(tmp_path / "plain")


class Looking(TrainerCallback):
    def __init__(self, callback):
        self.callback, self.seen = callback, []

    def on_step_end(self, *_, **__):
        self.seen.append(self.callback.plan)


def test_the_callback_says_what_it_does_and_shows_its_plan(tmp_path, capfd):
    callback = budget("75%")
    looking = Looking(callback)

    ours = train(tmp_path, [callback, looking])

    assert looking.seen
    assert all(one is looking.seen[0] and one.recomputed_calls > 0 for one in looking.seen)
    assert callback.plan is None
    first, last = [line for line in capfd.readouterr().err.splitlines() if line.startswith("torchremat: ")]
    assert first == "torchremat: planning for a budget of 75%, for batches up to this one: a few dozen of its steps"
    measured = format_bytes(int(ours.logged[0]["memory_measured_bytes"]))
    assert re.match(rf"torchremat: planned in \d+\.\d s and \d+ steps: {measured} measured, .* allowed; \d+", last)


class Failing(TrainerCallback):
    """Lets the backward of the third step fail at its end."""

    def on_step_begin(self, _, state, *__, model, **___):
        if state.global_step == 2:
            next(model.parameters()).register_hook(self.fail)

    def fail(self, _):
        raise RuntimeError("out of memory")


def test_a_backward_that_fails_in_the_middle_says_where_its_step_stands(tmp_path):
    callbacks = [budget("min", release_gradients=True), Failing()]

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        train(tmp_path, callbacks, max_grad_norm=0)

    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"a backward has failed when \d+ of \d+ parameters had made this step", notes)


BELOW = {"release_gradients": True, "optimizer_store": Disk}
SAVING = {"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 3}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The plain training and its folder, and the bytes of the lowest plan, all of whose gradients are kept."""
    folder = tmp_path_factory.mktemp("plain")
    plain = train(folder, **SAVING)
    for row in plain.others:
        row.pop("grad_norm", None)  # of all gradients
    floor = train(tmp_path_factory.mktemp("floor"), [budget("min")], **SAVING)
    return plain, folder, floor.logged[0]["memory_measured_bytes"]


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ("min", BELOW),
        ("min", {**BELOW, "release_gradients": "auto"}),
        ("1.2MB", {"release_gradients": True, "shapes": True}),
    ],
    ids=["both", "auto", "shapes"],
)
def test_the_training_is_the_same_with_released_gradients(tmp_path, size, options, kept):
    plain, checkpoints, floor = kept
    # A store of the module's would have its threads until the tests end.
    options = {name: one() if one is Disk else one for name, one in options.items()}
    ours = train(tmp_path, [budget(size, **options)], **SAVING)

    assert ours == plain
    row = ours.logged[-1]
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    parameter_bytes = sum(one.nbytes for one in ours.model.parameters())
    if "shapes" not in options:  # whose first measured step has no state yet
        assert row["memory_predicted_bytes"] == row["memory_measured_bytes"]
        assert row["memory_measured_bytes"] < floor - 1.5 * parameter_bytes
    assert ours.is_bare
    assert not any(getattr(one, "_post_accumulate_grad_hooks", None) for one in ours.model.parameters())
    states = [torch.load(one / "checkpoint-3/optimizer.pt") for one in (checkpoints, tmp_path)]
    assert equal(*states)


def test_parameters_wait_in_a_store(tmp_path):
    def wide():
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 256}
        return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))

    training = {"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 3}
    plain = train(tmp_path / "plain", model=wide(), **training)
    store = Disk()
    options = {"release_gradients": True, "optimizer_store": store, "parameter_store": store}

    ours = train(tmp_path / "ours", [budget("min", **options)], model=wide(), **training)

    assert equal([*ours.model.parameters()], [*plain.model.parameters()])
    row = ours.logged[-1]
    assert row["memory_measured_bytes"] <= row["memory_predicted_bytes"] <= row["memory_budget_bytes"]
    parameter_bytes = sum(one.nbytes for one in ours.model.parameters())
    assert store.statistics.peak_stored_bytes > 2.9 * parameter_bytes  # with the optimizer's state
    assert ours.is_bare


def test_the_last_of_several_backwards_releases(tmp_path):
    training = {"max_grad_norm": 0, "gradient_accumulation_steps": 2}
    plain = train(tmp_path, **training)
    floor = train(tmp_path, [budget("min")], **training)
    ours = train(tmp_path, [budget("min", release_gradients=True)], **training)

    for row in plain.others:
        row.pop("grad_norm", None)
    assert ours == plain
    assert ours.recomputed == floor.recomputed > 0
    assert ours.logged[0]["memory_measured_bytes"] <= floor.logged[0]["memory_measured_bytes"]
    assert ours.is_bare


@pytest.mark.parametrize("releases", [True, "auto"])
def test_a_training_that_needs_all_gradients_is_refused(tmp_path, releases):
    words = r"`TrainingArguments\(max_grad_norm=1.0\)` clips by the norm of all of them. Set `max_grad_norm=0`"

    with pytest.raises(torchremat.UnsupportedError, match=words):
        train(tmp_path, [budget("75%", release_gradients=releases)])


def test_once_a_larger_batch_comes_each_size_has_a_plan(tmp_path, capfd):
    data = {"data": Tokens(24, 64, 40, count=12), "kind": Unshuffled, "max_steps": 3}
    plain = train(tmp_path, **data)
    needed = train(tmp_path, [budget("100%")], **data).logged[-1]["memory_measured_bytes"]
    capfd.readouterr()
    ours = train(tmp_path, [budget(int(0.8 * needed))], **data)

    assert ours == plain and ours.is_bare
    assert [row["step"] for row in ours.logged] == [0, 3]  # the first plan keeps everything
    first, last = ours.logged
    assert first["memory_slowdown"] == 1 < last["memory_slowdown"]
    assert first["memory_measured_bytes"] < last["memory_measured_bytes"] <= last["memory_budget_bytes"]
    assert capfd.readouterr().err.count("planned in") == 1


class Hiding(Small):
    """A model that needs more where a token says so, which no size of a batch shows."""

    def forward(self, input_ids, labels=None):
        found = super().forward(input_ids, labels)
        if (input_ids == 63).any():
            found["loss"] = found["loss"] + 0 * torch.ones(300_000, requires_grad=True).exp().sum()
        return found


def test_a_step_above_the_budget_is_warned_of_and_the_training_goes_on(tmp_path):
    tokens = Tokens(24, 40, 56, 64, 80, count=20)
    tokens.rows = [row.clamp(max=62) for row in tokens.rows]
    tokens.rows[-1][0] = 63
    data = {"data": tokens, "kind": Unshuffled, "max_steps": 5}
    plain = train(tmp_path, model=Hiding(), **data)
    needed = train(tmp_path, [budget("100%")], model=Hiding(), **data).logged[0]["memory_measured_bytes"]

    with pytest.warns(torchremat.BudgetWarning, match=r"was measured at .* above the budget"):
        ours = train(tmp_path, [budget(int(3 * needed))], model=Hiding(), **data)

    assert ours == plain


def test_a_share_is_of_the_largest_batch_so_far(tmp_path):
    data = {"data": Tokens(24, 64, 40, count=12), "kind": Unshuffled, "max_steps": 3}
    ours = train(tmp_path, [budget("80%")], **data)

    assert ours == train(tmp_path, **data)
    assert [row["step"] for row in ours.logged] == [0, 1]
    first, second = ours.logged
    assert first["memory_budget_bytes"] < second["memory_measured_bytes"] <= second["memory_budget_bytes"]


def test_each_shape_has_a_plan(tmp_path):
    data = {"data": Tokens(24, 64, 40, count=12), "kind": Unshuffled, "max_steps": 3}
    plain = train(tmp_path, **data)
    ours = train(tmp_path, [budget("1.2MB", shapes=True)], **data)

    assert ours == plain
    (row,) = ours.logged
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"] == 1_200_000
    assert row["memory_slowdown"] > 1
    assert ours.is_bare


def test_checkpoints_are_those_of_the_plain_training_and_are_resumed(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    plain = train(tmp_path / "plain", **options)
    resumed = train(tmp_path / "ours", [budget("75%")], resume=str(tmp_path / "plain/checkpoint-2"), **options)

    assert resumed.logged[0]["step"] == 2
    assert all(map(torch.equal, resumed.model.parameters(), plain.model.parameters()))
    expected, saved = (folder(tmp_path / name / "checkpoint-4") for name in ("plain", "ours"))
    assert saved.keys() == expected.keys()
    assert saved["model.safetensors"] == expected["model.safetensors"]
    assert saved["rng_state.pth"] == expected["rng_state.pth"]


def folder(path):
    return {one.name: one.read_bytes() for one in path.iterdir()}


class Counting(Trainer):
    """A loss of its own, with a state beside the model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.told, self.shuffled = 0, {"train": []}, torch.Generator().manual_seed(2)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs)["logits"]
        order = torch.randperm(len(labels), generator=self.shuffled)
        self.losses += 1
        self.told["train"].append(len(labels))
        return torch.nn.functional.cross_entropy(logits[order].flatten(0, 1), labels[order].flatten())


def test_a_loss_of_the_trainers_own_is_planned_for_and_leaves_no_sign(tmp_path):
    plain = train(tmp_path, kind=Counting)
    ours = train(tmp_path, [budget("75%")], kind=Counting)

    assert ours == plain
    assert ours.logged[0]["memory_slowdown"] > 1
    assert (ours.trainer.losses, ours.trainer.told) == (3, {"train": [4, 4, 4]})


class Other(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs)["loss"]
        loss.backward()
        return loss.detach()


def test_a_trainer_that_computes_its_loss_elsewhere_is_told(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match=r"Other has trained without calling `compute_loss`"):
        train(tmp_path, [budget("75%")], kind=Other)


@pytest.mark.parametrize("flag", ["gradient_checkpointing", "activation_checkpointing"])
def test_a_trainer_that_recomputes_is_refused(tmp_path, flag):
    with pytest.raises(torchremat.UnsupportedError, match=r"Set `TrainingArguments\(gradient_checkpointing=False\)`"):
        train(tmp_path, [budget("75%")], model=llama(), **{flag: True})


def test_a_model_that_recomputes_is_refused(tmp_path):
    model = llama()
    model.gradient_checkpointing_enable()

    with pytest.raises(torchremat.UnsupportedError, match=r"Call `model.gradient_checkpointing_disable\(\)`"):
        train(tmp_path, [budget("75%")], model=model)


def test_a_budget_that_is_too_small_is_told_in_the_trainers_words(tmp_path):
    model = Small()
    before = {name: one.clone() for name, one in model.state_dict().items()}

    with pytest.raises(torchremat.BudgetError, match=r"Smallest budget that works: \d+ bytes") as told:
        train(tmp_path, [budget(100_000)], model=model)

    (note,) = told.value.__notes__
    assert "`per_device_train_batch_size`" in note
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "words"),
    [
        (("20Gigs",), {}, torchremat.BudgetError, "'20Gigs' is not a size"),
        (("0%",), {}, torchremat.BudgetError, "a percentage above 0"),
        (("20GiB",), {"margin": "a bit"}, torchremat.BudgetError, "not a size"),
        (("70%",), {"shapes": True}, torchremat.BudgetError, "give the budget in bytes"),
        (("20GiB",), {"shapes": "yes"}, torchremat.UnsupportedError, "shapes='yes'"),
        (("20GiB",), {"cost": "time"}, torchremat.UnsupportedError, "cost"),
        (("20GiB",), {"release_gradients": "yes"}, torchremat.UnsupportedError, "release_gradients='yes'"),
        (("20GiB",), {"release_gradients": "auto", "shapes": True}, torchremat.UnsupportedError, "in one way for all"),
    ],
)
def test_mistakes_are_told_where_the_callback_is_made(arguments, options, kind, words):
    with pytest.raises(kind, match=words):
        MemoryBudget(*arguments, **options)


class WithoutGrad(Small):
    def forward(self, input_ids, labels=None):
        with torch.no_grad():
            return super().forward(input_ids, labels)


class Writing(Small):
    """Writes in place to what autograd has saved, which no training can do."""

    def forward(self, input_ids, labels=None):
        y = self.embed(input_ids).exp()
        logits = self.head(self.net(y))
        y.add_(1)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def planned():
    model = Small()
    torchremat.wrap(model.net, "1")
    return model


def stepping():
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    return model


@pytest.mark.filterwarnings("ignore::torchremat.errors.RepeatWarning")
@pytest.mark.parametrize(
    ("model", "options", "kind", "words", "note"),
    [
        (WithoutGrad, {}, torchremat.StepError, "does not require grad", "Here the step is `compute_loss`"),
        (Writing, {}, RuntimeError, "in ?place", ""),
        (planned, {}, torchremat.PlanError, "net.1", "give the trainer what `torchremat.unwrap"),
        (stepping, {}, torchremat.UnsupportedError, "the step trains", "train without `MemoryBudget`"),
        (
            Small,
            {"torch_compile": True, "torch_compile_backend": "eager"},
            torchremat.BudgetError,
            "compiled as one piece",
            r"`TrainingArguments\(torch_compile=True\)`",
        ),
    ],
    ids=["no grad", "written in place", "planned already", "steps in backward", "compiled"],
)
def test_what_can_be_done_is_told_in_the_trainers_words(tmp_path, model, options, kind, words, note):
    with pytest.raises(kind, match=words) as told:
        train(tmp_path, [budget("75%")], model=model(), **options)

    notes = getattr(told.value, "__notes__", [])
    assert re.search(note, "".join(notes))


def test_a_budget_above_the_device_has_no_advice_on_batches(tmp_path):
    with pytest.raises(torchremat.BudgetError, match="in all") as told:
        train(tmp_path, [budget("900TiB")])

    assert not hasattr(told.value, "__notes__")


def test_two_budgets_are_refused(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match="the trainer has two of these callbacks"):
        train(tmp_path, [budget("75%"), budget("75%")])


def test_the_class_in_the_place_of_a_callback_is_told_by_name(tmp_path):
    with pytest.raises(TypeError, match=r"MemoryBudget.__init__\(\) missing .* 'budget'"):
        train(tmp_path, [MemoryBudget])


class Crowded(Small):
    def forward(self, input_ids, labels=None):
        if len(input_ids) > 2 and self.training:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids, labels)


def test_a_smaller_batch_that_the_trainer_finds_is_planned_for(tmp_path):
    plain = train(tmp_path, model=Crowded(), auto_find_batch_size=True)
    ours = train(tmp_path, [budget("75%")], model=Crowded(), auto_find_batch_size=True)

    assert ours == plain
    assert ours.recomputed > 0
    assert ours.is_bare


class Stream(IterableDataset):
    """Of no length; its rows have words."""

    def __iter__(self):
        for row in Tokens(64, count=24):
            yield {**row, "words": "some"}


class Reading(Small):
    def forward(self, input_ids, labels=None, words=()):
        assert all(isinstance(one, str) for one in words)
        return super().forward(input_ids, labels)


def collated(rows):
    return {
        **{name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")},
        "words": [row["words"] for row in rows],  # accelerate counts the rows of what comes first
    }


@pytest.mark.parametrize(("size", "shapes"), [("75%", False), ("1.5MB", True)])
def test_a_stream_of_batches_with_words_is_planned_for(tmp_path, size, shapes):
    options = {"data": Stream(), "collator": collated, "remove_unused_columns": False, "gradient_accumulation_steps": 4}
    plain = train(tmp_path, model=Reading(), **{**options, "max_steps": 1})
    ours = train(tmp_path, [budget(size, shapes=shapes)], model=Reading(), **{**options, "max_steps": 1})

    assert ours == plain
    assert ours.recomputed > 0
