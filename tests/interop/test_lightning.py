"""A budget in Lightning's Trainer."""

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

import torchremat
from interop.trainers import Lit, fit, layers, loss_of, recomputes_of
from optimizing.loops import equal
from probes.regions import is_rehearsing

MemoryBudget = torchremat.interop.lightning.MemoryBudget

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '\\w+_dataloader' does not have many workers",
    "ignore:.*does not have a `val_dataloader`",
    "ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated",
    "ignore:`training_step` returned `None`",
    "ignore:.*batch_size.* from an ambiguous collection",
)


def budget(size, **options):
    """A callback that is quick to plan."""
    return MemoryBudget(size, **{"cost": "flops", "operators": False, **options})


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed", "gradient_clip_val": 0.1}], ids=str
)
def test_the_training_is_the_same_within_the_budget(tmp_path, options):
    plain = fit(tmp_path, **options)
    ours = fit(tmp_path, [budget("75%")], **options)

    assert ours == plain  # with all that the module logs
    assert ours.model.seen == plain.model.seen
    (row,) = ours.logged
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    assert row["memory_predicted_bytes"] == pytest.approx(row["memory_measured_bytes"], rel=0.01)
    assert row["memory_slowdown"] > 1  # something is recomputed
    assert ours.is_bare


def test_the_training_is_the_same_with_state_in_a_store(tmp_path):
    plain = fit(tmp_path)
    floor = fit(tmp_path, [budget("min")]).logged[0]["memory_measured_bytes"]
    ours = fit(tmp_path, [budget("min", optimizer_store=torchremat.Disk())])

    assert ours == plain
    (row,) = ours.logged
    assert row["memory_measured_bytes"] < floor - 1.5 * sum(one.nbytes for one in ours.model.parameters())
    assert ours.is_bare


class Noting(Lit):
    """Notes whether there are gradients when a forward begins."""

    def __init__(self):
        super().__init__()
        self.begun = []

    def training_step(self, batch, batch_idx):
        if not is_rehearsing():
            self.begun.append(any(one.grad is not None for one in self.parameters()))
        return super().training_step(batch, batch_idx)


class LooksLate(Noting):
    """Looks at the gradients of a step after the forward of the next one."""

    def on_before_zero_grad(self, optimizer):
        self.seen.append([None if one.grad is None else one.grad.sum().item() for one in self.parameters()])


@pytest.mark.parametrize(("module", "are_late"), [(Noting, False), (LooksLate, True)])
def test_gradients_are_dropped_before_the_forward_unless_somebody_looks_after_it(tmp_path, module, are_late):
    plain = fit(tmp_path, module=module())
    ours = fit(tmp_path, [budget("1GB")], module=module())

    assert ours == plain
    assert ours.model.seen == plain.model.seen
    # Lightning drops them before the validation in the middle.
    assert plain.model.begun == 2 * [False, True]
    assert ours.model.begun == 2 * [False, are_late]
    (row,), (lean,) = ours.logged, fit(tmp_path, [budget("1GB")]).logged
    parameter_bytes = sum(one.nbytes for one in ours.model.parameters())
    more_bytes = row["memory_measured_bytes"] - lean["memory_measured_bytes"]
    # All but the one that was made last at the peak.
    assert 0.99 * are_late * parameter_bytes <= more_bytes <= are_late * parameter_bytes


class ComesLate(Noting):
    def on_before_zero_grad(self, optimizer):
        """Does not look at them."""


def test_gradients_that_are_released_are_not_counted_for_who_may_look_late(tmp_path):
    ours = fit(tmp_path, [budget("min", release_gradients=True)], module=ComesLate())
    lean = fit(tmp_path, [budget("min", release_gradients=True)])

    bytes_of = [[row["memory_measured_bytes"] for row in one.logged] for one in (ours, lean)]
    assert len(bytes_of[0]) == 1 and bytes_of[0] == bytes_of[1]


class Scheduled(Lit):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


TWO = {"accumulate_grad_batches": 2, "max_steps": 5}
BY_VALUE = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("options", "releases"),
    [
        ({}, True),
        (BY_VALUE, "auto"),
        ({"precision": "bf16-mixed"}, "auto"),
        ({**TWO, **BY_VALUE}, True),
    ],
    ids=["plain", "clipped", "bf16", "accumulated and clipped"],
)
def test_the_training_is_the_same_with_released_gradients(tmp_path, options, releases):
    options = {"max_steps": 10, "val_check_interval": 8, **options}  # an epoch has 8 batches
    plain = fit(tmp_path, module=Scheduled(), **options)
    floor = fit(tmp_path, [budget("min")], module=Scheduled(), **options)

    ours = fit(tmp_path, [budget("min", release_gradients=releases)], module=Scheduled(), **options)

    assert ours == plain
    (row,), (least,) = ours.logged, floor.logged
    block_bytes = sum(one.nbytes for one in ours.model.net[1].parameters())
    assert row["memory_predicted_bytes"] == row["memory_measured_bytes"]
    assert ours.recomputed > 0 < floor.recomputed
    freed_bytes = least["memory_measured_bytes"] - row["memory_measured_bytes"]
    if "accumulate_grad_batches" in options:  # all gradients are there when the last of several backwards begins
        assert freed_bytes == 0
    else:  # those of a block or two are there at the lowest peak without a release, as the kernels of the CPU need
        assert 0.85 * block_bytes <= freed_bytes <= 2.15 * block_bytes
    assert ours.is_bare
    assert ours.trainer.gradient_clip_val == options.get("gradient_clip_val")
    assert not any(getattr(one, "_post_accumulate_grad_hooks", None) for one in ours.model.parameters())


def test_only_the_last_of_several_backwards_releases(tmp_path):
    released = []

    class Looking(Scheduled):
        def on_after_backward(self):
            shells = [type(one.grad).__name__ == "ReleasedGradient" for one in self.parameters()]
            assert all(shells) or not any(shells)
            released.append(shells[0])

    fit(tmp_path, [budget("min", release_gradients=True)], module=Looking(), max_steps=3, accumulate_grad_batches=3)

    assert released == [False, False, True, False, False, True, False, True]  # the epoch of eight batches ends


def test_a_training_with_released_gradients_goes_on_from_a_checkpoint(tmp_path):
    def trained(callbacks, checkpoint=None, steps=8):
        own = fit(tmp_path, callbacks(), module=Scheduled(), max_steps=steps, checkpoint=checkpoint)
        own.trainer.save_checkpoint(path := tmp_path / f"{len(list(tmp_path.iterdir()))}.ckpt")
        return own, path

    def releasing():
        return [budget("min", release_gradients=True)]

    plain, whole = trained(list, trained(list)[1], 12)
    ours, own = trained(releasing, trained(releasing)[1], 12)
    mixed, _ = trained(list, trained(releasing)[1], 12)

    assert ours == plain == mixed
    assert ours.recomputed > 0
    states = [torch.load(one, weights_only=False) for one in (whole, own)]
    for name in ("optimizer_states", "lr_schedulers", "global_step"):
        assert equal(states[0][name], states[1][name])


HALF = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))


class Clipping(Lit):
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("releases", [True, "auto"])
@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (Lit, {"gradient_clip_val": 0.1}, r"`Trainer\(gradient_clip_val=0.1\)` clips by the norm of all of them"),
        (Clipping, {}, "`configure_gradient_clipping` of Clipping reads them"),
        (Lit, {"plugins": [HALF]}, r'Train with `"bf16-mixed"`'),
    ],
)
def test_a_training_that_needs_all_gradients_is_refused(tmp_path, module, options, words, releases):
    with pytest.raises(torchremat.UnsupportedError, match=words):
        fit(tmp_path, [budget("75%", release_gradients=releases)], module=module(), **options)


def test_each_shape_has_a_plan_with_released_gradients(tmp_path):
    plain = fit(tmp_path, sizes=(32, 128, 64, 96))
    ours = fit(tmp_path, [budget("1.4MB", shapes=True, release_gradients=True)], sizes=(32, 128, 64, 96))

    assert ours == plain
    assert ours.logged[0]["memory_slowdown"] > 1
    with pytest.raises(torchremat.UnsupportedError, match="with shapes=True each backward is a step"):
        fit(tmp_path, [budget("1.4MB", shapes=True, release_gradients=True)], **TWO)


class Adversaries(Lit):
    """Two optimizers, each with a loss of its own, and gradients that the module releases itself if it is told to."""

    def __init__(self, *, releases):
        super().__init__()
        self.automatic_optimization = False
        self.critic = layers()
        self.releases = releases

    def configure_optimizers(self):
        return [torch.optim.AdamW(one.parameters(), 1e-2) for one in (self.net, self.critic)]

    def on_train_start(self):
        if self.releases:
            for own, optimizer in zip((self.net, self.critic), self.optimizers(), strict=True):
                torchremat.release_gradients(own, optimizer.optimizer)

    def training_step(self, batch, batch_idx):
        for own, optimizer in zip((self.net, self.critic), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(own(batch).square().mean())
            self.seen += {type(one.grad).__name__ for one in own.parameters()}
            optimizer.step()


def test_a_module_with_several_optimizers_releases_their_gradients_itself(tmp_path):
    plain = fit(tmp_path, module=Adversaries(releases=False), max_steps=20)
    ours = fit(tmp_path, module=Adversaries(releases=True), max_steps=20)

    assert ours == plain
    assert set(plain.model.seen) == {"Tensor"}
    assert set(ours.model.seen) == {"ReleasedGradient"}


class ReadingGradients(Lit):
    def on_before_optimizer_step(self, optimizer):
        torch.nn.utils.get_total_norm([one.grad for one in self.parameters()])


def test_code_that_reads_a_released_gradient_is_told(tmp_path):
    module = ReadingGradients()

    with pytest.raises(torchremat.UnsupportedError, match="is read, and it was released: AdamW has made") as told:
        fit(tmp_path, [budget("min", release_gradients=True)], module=module)

    assert "Call `optimizer.step()` first" in told.value.__notes__[-1]


def test_once_a_larger_batch_comes_each_size_has_a_plan(tmp_path):
    needed = fit(tmp_path, [budget("1GiB")], sizes=(128,), max_steps=1).logged[0]["memory_measured_bytes"]
    plain = fit(tmp_path, sizes=(32, 128), max_steps=8)
    ours = fit(tmp_path, [budget(int(0.75 * needed))], sizes=(32, 128), max_steps=8)

    assert ours == plain
    assert [row["step"] for row in ours.logged] == [0, 8]
    assert ours.logged[0]["memory_slowdown"] == 1 < ours.logged[1]["memory_slowdown"]


def test_each_shape_has_a_plan(tmp_path):
    plain = fit(tmp_path, sizes=(32, 128, 64, 96))
    ours = fit(tmp_path, [budget("1.5MB", shapes=True)], sizes=(32, 128, 64, 96))

    assert ours == plain
    (row,) = ours.logged
    assert row["memory_measured_bytes"] <= row["memory_budget_bytes"]
    assert row["memory_slowdown"] > 1
    assert ours.is_bare


class Adversarial(Lit):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_module_that_runs_backward_itself_is_refused(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match="`automatic_optimization = False`"):
        fit(tmp_path, [budget("75%")], module=Adversarial())


class Recomputing(Lit):
    def __init__(self):
        super().__init__()
        self.net.gradient_checkpointing = True


def test_a_module_that_recomputes_is_refused(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match=r"model.gradient_checkpointing_disable\(\)"):
        fit(tmp_path, [budget("75%")], module=Recomputing())


def test_a_budget_that_is_too_small_is_told_in_the_trainers_words(tmp_path):
    module = Lit()
    before = [one.clone() for one in module.parameters()]

    with pytest.raises(torchremat.BudgetError, match=r"Smallest budget that works: \d+ bytes") as told:
        fit(tmp_path, [budget(100_000)], module=module)

    assert "`accumulate_grad_batches`" in told.value.__notes__[0]
    assert all(map(torch.equal, module.parameters(), before))


class Skipping(Lit):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if batch_idx else None


@pytest.mark.parametrize(("size", "shapes"), [("75%", False), ("1.5MB", True)])
def test_a_batch_without_a_loss_is_left_out(tmp_path, size, shapes):
    plain = fit(tmp_path, module=Skipping())
    ours = fit(tmp_path, [budget(size, shapes=shapes)], module=Skipping())

    assert ours == plain
    assert ours.model.seen == plain.model.seen
    assert len(ours.logged) == 1


class Searching(Lit):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_that_runs_the_step_itself_is_refused(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match="LBFGS runs the training step itself"):
        fit(tmp_path, [budget("75%")], module=Searching())


class Drawing(Lit):
    def training_step(self, dataloader_iter):
        batch, _, _ = next(dataloader_iter)
        return self.net(batch).square().mean()


class Idle(Lit):
    def configure_optimizers(self):
        return None


class WithoutGrad(Lit):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            return self.net(batch).square().mean()


class Planned(Lit):
    def __init__(self):
        super().__init__()
        torchremat.wrap(self.net, "1")


@pytest.mark.filterwarnings("ignore:.*configure_optimizers` returned `None`", "ignore:.*dataloader_iter")
@pytest.mark.parametrize(
    ("module", "kind", "words", "note"),
    [
        (Drawing, torchremat.UnsupportedError, r"Write it as `training_step\(batch, batch_idx\)`", ""),
        (Idle, torchremat.UnsupportedError, "`configure_optimizers` returns no optimizer", ""),
        (WithoutGrad, torchremat.StepError, "does not require grad", "Here the step is `training_step`"),
        (Planned, torchremat.PlanError, "net.1", "give the module what `torchremat.unwrap"),
    ],
)
def test_what_can_be_done_is_told_in_lightnings_words(tmp_path, module, kind, words, note):
    with pytest.raises(kind, match=words) as told:
        fit(tmp_path, [budget("75%")], module=module())

    assert note in "".join(getattr(told.value, "__notes__", []))


def test_two_budgets_are_refused(tmp_path):
    with pytest.raises(torchremat.UnsupportedError, match="the trainer has two of these callbacks"):
        fit(tmp_path, [budget("75%"), budget("75%")])


class Written(Lit):
    """Trains another way than it was planned: what a region holds is written before the backward."""

    def on_before_backward(self, loss):
        with torch.no_grad():
            self.net[1][1].weight.mul_(2)


def test_an_error_in_the_backward_is_told_in_lightnings_words_too(tmp_path):
    with pytest.raises(torchremat.MutationError) as told:
        fit(tmp_path, [budget("min")], module=Written())

    assert "train without `MemoryBudget`" in told.value.__notes__[-1]


class Failing(Lit):
    def on_train_batch_end(self, *_):
        raise ValueError("on purpose")


def test_a_training_that_fails_leaves_the_model_bare(tmp_path):
    module = Failing()

    with pytest.raises(ValueError, match="on purpose"):
        fit(tmp_path, [budget("75%")], module=module)

    assert not any("forward" in vars(one) for one in module.modules() if isinstance(one, nn.Module))


def with_fabric(precision):
    """Model, optimizer and Fabric, three batches, and the recomputes so far."""
    torch.manual_seed(1)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    model = layers()
    recomputed = recomputes_of(model)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    return fabric, model, optimizer, [torch.randn(4, 64, 16) for _ in range(3)], recomputed


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_what_fabric_has_set_up_is_planned_and_trains_the_same(precision):
    fabric, plain, optimizer, batches, _ = with_fabric(precision)
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(loss_of(plain, batch))
        optimizer.step()
    fabric, ours, optimizer, batches, recomputed = with_fabric(precision)
    torchremat.fit(ours, lambda model: loss_of(model, batches[0]), budget="75%", optimizer=optimizer, cost="flops")
    for batch in batches:
        optimizer.zero_grad()
        fabric.backward(loss_of(ours, batch))
        optimizer.step()

    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    assert recomputed.value > 0
    if precision == "bf16-mixed":  # Fabric looks after its backward as before
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"fabric\.backward"):
            loss_of(ours, batches[0]).backward()


def test_a_backward_that_is_not_fabrics_is_refused_where_gradients_count():
    fabric, model, optimizer, batches, _ = with_fabric("bf16-mixed")
    adaptive = torchremat.Adaptive(model, loss_of, budget="2MB", optimizer=optimizer, cost="flops")

    with pytest.raises(torchremat.UnsupportedError, match=r"with adaptive\.under\(batch\): fabric\.backward"):
        adaptive(batches[0])
    with adaptive.under(batches[0]):
        fabric.backward(loss_of(model, batches[0]))

    assert all(one.grad is not None for one in model.parameters())
