"""`release_gradients`: each parameter makes its part of the step when its gradient is complete, and the gradient goes.

NOTE [ When a parameter may be written ]
When autograd adds the last gradient to a parameter, all nodes that lead to it have run. Nodes run in the reverse order
of the forward, and a region's recompute ends at the last tensor that is still missing (Rule 5), so what may yet be
recomputed was computed before the parameter was first used. Exceptions are a use without a gradient
(`weight.detach()`), `early_stop=False`, and nodes that run in several threads. No list of them is needed: a part of a
step moves the version of its parameter, whatever kernel wrote it, and to read a parameter of another version than the
forward's is an error, in autograd and by Rule 10 in a region. So gradients are those of the plain loop, or there is an
error. Two limits: torch's own checkpoint compares no versions, and neither does a Function that keeps a parameter past
`save_for_backward`.

    backward     one gradient after the other is complete
                     small ones wait for others              waiting_gradients.py
                     its parameter steps                     partial_steps.py
                     `.grad` says that it was released       tombstones.py
    step()       what has a gradient still, if anything; hooks of the optimizer run
    zero_grad()  as ever
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchremat._compat.autograd import current_graph_task, retains_graph
from torchremat._compat.dynamo import outside_graphs
from torchremat.errors import UnsupportedError, check_flags
from torchremat.measuring.communication import is_reduced_in_buckets
from torchremat.measuring.optimizers import Optimizer, parameters_of
from torchremat.measuring.untouched import frees_gradient
from torchremat.optimizing.partial_steps import PartialSteps, partial_steps, steps_in_parts
from torchremat.optimizing.rehearsal import note_gradient
from torchremat.optimizing.scaled_losses import is_scaled, watch_scalers
from torchremat.optimizing.tombstones import ReleasedGradient
from torchremat.optimizing.waiting_gradients import WaitingGradients, counted, share_of
from torchremat.regions.rehearsals import is_rehearsing


class GradientRelease:
    """Gradients of a model that are freed in the backward; see `release_gradients`, which makes it.

    A context manager: at its end, or with `remove()`, the model and the optimizer are as before.
    """

    def __init__(
        self,
        steps: PartialSteps,
        optimizer: Optimizer,
        *,
        accumulates: bool,
        clip_value: float | None,
        batch_bytes: int | None,
    ) -> None:
        self._owner = ref(steps)  # it owns this
        self._of, self._has_begun = steps.name, False
        self._accumulates, self._clip_value = accumulates, clip_value
        self._is_last = not accumulates
        self._norms: dict[int, Tensor] | None = None  # of gradients, in a pass that measures them
        self._most_norm: tuple[float, Tensor] | None = None
        self._tombstones: dict[int, ReleasedGradient] = {}
        self._hooks: list[RemovableHandle] = []
        self._hook, self._waiting_hook = ReleasingHook(self), ReleasingHook(self, may_wait=True)
        most_bytes = share_of(parameters_of([optimizer])) if batch_bytes is None else batch_bytes
        self._waiting = WaitingGradients(most_bytes, WeakMethod(self._step))
        self._waits = batch_bytes is not None  # also if state is in a store
        self._watch(optimizer)
        self._unwatch_scalers = watch_scalers(self)

    def _watch(self, optimizer: Optimizer) -> None:
        # torch refuses a hook for a frozen one, which has no gradient. FSDP2 calls the hooks of a sharded one.
        trained = [one for one in parameters_of([optimizer]) if one.requires_grad]
        new = [one for one in trained if self not in releases_of(one)]
        waiting = counted(trained, self._waiting.most_bytes) if new else ()
        for one in new:
            hook = self._waiting_hook if id(one) in waiting else self._hook
            self._hooks.append(one.register_post_accumulate_grad_hook(hook))

    def last_microbatch(self) -> None:
        """Declare that the next backward is the last one before `optimizer.step()`, so that it releases.

        Raises:
            UnsupportedError: `accumulates=True` was not said.
        """
        if not self._accumulates:
            raise UnsupportedError("last_microbatch(): each backward is the last one. Say `accumulates=True` first.")
        self._is_last = True

    @contextmanager
    def measured_norms(self) -> Generator[None]:
        """Free the gradients of the backward in the block once their norms are known; no parameter steps.

        The first of two passes that clip by the norm of all gradients; `clip_norm` comes between them.

        Raises:
            UnsupportedError: No backward has run in the block, or gradients accumulate over several.
        """
        if self._accumulates:
            raise UnsupportedError("measured_norms(): the gradients that have accumulated would be freed.")
        self._norms = norms = {}
        try:
            yield
        except BaseException:
            self._norms = None
            raise
        if not norms:
            raise UnsupportedError("measured_norms(): no backward has run in the block.")

    def clip_norm(self, max_norm: float) -> Tensor:
        """Let the next backward scale its gradients as `clip_grad_norm_` would, by the norms of `measured_norms`.

        Args:
            max_norm: The most that the norm of all gradients may be.

        Returns:
            The norm of all gradients, a scalar tensor.

        Raises:
            UnsupportedError: No norms were measured.
        """
        norms, self._norms = self._norms, None
        steps = self._owner()
        optimizer = None if steps is None else steps.optimizer()
        if norms is None or optimizer is None:
            raise UnsupportedError("clip_norm(): run the same backward in `with release.measured_norms():` first.")
        found = [norms[id(one)] for one in parameters_of([optimizer]) if id(one) in norms]
        norm = torch.linalg.vector_norm(torch.stack([one.to(found[0].device) for one in found]))
        self._most_norm = max_norm, norm
        return norm

    def remove(self) -> None:
        """Let gradients stay again. May be called twice.

        Raises:
            UnsupportedError: A step is open: a backward has released gradients, and `optimizer.step()` did not follow.
        """
        steps = self._owner()
        if steps is None or steps.release is not self:
            steps = None
        else:
            steps.check_closed("remove()")
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._unwatch_scalers()
        if steps is not None:
            steps.release = None
            steps.end()

    def __enter__(self) -> GradientRelease:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<GradientRelease of {self._of}: {len(self._hooks)} parameters>"

    # ----------------------------------------------------------------------------------------------------- backward

    def complete(self, parameter: Tensor) -> None:
        """Step on a parameter whose gradient is complete, at once or with others, and free the gradient."""
        steps = self._owner()
        if steps is None or parameter.grad is None:
            return
        if not is_rehearsing():
            if is_scaled():
                raise UnsupportedError(
                    f"the loss was scaled by a GradScaler, which skips the step of {self._of} if any gradient is not "
                    "finite; with torchremat.release_gradients parameters would step before that is known. None has "
                    "stepped. Train in bfloat16, which needs no scaler, or leave the gradients."
                )
            if not self._is_last and self._norms is None:
                return
            self._check_backward(steps, parameter)
            if self._norms is not None:
                self._norms[id(parameter)] = nn.utils.get_total_norm([parameter.grad])
                parameter.grad = None
                return
            if self._most_norm is not None:
                nn.utils.clip_grads_with_norm_([parameter], *self._most_norm)
            if self._clip_value is not None:
                nn.utils.clip_grad_value_([parameter], self._clip_value)
        self._step(self._waiting.add(parameter, waits=self._lets_wait(steps)))

    @property
    def steps(self) -> bool:
        """Whether a backward that runs now makes parts of the step."""
        return is_rehearsing() or (self._is_last and self._norms is None)

    def frees_gradients(self, *, may_wait: bool) -> bool:
        """Return whether no gradient remains from one backward to the next of parameters that may wait, or may not."""
        waits = may_wait and (steps := self._owner()) is not None and self._lets_wait(steps)
        return not self._accumulates and not waits

    def _lets_wait(self, steps: PartialSteps) -> bool:
        # State that comes in ahead of its part should come late, and so in small parts: see `StateMover`.
        return self._waits or steps.mover is None

    def _step(self, parameters: Sequence[Tensor]) -> None:
        steps = self._owner()
        if steps is None or not parameters:
            return
        if is_rehearsing():
            for one in parameters:
                if one.grad is not None:
                    note_gradient(one, one.grad)
            steps.rehearse(parameters, is_last=current_graph_task() < 0)
            for one in parameters:
                if frees_gradient(one):
                    one.grad = None
            return
        steps.step(parameters, partial(self._tombstone, steps))

    def _check_backward(self, steps: PartialSteps, parameter: Tensor) -> None:
        if not self._has_begun:  # the module may have been wrapped since
            optimizer = steps.optimizer()
            _check_reduction([] if optimizer is None else parameters_of([optimizer]))
            self._has_begun = True
        # Outside of a backward FSDP2 may call it, for the last gradients.
        if current_graph_task() >= 0 and retains_graph():
            raise UnsupportedError(
                f"the gradient of {steps.name_of(parameter)} cannot be released in a backward with `retain_graph=True` "
                "or `create_graph=True`: another backward through the same graph reads the parameter. Run the last "
                "backward without, and with several before it say release_gradients(..., accumulates=True)."
            )
        if steps.is_done(parameter):
            if failed := steps.failed():
                raise UnsupportedError(f"the gradient of {steps.name_of(parameter)} is complete again: {failed}")
            raise UnsupportedError(
                f"the gradient of {steps.name_of(parameter)} is complete for a second time, and its parameter has "
                "stepped on the first. Call `optimizer.step()` after each backward; with several backwards for a step "
                "say release_gradients(..., accumulates=True) and last_microbatch(). If it was another loss, like "
                "a generator's through its discriminator, `requires_grad_(False)` keeps these parameters out of it."
            )

    def _tombstone(self, steps: PartialSteps, parameter: Tensor) -> ReleasedGradient:
        found = self._tombstones.get(id(parameter))
        if found is None or not found.stands_for(parameter):
            words = partial(_words, steps.name_of(parameter), self._of)
            found = self._tombstones[id(parameter)] = ReleasedGradient(parameter, words)
        return found

    # ------------------------------------------------------------------------------------------- the user's `step()`

    def check_step(self) -> None:
        """Raise if a user's `step()` cannot follow.

        Raises:
            UnsupportedError: It would find that nothing was released.
        """
        if self._norms is not None or not self._is_last:
            what = "last_microbatch() was not called" if self._norms is None else "clip_norm() was not called"
            raise UnsupportedError(f"{self._of}.step(): {what} before the last backward, so it released nothing.")

    def end_step(self, optimizer: Optimizer) -> None:
        """Take note that a user's `step()` is over."""
        self._most_norm = None
        self._is_last = not self._accumulates
        self._waiting.forget()
        self._watch(optimizer)  # parameters that were added since


class ReleasingHook:
    """A hook of parameters, which runs when autograd has added a gradient. It does not own the release.

    Args:
        release: Releases their gradients.
        may_wait: Whether these are among those that a plan counts because they may wait.
    """

    __slots__ = ("_may_wait", "release")

    def __init__(self, release: GradientRelease, *, may_wait: bool = False) -> None:
        self.release = ref(release)
        self._may_wait = may_wait

    @property
    def frees_gradient(self) -> bool:
        """Whether no gradient remains from one backward to the next."""
        return (own := self.release()) is not None and own.frees_gradients(may_wait=self._may_wait)

    @outside_graphs
    def __call__(self, parameter: Tensor) -> None:
        """Release the gradient."""
        if (own := self.release()) is not None:
            own.complete(parameter)


def _words(parameter: str, optimizer: str) -> str:
    return (
        f"the gradient of {parameter} is read, and it was released: {optimizer} has made the parameter's step in the "
        "backward, and the gradient is gone (torchremat.release_gradients). What needs all gradients first cannot be "
        "honoured: clipping by the norm of all (two passes can: `measured_norms()` and `clip_norm()`; or say "
        "`clip_value=`), a loss scaler's search for infinities, zero_grad(set_to_none=False), another backward without "
        "zero_grad() (say `accumulates=True`; or `requires_grad_(False)` on it for the loss of another optimizer)."
    )


def release_gradients(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    accumulates: bool = False,
    clip_value: float | None = None,
    batch_bytes: int | None = None,
) -> GradientRelease:
    """Let each parameter step when its gradient is complete in the backward, and free the gradient.

    The training loop stays as it is. `optimizer.step()` steps on what has a gradient still and runs the hooks,
    `zero_grad()` does what it did; the optimizer, its state and its schedulers are untouched. A step is bit for bit the
    plain one; what needs all gradients at once raises.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with release_gradients(model, optimizer):
    ...     model(torch.ones(3, 2)).sum().backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()

    Args:
        model: The model, as it is called.
        optimizer: Steps on its parameters; a plain one, not one around others.
        accumulates: Whether several backwards come before each step. Only the last one releases, and
            `last_microbatch()` says before it that it is the last.
        clip_value: As of `clip_grad_value_`: the most that an element of a gradient may be, in both directions.
        batch_bytes: Gradients wait until so many bytes have come together, and then step and go together. Fewer and
            larger parts take less time, and need so many bytes more. A thousandth of the bytes of all parameters if not
            given, so that biases and norms wait for matrices, and 0 if state is in a store; with 0 none waits.

    Raises:
        UnsupportedError: The step of this optimizer cannot be made in parts; a hook runs before its step; the model is
            a DistributedDataParallel, whose buckets hold all gradients; its gradients are released already.
    """
    check_flags(accumulates=accumulates)
    if clip_value is not None and not clip_value > 0:
        raise UnsupportedError(f"clip_value={clip_value!r}: expected a number above 0.")
    if batch_bytes is not None and (not isinstance(batch_bytes, int) or batch_bytes < 0):  # pyright: ignore[reportUnnecessaryIsInstance]  user input
        raise UnsupportedError(f"batch_bytes={batch_bytes!r}: expected a number of bytes, 0 or more.")
    _check_reduction(parameters_of([optimizer]))
    steps = partial_steps(optimizer)
    try:
        if steps.release is not None:
            raise UnsupportedError(f"release_gradients: the gradients of this {steps.name} are released already.")
        if len(optimizer._optimizer_step_pre_hooks) > 1:
            raise UnsupportedError(
                f"release_gradients: {steps.name} has a hook that runs before its step. Parameters would have been "
                "written by then, and gradients be gone."
            )
        shared = [one for one in parameters_of([optimizer]) if releases_of(one)]
        if shared:
            raise UnsupportedError(
                f"release_gradients: {len(shared)} parameters of this {steps.name} are another optimizer's as well, "
                "whose gradients are released."
            )
        steps.names |= {id(one): name for name, one in model.named_parameters()}
        steps.release = GradientRelease(
            steps, optimizer, accumulates=accumulates, clip_value=clip_value, batch_bytes=batch_bytes
        )
    except BaseException:
        steps.end()
        raise
    return steps.release


def last_microbatch(optimizer: Optimizer) -> None:
    """Declare that the next backward is the last one before `optimizer.step()`, under a plan with `accumulates=True`.

    If the plan does not release gradients, nothing has to be declared.

    Raises:
        UnsupportedError: Gradients are released, and `accumulates=True` was not said.
    """
    steps = steps_in_parts(optimizer)
    if steps is not None and steps.release is not None:
        steps.release.last_microbatch()


def _check_reduction(parameters: Sequence[Tensor]) -> None:
    if is_reduced_in_buckets(parameters):
        raise UnsupportedError(
            "release_gradients: a DistributedDataParallel has these parameters. It reduces gradients in "
            "buckets, after they could step, and its buckets keep the memory of all gradients from step to step: with "
            "`gradient_as_bucket_view=True` they are the gradients, and there is nothing more to free. FSDP2 "
            "(`fully_shard`) reduces shard by shard, and is supported."
        )


def releases_of(parameter: Tensor) -> list[GradientRelease]:
    """Return what releases the gradient of a parameter, if anything does."""
    hooks: dict[int, object] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    found = [one.release() for one in hooks.values() if isinstance(one, ReleasingHook)]
    return [one for one in found if one is not None]
