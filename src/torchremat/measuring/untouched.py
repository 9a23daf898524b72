"""`untouched`: run a user's training step without side effects.

Restored, whether the block ends or raises (KeyboardInterrupt included; one that comes during the restore waits):

    gradients        the same `.grad` objects with the same values; see NOTE [ Gradients at the beginning of a step ];
                     likewise sums that FSDP2 has not reduced yet
    buffers          the same objects, values and versions; buffers assigned or registered in the block are dropped
    RNG              torch on the CPU and on every CUDA device, generators that the modules reach, Python's `random`,
                     NumPy's global generator
    modules          training flags, attributes, children, hooks, and objects reachable from them: the same objects
    optimizer        the same: wrapped optimizers, options, state; so learning rates, and a scheduler that a hook runs
    reductions       the state of communication hooks, with its tensors; buckets that no training step has made
    the step         everything else that it reaches, without iterators: lists, attributes, closures, global names
    parameters       `requires_grad`, hooks; values as `writes` describes, else an error is raised
    shards           parameters gathered by FSDP2 are freed, so that each run begins as the first step did

An optimizer that steps in the block is refused before it has written anything.

Not restored: the tensors that a lazy module makes in its first forward, a tensor with a graph that an attribute held
and no longer holds, containers of more than a thousand items that the step reaches, generators that the step made
itself, an iterator, which has advanced.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from torchremat._compat.accelerators import accelerators
from torchremat._compat.data_parallel import forgetting
from torchremat._compat.sharding import reshard, unreduced_gradients_aside
from torchremat.measuring.communication import bucket_views, communication_hooks
from torchremat.measuring.interrupts import uninterrupted
from torchremat.measuring.optimizers import parameters_of, refusing_steps
from torchremat.measuring.storages import storages_in
from torchremat.measuring.writes import Known, Looking, Writes, hooked, tensors_of
from torchremat.state.reach import reach
from torchremat.state.snapshot import Snapshot
from torchremat.state.world import Reaching
from torchremat.tensors.copies import same_bits
from torchremat.tensors.parts import bytes_of, is_wrapper
from torchremat.tensors.versioned import Versioned


class StateBefore:
    """The state of models, an optimizer and tensors before a step, found by following all references.

    It is the same before each of several runs that nothing comes between: every run ends with all of it restored.

    Args:
        models: The models.
        optimizer: Its options and its state.
        tensors: Further tensors.

    Attributes:
        world: What was reached, without the tensors that have a graph: the step may free them.
        leaves: The leaves that backward may give a gradient to.
        hooked: Tensors that hooks of these leaves, and those of reductions, may write in a backward.
        buffers: The buffers of all modules.
        stays: Whether it is the same after a run; not if a lazy module makes its parameters in it.
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, tensors: Sequence[Tensor]
    ) -> None:
        self.world = world = Reaching()
        hooks = communication_hooks(models)
        reach(world, [*hooks, *([] if optimizer is None else [optimizer])], are_whole=True)
        reach(world, [*models, *tensors, *world.proxied])  # a wrapper may reach its trainer, and run its hooks
        reshard(world.modules)  # an earlier forward may have had no backward, and then other tensors are the parameters
        self.leaves = gradient_leaves(models, optimizer, tensors)
        self.hooked = [*hooked(self.leaves), *tensors_of(hooks)]
        self.buffers = [one for module in world.modules for one in module.buffers(recurse=False)]
        self.stays = not world.waits
        self._forgetting = forgetting(world.modules)
        self._random = RandomNumbers()
        self._states = [(generator, generator.get_state()) for generator in world.generators]
        self._snapshot = Snapshot(world, backs_up=False)
        self._copies = Buffers(world.modules)
        world.tensors = [one for one in world.tensors if one.is_leaf]

    @contextmanager
    def restored(self) -> Generator[None]:
        """Restore it after the block."""
        # Each part separately, so that the others are restored if one cannot be.
        with ExitStack() as stack:
            stack.callback(reshard, self.world.modules)
            for forget in self._forgetting:
                stack.callback(forget)
            stack.callback(self._random.put_back)
            for generator, state in self._states:
                stack.callback(generator.set_state, state)
            stack.callback(self._snapshot.put_back)
            stack.callback(self._copies.put_back)
            yield


@contextmanager
def untouched(
    model: nn.Module | Iterable[nn.Module] | None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tensors: Iterable[Tensor] = (),
    step: Callable[..., object] | None = None,
    known: Known | None = None,
    looks: bool | Literal["told"] = False,
    but: Sequence[torch.optim.Optimizer] = (),
    before: StateBefore | None = None,
    accumulates: bool | None = None,
) -> Generator[Looking | None]:
    """Set gradients aside for the block, and afterwards restore all state that the step may have changed; see above.

    Args:
        model: The model, or several, or None.
        optimizer: Its parameters are treated like the model's; they may be different ones.
        tensors: Further tensors; the leaves among them that require grad are treated like parameters.
        step: The step, if there is one: the containers that it reaches and takes from are restored.
        known: The tensors that the step writes, known from earlier runs.
        looks: Whether the operators of the block may be intercepted, to learn which tensors the step writes; `"told"`
            if a mode of the caller tells each of them to the `Looking` that is yielded, if one is.
        but: The optimizers that may step in the block.
        before: The state of the same models, optimizer and tensors, if it is known already.
        accumulates: Whether all leaves begin with a gradient; None for those that have one now.

    Raises:
        UnsupportedError: In the step of an optimizer.
        StepError: The block wrote to a tensor that is not copied.
    """
    models, tensors = [model] if isinstance(model, nn.Module) else list(model or ()), list(tensors)
    before = before or StateBefore(models, optimizer, tensors)
    world, modules, leaves = before.world, before.world.modules, before.leaves
    beside = Reaching()
    beside.leaves_iterators = True
    beside.skip_all_of(world)
    reach(beside, [] if step is None else [step])
    reshard(modules)
    own = set(map(id, leaves))
    others = [one for one in world.tensors if id(one) not in own]
    # Each part enters separately, so that an interrupt in the middle undoes the parts before it.
    with ExitStack() as stack:
        stack.enter_context(before.restored())
        stack.callback(Snapshot(beside, backs_up=False).put_back)
        stack.enter_context(unreduced_gradients_aside(modules))
        known = known or Known()
        stack.enter_context(_gradients(leaves, others, modules, known, steps=bool(but), accumulates=accumulates))
        stack.enter_context(refusing_steps([*leaves, *others], but))
        names = partial(_name_of, models)
        writes = Writes([world, beside], before.buffers, before.hooked, known=known, names=names, looks=bool(looks))
        stack.enter_context(writes.undone())
        looking = writes.looking
        if looking is not None and looks != "told":
            stack.enter_context(looking)
        del world, beside, writes, before  # they hold tensors that the step may free
        try:
            yield looking
        except BaseException:
            with uninterrupted():
                stack.__exit__(*sys.exc_info())
            raise
        with uninterrupted():
            stack.close()


def gradient_leaves(
    models: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None, tensors: Iterable[Tensor] = ()
) -> list[Tensor]:
    """Return the leaves that backward may give a gradient to, each once, in the order of the arguments."""
    candidates: list[Tensor] = [parameter for model in models for parameter in model.parameters()]
    candidates += parameters_of([] if optimizer is None else [optimizer])
    candidates.extend(tensors)
    return [tensor for tensor in {id(t): t for t in candidates}.values() if tensor.is_leaf and tensor.requires_grad]


def have_gradients(tensors: Iterable[Tensor]) -> bool:
    """Return whether a step that begins now would begin with a gradient of a leaf among tensors."""
    return any(one.is_leaf and _begins_with_gradient(one, None) for one in tensors)


def frees_gradient(leaf: Tensor) -> bool:
    """Return whether a hook of a leaf frees its gradient as soon as it is complete."""
    hooks: dict[int, object] | None = getattr(leaf, "_post_accumulate_grad_hooks", None)
    return bool(hooks) and any(getattr(hook, "frees_gradient", False) for hook in hooks.values())


# NOTE [ Gradients at the beginning of a step ]
#
# A step begins as the user's does. After `zero_grad()` no leaf has a gradient: backward makes each, and its bytes are a
# part of the step from then on. A leaf that has one now, or all of them if the user's loop accumulates, begin with
# zeros in its place, which backward adds to. An optimizer that steps alone finds zeros as the gradient of each leaf:
# whose gets one may depend on the batch, and state once made stays.


def _begins_with_gradient(leaf: Tensor, accumulates: bool | None) -> bool:
    return (leaf.grad is not None if accumulates is None else accumulates) and not frees_gradient(leaf)


# NOTE [ Sparse gradients ]
#
# The bytes of a sparse gradient depend on the batch, and one that is added to another has the rows of both. So such a
# leaf begins each run without a gradient, even if the loop accumulates. An optimizer that steps alone finds the
# gradient of the last run in its place.


def _is_sparse(leaf: Tensor, sparse: set[int]) -> bool:
    return id(leaf) in sparse or (leaf.grad is not None and leaf.grad.layout is torch.sparse_coo is not leaf.layout)


@contextmanager
def _gradients(
    leaves: list[Tensor],
    others: list[Tensor],
    modules: Sequence[nn.Module],
    known: Known,
    *,
    steps: bool,
    accumulates: bool | None,
) -> Generator[None]:
    """Set aside the gradients of leaves, and restore the gradients of other leaves, which the step may thaw, too."""
    aside = [leaf.grad for leaf in leaves]
    theirs = [(one, one.grad) for one in others]
    embeddings = [one for one in modules if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse]
    weights = {id(weight) for one in embeddings for weight in one._parameters.values()}
    sparse = [leaf for leaf in leaves if _is_sparse(leaf, weights)]
    own = set(map(id, sparse))
    in_buckets = bucket_views(modules) if steps else ()
    stand_ins: list[Tensor] = []
    try:
        for leaf, grad in zip(leaves, aside, strict=True):
            if id(leaf) in own:
                leaf.grad = known.sparse_gradient(leaf) if steps else None
                continue
            begins = _begins_with_gradient(leaf, accumulates)
            like = leaf if grad is None or (is_wrapper(grad) and not is_wrapper(leaf)) else grad
            leaf.grad = None
            if begins or steps:
                leaf.grad = torch.zeros_like(like, requires_grad=False)
                if not begins and id(leaf) not in in_buckets:
                    stand_ins.append(leaf.grad)
        if steps:
            known.note_stand_ins(stand_ins)
        del stand_ins
        yield
        if not steps:
            known.note_sparse(sparse)
    finally:
        for leaf, grad in zip(leaves, aside, strict=True):
            leaf.grad = grad
        for one, grad in theirs:
            if one.grad is not grad:
                one.grad = grad


class Buffers:
    """The buffers of modules as they are now, including non-persistent ones.

    Args:
        modules: Each once; their submodules have to be among them.
        watched: Buffers that are not copied, by id, since they are not expected to change; `written` checks.
    """

    def __init__(
        self, modules: Sequence[nn.Module], watched: Mapping[int, ReferenceType[Tensor]] | None = None
    ) -> None:
        # The table of a ScriptModule is in C++: Python code cannot assign to it either.
        self._tables = [(one, dict(one._buffers)) for one in modules if not isinstance(one, torch.jit.ScriptModule)]
        buffers = {id(one): one for module in modules for one in module.buffers(recurse=False)}
        known = {key for key, found in (watched or {}).items() if found() is buffers.get(key)}
        self._watched = [Versioned(buffers[key]) for key in known]
        kept = [buffer for key, buffer in buffers.items() if key not in known]
        self._copies = [(Versioned(buffer), buffer.detach().clone()) for buffer in kept]

    def held_bytes(self, device: torch.device) -> int:
        """Return the bytes of the copies on a device."""
        here = [copy for _, copy in self._copies if copy.device == device]
        return sum(storage.nbytes() for storage in storages_in(here))

    def written(self) -> list[Tensor]:
        """Return the watched buffers that were written nevertheless."""
        return [one.tensor for one in self._watched if one.is_written]

    def left_alone(self, over_bytes: int) -> dict[int, ReferenceType[Tensor]]:
        """Return the buffers of more than `over_bytes` that have not been written meanwhile, to watch from now on."""
        return {
            id(one.tensor): ref(one.tensor)
            for one in (*self._watched, *(one for one, _ in self._copies))
            if bytes_of(one.tensor) > over_bytes and one.version >= 0 and not one.is_written
        }

    def put_back(self) -> None:
        """Restore the modules' objects, values and versions; buffers added since are dropped."""
        for module, table in self._tables:
            module._buffers.clear()  # `register_buffer` would refuse the name
            module._buffers.update(table)
        for had, copy in self._copies:
            buffer = had.tensor
            if had.is_written or not same_bits(buffer, copy):
                # A user's graph may have saved this buffer. Its values are as before, so neither this write nor the
                # step's writes may count as a change: it is written through `.data`, and the version restored.
                if buffer.shape == copy.shape and buffer.layout is not torch.sparse_coo:
                    buffer.data.copy_(copy)
                else:  # `copy_` would give a sparse `.data` parts of its own
                    buffer.data = copy.clone()  # the copy may be needed again
                had.reset()


def _name_of(models: list[nn.Module], tensor: Tensor) -> str:
    names = (name for model in models for name, one in model.named_parameters() if one is tensor)
    return next((f"`{name}`" for name in names), f"a tensor of shape {tuple(tensor.shape)}")


class RandomNumbers:
    """The states of torch's generators, of the CPU and every CUDA device, of Python's, and of NumPy's global one."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        # A process that has not used a device has no generators there, and asking for them would initialize the device:
        # 0.5 GB on CUDA.
        self._others = [(one, one.generator_states()) for one in accelerators()]
        self._python = random.getstate()
        self._numpy = np.random.get_state()

    def held_bytes(self, device: torch.device) -> int:
        """Return the bytes of the states of torch's generators, which are on the host."""
        if device.type != "cpu":
            return 0
        return self._cpu.nbytes + sum(state.nbytes for _, states in self._others for state in states)

    def have_moved(self) -> bool:
        """Return whether a generator of torch has another state now."""
        pairs = [(torch.get_rng_state(), self._cpu)]
        for accelerator, states in self._others:
            pairs += zip(accelerator.generator_states(), states, strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)

    def put_back(self) -> None:
        """Restore these states of the generators."""
        torch.set_rng_state(self._cpu)
        for accelerator, states in self._others:
            accelerator.set_generator_states(states)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


@contextmanager
def written_back(tensors: Iterable[Tensor]) -> Generator[None]:
    """Restore the values and versions of tensors after the block. The copies are in host memory."""
    copies = [(Versioned(tensor), tensor.detach().to("cpu", copy=True)) for tensor in tensors]
    try:
        yield
    finally:
        with uninterrupted():
            for had, copied in copies:
                had.tensor.data.copy_(copied)
                had.reset()
